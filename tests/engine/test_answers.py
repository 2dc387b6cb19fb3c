"""What each token of an answer reads, where a part of the model is done with the prompt: an encoder, a tower."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import autoshard
from autoshard.cluster.topology import Topology
from autoshard.engine.generation import price_generation, weight_bytes
from autoshard.engine.local import cached_elements, sums_of
from autoshard.engine.memory import live_elements, unshared_elements
from autoshard.engine.recipe import Recipe
from autoshard.engine.timing import Card
from autoshard.plan.workload import Workload
from autoshard.search.traced import trace
from tests.models.hf import DECODERS, build

WIDTH, WORDS, CODES, NEW = 16, 32, 24, 8
CARD = Card(generation="sm80", flops_per_second=312e12, bytes_per_second=2e12, memory_bytes=80 * 2**30)
ONE = Topology(hosts=1, devices_per_host=1, local_bytes_per_second=300e9, network_bytes_per_second=25e9)
TWO = Topology(hosts=1, devices_per_host=2, local_bytes_per_second=300e9, network_bytes_per_second=25e9)


class Layer(nn.Module):
    """Attention over itself and, if it is given one, over a memory."""

    def __init__(self, causal, crossed):
        super().__init__()
        self.causal = causal
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.pair = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.cross = Layer(False, False) if crossed else None

    def forward(self, x, memory=None):
        key, value = self.pair(x if memory is None or self.cross else memory).chunk(2, -1)
        heads = (one.unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.query(x), key, value))
        made = scaled_dot_product_attention(*heads, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + self.out(made)
        return x if self.cross is None else self.cross(x, memory)


class Pair(nn.Module):
    """An encoder of three layers, and a decoder of two that reads it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([Layer(False, False) for _ in range(3)])
        self.decoder = nn.ModuleList([Layer(True, True) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids, decoder_input_ids):
        memory, x = self.table(input_ids), self.table(decoder_input_ids)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            x = layer(x, memory)
        return self.head(x)


class Seeing(nn.Module):
    """A tower for images, of which the decoder is given the rows before its tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.tower = nn.ModuleList([Layer(False, False) for _ in range(3)])
        self.layers = nn.ModuleList([Layer(True, False) for _ in range(2)])

    def forward(self, input_ids, pixels):
        for layer in self.tower:
            pixels = layer(pixels)
        x = torch.cat([pixels, self.table(input_ids)], 1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tokens(count):
    return torch.zeros(2, count, dtype=torch.long)


@pytest.mark.parametrize(
    ("model", "inputs", "read", "rows"),
    [  # of the decoder: 4 matrices of a layer, of an attention over the encoder only those of query and result
        (Pair(), {"input_ids": tokens(CODES), "decoder_input_ids": tokens(CODES)}, 2 * 6, NEW + CODES),
        # what a prompt adds to its own tokens, an answer is taken to have in proportion
        (Seeing(), {"input_ids": tokens(CODES), "pixels": torch.zeros(2, 5, WIDTH)}, 2 * 4, 29 + NEW * 29 / CODES),
    ],
    ids=["encoder", "tower"],
)
def test_what_is_done_with_the_prompt_is_not_read_for_each_token(model, inputs, read, rows):
    work = trace(model, inputs, Workload(new_tokens=NEW)).work
    layers = [block for block in work.blocks if block.layer]
    assert [sums_of(block).once for block in layers] == [True, False]
    recipe = Recipe(stack="compiled")
    elements = sum(block.count * weight_bytes(block, recipe, 1) for block in layers) / recipe.precision.parameters
    assert elements == read * WIDTH * WIDTH and weight_bytes(layers[0], recipe, 1) == 0
    answer = price_generation(work, recipe, CARD, ONE, batch=2, prompt_tokens=CODES, new_tokens=NEW)
    cache = answer.memory.curve[-1].bytes["cache"]
    assert cache == pytest.approx(2 * 2 * 2 * WIDTH * rows * recipe.precision.compute)
    assert sum(cached_elements(layers[0])) == 0


def test_attention_is_half_the_work_only_where_it_is_causal():
    work = trace(Pair(), {"input_ids": tokens(CODES), "decoder_input_ids": tokens(CODES)}, Workload()).work
    found = [[one.causal for one in sums_of(block).attentions] for block in work.blocks if block.layer]
    assert found == [[False], [True, False]]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "deepseek-v3", "mamba", "jamba"])
def test_a_cache_is_what_the_model_keeps(name):
    """Windows, latents, states, attention of products: what a recorded answer leaves, priced without recording it."""
    case = next(case for case in DECODERS if case.name == name)
    model, inputs = case.build(), case.example((2, CODES))  # with use_cache=False, which generate() turns on
    work = trace(model, inputs, Workload(new_tokens=NEW)).work
    answer = price_generation(work, Recipe(), CARD, ONE, batch=2, prompt_tokens=CODES, new_tokens=NEW)
    del inputs["use_cache"]
    kept = autoshard.profile(model, inputs, workload=Workload(new_tokens=NEW)).cache_bytes
    cache = answer.memory.curve[-1].bytes["cache"] / answer.recipe.precision.compute * 4
    assert cache == pytest.approx(kept, rel=0.04)  # the last token is not kept


def llama(**settings):
    size = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    model = build("LlamaForCausalLM", "LlamaConfig", {**size, "vocab_size": 96, **settings})
    return trace(model, {"input_ids": tokens(CODES)}, Workload(new_tokens=NEW)).work


@pytest.mark.parametrize(("heads", "part"), [(4, 2), (1, 1)])
def test_ranks_divide_a_cache_only_where_they_divide_keys_and_values(heads, part):
    def cache(tp, topology):
        recipe = Recipe(tp=tp, stack="compiled")
        answer = price_generation(work, recipe, CARD, topology, batch=2, prompt_tokens=CODES, new_tokens=NEW)
        return answer.memory.curve[-1].bytes["cache"]

    work = llama(num_key_value_heads=heads)
    assert cache(1, ONE) == part * cache(2, TWO) > 0


def test_ranks_have_a_part_of_tied_weights_once():
    work = llama(tie_word_embeddings=True)
    recipe = Recipe(tp=2)
    answer = price_generation(work, recipe, CARD, TWO, batch=2, prompt_tokens=CODES, new_tokens=NEW)
    stage = [(block, block.count) for block in work.blocks]
    elements = sum(live_elements(stage, recipe))
    assert 2 * elements == work.parameters + 7 * 32  # norms are whole on each rank
    assert answer.memory.curve[0].bytes["weights"] == elements * recipe.precision.parameters
    assert all(sum(unshared_elements(block, recipe)) >= 0 for block in work.blocks)


def test_of_experts_as_many_are_read_with_attention_of_products():
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = {**size, "num_key_value_heads": 2, "vocab_size": 96, "num_local_experts": 8, "num_experts_per_tok": 2}
    read = []
    for eager in (False, True):
        model = build("MixtralForCausalLM", "MixtralConfig", config, eager)
        work = trace(model, {"input_ids": tokens(CODES)}, Workload(new_tokens=NEW)).work
        read.append(sum(weight_bytes(block, Recipe(), 1) for block in work.blocks))
    assert read[0] == read[1]


@pytest.mark.parametrize(
    ("between", "kernels"),
    [(torch.relu, 1), (lambda x: x.sort(-1).values, 3), (lambda x: x.cumsum(-1), 3), (lambda x: x.topk(WIDTH)[0], 3)],
)
def test_what_orders_or_counts_elements_is_a_kernel_of_its_own(between, kernels):
    class Chain(nn.Module):
        def forward(self, x):
            return torch.exp(between(x * 2)) + 1

    work = trace(Chain(), {"x": torch.zeros(2, 4, WIDTH)}, Workload()).work
    assert [sums_of(block).fused.kernels for block in work.blocks] == [kernels]

"""Inputs derived from a config and a workload; the cached step after a prompt. Tiny models, random weights."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError
from autoshard.plan.workload import Workload
from autoshard.profile.measure import profile_graph

TEXT = {
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def llama(**extra):
    config = transformers.LlamaConfig(**TEXT, num_key_value_heads=2, **extra)
    return transformers.LlamaForCausalLM(config).eval()


def encoder_decoder():
    config = transformers.T5Config(
        vocab_size=100, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def vision():
    config = transformers.ViTConfig(
        **{k: v for k, v in TEXT.items() if k not in ("vocab_size", "max_position_embeddings")},
        image_size=32,
        patch_size=8,
    )
    return transformers.ViTModel(config).eval()


def speech():
    config = transformers.WhisperConfig(
        vocab_size=100,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        num_mel_bins=8,
        max_source_positions=20,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    "build, expected",
    [
        (llama, {"input_ids": (3, 7), "attention_mask": (3, 7)}),
        (encoder_decoder, {"input_ids": (3, 7), "attention_mask": (3, 7), "decoder_input_ids": (3, 7)}),
        (vision, {"pixel_values": (3, 3, 32, 32)}),
        (speech, {"input_features": (3, 8, 40), "decoder_input_ids": (3, 7)}),
    ],
)
def test_derived_from_signature_config_and_workload(build, expected):
    with torch.device("meta"):
        model = build()
    graph = capture(model, workload=Workload(batch_size=3, sequence_length=7))
    said = ", ".join(f"{name} {shape}" for name, shape in expected.items())
    assert graph.notes[-1] == f"inputs derived from the config: {said}" or build is speech
    shapes = [graph.values[value].shape for value in graph.inputs]
    assert sorted(shapes) == sorted(expected.values())
    assert graph.level == "fake"


def test_labels_in_training_and_limits_of_the_model():
    graph = capture(llama(), workload=Workload(mode="training"))
    assert [graph.values[value].shape for value in graph.inputs] == [(1, 64)] * 3  # ids, mask, labels
    assert graph.values[graph.outputs[0]].shape == ()  # the loss


class Configured(nn.Module):
    def __init__(self, **config) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)

    def forward(self, graph_nodes):
        return graph_nodes


@pytest.mark.parametrize(
    "model, said",
    [
        (nn.Linear(2, 2), "Linear has no config to derive inputs from: pass inputs="),
        (Configured(vocab_size=3), "does not say what its forward's argument 'graph_nodes' looks like: pass inputs="),
    ],
)
def test_refused_when_nothing_is_known(model, said):
    with pytest.raises(CaptureError, match=said):
        capture(model)


def test_fewer_tokens_where_the_limit_is_one_of_positions():
    """Positions of this model begin after that of the padding token, so it takes fewer tokens than it has of them."""
    config = transformers.RobertaConfig(**TEXT)
    model = transformers.RobertaForMaskedLM(config).eval()
    assert "inputs derived from the config: input_ids (1, 32), attention_mask (1, 32)" in capture(model).notes
    with pytest.raises(CaptureError, match="no inputs that the config suggests fit"):
        capture(model, workload=Workload(sequence_length=64))  # what was asked for is not changed


def cache_bytes(graph):
    return sum(graph.storages[s].nbytes for s in {graph.values[value].storage for value in graph.state})


def test_a_forward_that_returns_a_cache_has_state():
    graph = capture(llama(), torch.ones(2, 5, dtype=torch.long))
    assert len(graph.state) == 4 and not set(graph.state) & set(graph.outputs)
    assert (
        cache_bytes(graph) == 2 * 2 * (2 * 2 * 5 * 4) * 4
    )  # layers, keys and values, (batch, heads, length, size), float
    owners = {graph.calls[graph.ops[graph.values[value].op].call].path for value in graph.state}
    assert owners == {"model.layers.0.self_attn", "model.layers.1.self_attn"}


def test_decode_is_one_step_on_the_longest_context():
    ids = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5, dtype=torch.long)}
    graph = capture(llama(), ids, workload=Workload(new_tokens=4))
    names, begins, ends = zip(*graph.phases, strict=True)
    assert names == ("forward", "context", "decode")
    assert begins == (0, *ends[:-1]) and ends[-1] == len(graph.ops)
    assert graph.uncounted == range(begins[1], ends[1])
    embeds = [op for op in graph.ops if op.target is torch.ops.aten.embedding.default]
    lengths = [graph.values[op.outputs[0]].shape[1] for op in embeds]
    assert lengths == [5, 6, 1, 1]  # the prompt; a context and a step that stand for the steps left out; the last step
    assert embeds[-2].index < begins[2] <= embeds[-1].index
    assert cache_bytes(graph) == 2 * 2 * (2 * 2 * 8 * 4) * 4  # the prompt, and the new tokens but the last
    assert graph.values[graph.outputs[0]].shape == (2, 1, 100)  # only the last logits, as generate asks


def test_what_only_makes_the_context_counts_nothing():
    """The work is that of a prompt and a step, however many tokens are generated; only the step reads more."""
    ids = {"input_ids": torch.ones(2, 5, dtype=torch.long), "attention_mask": torch.ones(2, 5, dtype=torch.long)}

    def measured(new_tokens):
        workload = Workload(new_tokens=new_tokens)
        return profile_graph(capture(llama(), ids, workload=workload), workload)

    two, ten = measured(2), measured(10)
    assert ten.graph.uncounted and not two.graph.uncounted
    assert two.cache_bytes == 2 * 2 * (2 * 2 * 6 * 4) * 4 and ten.cache_bytes == 2 * 2 * (2 * 2 * 14 * 4) * 4
    assert [m.calls for m in two.modules] == [m.calls for m in ten.modules]
    assert two.flops <= ten.flops < 1.1 * two.flops
    assert two.bytes_moved < ten.bytes_moved < 1.1 * two.bytes_moved


def test_the_work_of_a_step_grows_with_the_context():
    """By the products of one query with each key and value more, in every layer and head."""
    ids = {"input_ids": torch.ones(2, 5, dtype=torch.long)}

    def step_flops(new_tokens):
        graph = capture(llama(), ids, workload=Workload(new_tokens=new_tokens))
        begin = graph.phases[-1][1]
        return sum(op.flops for op in graph.ops[begin:])

    config = llama().config
    more = config.num_hidden_layers * 2 * 2 * (2 * config.hidden_size * 30)  # layers, products, two FLOPs each, rows
    assert step_flops(40) - step_flops(10) == more


@pytest.mark.parametrize("build", [encoder_decoder, speech])
def test_decode_of_encoder_decoders_runs_the_encoder_with_the_prompt(build):
    graph = capture(build(), workload=Workload(batch_size=2, sequence_length=6, new_tokens=3))
    assert [name for name, _, _ in graph.phases] == ["forward", "context", "decode"]
    encoders = [call for call in graph.calls if call.path in ("encoder", "model.encoder")]
    assert [call.begin in graph.uncounted for call in encoders] == [False, True]
    assert encoders[-1].end <= graph.phases[-1][1]
    assert graph.state


def test_no_cached_step_is_noted():
    graph = capture(vision(), workload=Workload(new_tokens=2))
    assert len(graph.phases) == 1 and any("no cached step" in note for note in graph.notes)

"""Small models with the cuts that planning would find in them, written by hand."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from autoshard.plan import Plan, PlanDevice
from autoshard.plan.sharding import ATTENTION, Action, Cut, Scale, Shard, even_shares
from autoshard.plan.workload import Workload


@dataclass(frozen=True)
class Case:
    """A model, its inputs, its cuts for a number of ranks, and the collectives it needs: forward, with gradients."""

    make: object
    inputs: tuple
    cuts: object
    forward: int
    both: int


def enter(module, function="linear", argument="0.0"):
    return Action(kind="copy_to", module=module, function=function, occurrence=0, argument=argument)


def reduce(module, function="linear", occurrence=0, addend=""):
    return Action(kind="reduce", module=module, function=function, occurrence=occurrence, addend=addend)


def shard(name, dim, axis):
    return Shard(name=name, dim=dim, axis=axis)


def uneven_shares(size, ranks):
    """The first rank gets what the others leave; they get less than their share."""
    others = size // (ranks + 1)
    return size - others * (ranks - 1), *[others] * (ranks - 1)


def cut_plan(cuts, kind="cpu", **changes):
    """A plan of these cuts, with a device for each rank."""
    devices = tuple(PlanDevice(name=f"{kind}:{rank}", memory_bytes=1 << 30) for rank in range(cuts[0].degree))
    settings = {"strategy": "column-parallel", "objective": "latency", "workload": Workload(), **changes}
    return Plan(devices=devices, placements={"": devices[0].name}, cuts=cuts, **settings)


class Perceptron(nn.Module):
    """Two layers with biases, twice."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 24), "down": nn.Linear(24, 8)}) for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = x + block["down"](F.gelu(block["up"](x)))
        return x


def columns(size, ranks, blocks=("",), *, up="up", down="down", divide=even_shares):
    """The cut of two layers over the units between them."""
    axis = f"*{size}"
    return Cut(
        blocks=blocks,
        size=size,
        shares=divide(size, ranks),
        shards=(shard(f"{up}.weight", 0, axis), shard(f"{up}.bias", 0, axis), shard(f"{down}.weight", 1, axis)),
        actions=(enter(up), reduce(down, addend="0.2")),
    )


def cut_perceptron(ranks, divide=even_shares):
    return (columns(24, ranks, ("blocks.0", "blocks.1"), divide=divide),)


class Attention(nn.Module):
    """Grouped heads, a norm over each head, sizes in a config that others share, maps handed out if asked."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.groups = config.groups
        width = config.heads * 4
        self.q, self.k = nn.Linear(8, width, bias=False), nn.Linear(8, config.groups * 4, bias=False)
        self.v, self.o = nn.Linear(8, config.groups * 4), nn.Linear(width, 8, bias=False)
        self.norm = nn.RMSNorm(4)
        nn.init.normal_(self.norm.weight)

    def forward(self, x, bias=None, past=None):
        batch, length, _ = x.shape
        q = self.norm(self.q(x).view(batch, length, self.config.heads, 4)).transpose(1, 2)
        k = self.norm(self.k(x).view(batch, length, self.groups, 4)).transpose(1, 2)
        v = self.v(x).view(batch, length, self.groups, 4).transpose(1, 2)
        repeats = self.config.heads // self.groups
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        weights = q @ k.transpose(-1, -2)
        weights = (weights if bias is None else weights + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, length, -1)), weights


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(heads=12, groups=6)
        self.layers = nn.ModuleList([Attention(self.config), Attention(self.config)])
        self.bias = nn.Parameter(torch.randn(12, 5, 5))

    def forward(self, x):
        maps = []
        for layer in self.layers:
            y, weights = layer(x, bias=self.bias)
            x = x + y
            maps.append(weights)
        return {"x": x, "maps": maps, "heads": self.config.heads}


def cut_decoder(ranks, divide=even_shares):
    shares = divide(6, ranks)
    return (
        Cut(
            blocks=("layers.0", "layers.1"),
            size=6,
            shares=shares,
            shards=(
                shard("q.weight", 0, "*6x8"),
                shard("k.weight", 0, "*6x4"),
                shard("v.weight", 0, "*6x4"),
                shard("v.bias", 0, "*6x4"),
                shard("o.weight", 1, "*6x8"),
            ),
            actions=(
                *(enter(name) for name in "qkv"),
                Action(kind="slice", module="", argument="0.1", dim=0, axis="*6x2"),
                reduce("o"),
                Action(kind="gather", module="", argument="1", dim=1, axis="*6x2"),
            ),
            scales=(
                Scale(module="", attribute="config.heads", value=12, local=tuple(2 * share for share in shares)),
                Scale(module="", attribute="groups", value=6, local=shares),
            ),
            summed=("norm.weight",),
        ),
    )


class Words(nn.Module):
    """A table that is looked up and, tied, multiplied with; `padding_idx` is never learned from the lookup."""

    def __init__(self, words=25):
        super().__init__()
        self.embed = nn.Embedding(words, 8, padding_idx=3)
        self.head = nn.Linear(8, words, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids).tanh())


def cut_words(ranks, divide=even_shares, words=25):
    axis = f"*{words}"
    return (
        Cut(
            blocks=("",),
            size=words,
            shares=divide(words, ranks),
            shards=(shard("embed.weight", 0, axis), shard("head.weight", 0, axis)),
            actions=(
                Action(kind="lookup", module="embed", function="embedding", occurrence=0, axis=axis),
                enter("head"),
                Action(kind="gather", module="head", function="linear", occurrence=0, dim=-1, axis=axis),
            ),
        ),
    )


class Fused(nn.Module):
    """q, k and v from one `addmm`; in the second layer k and v are the same for all heads.

    The tanh is there because a bias of k alone has no gradient but rounding, which AdamW makes large.
    """

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.ParameterDict({"w": torch.randn(8, 72) / 4, "b": torch.randn(72)})
        self.out = nn.ParameterDict({"w": torch.randn(24, 8) / 4, "b": torch.randn(8)})
        self.second = nn.Linear(8, 32)
        self.back = nn.Linear(24, 8)
        self.heads = 6

    def forward(self, x):
        batch, length, _ = x.shape
        fused = torch.addmm(self.first["b"], x.view(-1, 8), self.first["w"]).tanh().view(batch, length, -1)
        q, k, v = (part.view(batch, length, self.heads, 4).transpose(1, 2) for part in fused.chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch * length, -1)
        x = x + torch.addmm(self.out["b"], mixed, self.out["w"]).view(batch, length, -1)
        q, k, v = self.second(x).tanh().split([self.heads * 4, 4, 4], -1)
        q = q.view(batch, length, self.heads, 4).transpose(1, 2)
        mixed = (q @ k.unsqueeze(1).transpose(-1, -2)).softmax(-1) @ v.unsqueeze(1)
        return x + self.back(mixed.transpose(1, 2).reshape(batch, length, -1)) * self.scale


def cut_fused(ranks, divide=even_shares):
    shares = divide(6, ranks)
    return (
        Cut(
            blocks=("",),
            size=6,
            shares=shares,
            shards=(
                shard("first.w", 1, "(*6x4|*6x4|*6x4)"),
                shard("first.b", 0, "(*6x4|*6x4|*6x4)"),
                shard("out.w", 0, "*6x4"),
                shard("second.weight", 0, "(*6x4|4|4)"),
                shard("second.bias", 0, "(*6x4|4|4)"),
                shard("back.weight", 1, "*6x4"),
            ),
            actions=(
                enter("", "addmm", "0.1"),
                reduce("", "addmm", 1, addend="0.0"),
                enter("second"),
                reduce("back", addend="0.2"),
            ),
            scales=(Scale(module="", attribute="heads", value=6, local=shares),),
        ),
    )


class Means(nn.Module):
    """Statistics over the cut dimension, and a convolution with a bias after it."""

    def __init__(self):
        super().__init__()
        self.up = nn.Conv1d(4, 12, 3, padding=1)
        self.down = nn.Conv1d(12, 4, 3, padding=1)

    def forward(self, x):
        h = self.up(x).relu()
        power = h.square().mean(1, keepdim=True)
        total = torch.einsum("bcl->bl", h)
        return self.down(h) * torch.rsqrt(power + 1e-5) + total.unsqueeze(1)


def cut_means(ranks, divide=even_shares):
    return (
        Cut(
            blocks=("",),
            size=12,
            shares=divide(12, ranks),
            shards=(shard("up.weight", 0, "*12"), shard("up.bias", 0, "*12"), shard("down.weight", 1, "*12")),
            actions=(
                enter("up", "conv1d"),
                Action(kind="mean", module="", function="mean", occurrence=0, gathered=True),
                reduce("", "einsum"),
                reduce("down", "conv1d", addend="0.2"),
            ),
        ),
    )


class Dropped(nn.Module):
    """Dropout inside of the cut and outside of it."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        inside = F.dropout(self.up(x).transpose(0, 1), 0.3, self.training).transpose(0, 1)
        return F.dropout(self.down(inside), 0.5, self.training)


def cut_dropped(ranks, divide=even_shares):
    cut = columns(24, ranks, divide=divide)
    dropout = Action(kind="dropout", module="", function="dropout", occurrence=0, argument="0.0", dim=2, axis="*24")
    return (replace(cut, actions=(*cut.actions, dropout), training=True),)


class DroppedScores(nn.Module):
    """Fused attention that drops: causal with shared heads, and with masks and a scale of its own."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.o = nn.Linear(8, 48), nn.Linear(8, 24), nn.Linear(48, 8)

    def forward(self, x):
        q, k = (one(x).unflatten(-1, (-1, 4)).transpose(1, 2) for one in (self.q, self.k))
        attend = partial(F.scaled_dot_product_attention, q, k, k, dropout_p=0.3 * self.training, enable_gqa=True)
        mask = torch.ones(5, 5, dtype=torch.bool)
        mask[1:, 0] = mask[2] = False
        mixed = attend(is_causal=True) + attend(attn_mask=mask, scale=0.3) + attend(attn_mask=mask.float())
        return self.o(mixed.transpose(1, 2).flatten(-2))


def cut_scores(ranks, divide=even_shares):
    shares = divide(6, ranks)
    shards = (("q.weight", 0, "*6x8"), ("q.bias", 0, "*6x8"), ("k.weight", 0, "*6x4"), ("k.bias", 0, "*6x4"))
    drops = (
        Action(kind="dropout", module="", function=ATTENTION, occurrence=number, dim=1, dims=4, axis="*6x2")
        for number in range(3)
    )
    actions = (enter("q"), enter("k"), *drops, reduce("o", addend="0.2"))
    shards = (*(shard(*one) for one in shards), shard("o.weight", 1, "*6x8"))
    return (Cut(blocks=("",), size=6, shares=shares, shards=shards, actions=actions, training=True),)


def batch(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def make_decoder():
    """A decoder of Transformers with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=60, max_position_embeddings=64, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def decoder_cuts(layers):
    heads = Cut(
        blocks=layers,
        size=2,
        shares=(1, 1),
        shards=(
            shard("self_attn.q_proj.weight", 0, "*2x16"),
            shard("self_attn.k_proj.weight", 0, "*2x8"),
            shard("self_attn.v_proj.weight", 0, "*2x8"),
            shard("self_attn.o_proj.weight", 1, "*2x16"),
        ),
        actions=(
            *(Action(kind="copy_to", module=f"self_attn.{x}_proj", argument="0.0") for x in "qkv"),
            reduce("self_attn.o_proj"),
        ),
    )
    units = Cut(
        blocks=layers,
        size=48,
        shares=(24, 24),
        shards=(
            shard("mlp.gate_proj.weight", 0, "*48"),
            shard("mlp.up_proj.weight", 0, "*48"),
            shard("mlp.down_proj.weight", 1, "*48"),
        ),
        actions=(
            *(Action(kind="copy_to", module=f"mlp.{x}_proj", argument="0.0") for x in ("gate", "up")),
            reduce("mlp.down_proj"),
        ),
    )
    return heads, units


# forward: all-reduces and gathers; both: these and the conjugates in backward, where the input needs a gradient
CASES = {
    "perceptron": Case(Perceptron, (batch(2, 5, 8),), cut_perceptron, 2, 4),
    # per layer: o and the maps; back: one for q, k and v, one for the bias; and the two summed norms
    "attention": Case(Decoder, (batch(2, 5, 8),), cut_decoder, 4, 10),
    "words": Case(Words, (torch.tensor([[1, 3, 24, 7], [0, 3, 12, 13]]),), cut_words, 2, 3),
    "even words": Case(
        partial(Words, 24), (torch.tensor([[1, 3, 23, 7], [0, 3, 12, 13]]),), partial(cut_words, words=24), 2, 3
    ),
    # back: two tensors enter, and the rows of k and v that every rank keeps (weight and bias) are summed
    "fused": Case(Fused, (batch(2, 5, 8),), cut_fused, 2, 6),
    "means": Case(Means, (batch(2, 4, 5),), cut_means, 3, 4),
    "dropout": Case(Dropped, (batch(2, 5, 8),), cut_dropped, 1, 2),
    "dropped scores": Case(DroppedScores, (batch(2, 5, 8),), cut_scores, 1, 2),
}

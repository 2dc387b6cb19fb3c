"""Sequence parallelism: ranks that share matrices divide the tokens between cuts, and every number is as before."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ApplyError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime.cut_state import whole_tensor
from autoshard.runtime.cuts import cut_record
from tests.ranks import run_ranks
from tests.torch_releases import sharded_replicas

WIDTH, TOKENS, SAMPLES = 16, 6, 2


class Shifted(nn.Module):
    """A norm whose weight is one plus its parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    norm = nn.LayerNorm

    def __init__(self):
        super().__init__()
        self.first, self.second = (Shifted() if self.norm is Shifted else self.norm(WIDTH) for _ in range(2))
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x, bias):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class ShiftedNorms(Block):
    norm = Shifted


class NormsBehind(Block):
    def forward(self, x, bias):
        x = self.first(x + self.attention(x))
        return self.second(x + self.mlp(x))


class InPlace(Block):
    def forward(self, x, bias):
        made = self.mlp(self.second(x))
        made += self.attention(self.first(x))
        return x + made


class Mixing(Block):
    """Tokens are mixed beside the cuts, and whole ones are added."""

    def forward(self, x, bias):
        x = x + self.attention(self.first(x)) + x.mean(1, keepdim=True)
        return x + self.mlp(self.second(x)) + bias


class Dropping(Block):
    def forward(self, x, bias):
        x = x + nn.functional.dropout(self.attention(self.first(x)), 0.3, self.training)
        return x + self.mlp(self.second(x))


class Flat(Block):
    """The second half works on a list of tokens, as experts do."""

    def forward(self, x, bias):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x).view(-1, WIDTH)).view(SAMPLES, -1, WIDTH)


class Counting(Block):
    """Code that would see a rank's tokens where it means all of them."""

    def forward(self, x, bias):
        x = x + self.attention(self.first(x)) / x.shape[1]
        return x + self.mlp(self.second(x))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24)
        self.bias = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.bias[:, : ids.shape[1]])
        return self.head(x)


KINDS = {kind.__name__: kind for kind in (Block, ShiftedNorms, NormsBehind, InPlace, Mixing, Dropping, Flat, Counting)}
IDS = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 24


def made(name):
    torch.manual_seed(0)
    return Net(KINDS[name])


def plan_of(name, mesh="tp=2", devices=2):
    plan = autoshard.plan(
        made(name), {f"cpu:{index}": "8GiB" for index in range(devices)}, inputs={"ids": IDS}, launch="processes",
        mesh=mesh, precision="full", workload=Workload(mode="training", batch_size=SAMPLES),
    )  # fmt: skip
    return plan.to_json()


def step(model, ids):
    torch.manual_seed(1)
    out = model(ids)
    out.square().mean().backward()
    return out.detach(), {name: one.grad for name, one in model.named_parameters()}


def compared(text):
    """Errors of a step, and the kinds of actions, of one plan on this rank."""
    name, text = text
    model = made(name)
    expected = step(copy.deepcopy(model), IDS)
    autoshard.apply(model, Plan.from_json(text), inputs={"ids": IDS})
    record = cut_record(model)
    kinds = [action.kind for cut in record.cuts for action in cut.actions]
    out, gradients = step(model, IDS)
    errors = [
        float((whole_tensor(gradients[key], key, record) - one).abs().max() / one.abs().max().clamp(min=1e-6))
        for key, one in expected[1].items() if one is not None and ".k.bias" not in key  # those are 0 but for rounding
    ]  # fmt: skip
    with torch.no_grad():
        odd, whole = model.eval()(IDS[:, :5]), made(name).eval()(IDS[:, :5])
    return {
        "output": float((out - expected[0]).abs().max()), "gradients": max(errors), "kinds": kinds,
        "odd": float((odd - whole).abs().max()),
    }  # fmt: skip


EXPECTED = {
    "Block": {"scatter": 2, "collect": 2, "divide": 1, "join": 1},
    "ShiftedNorms": {"scatter": 2, "collect": 2, "divide": 1, "join": 1},
    "NormsBehind": {"scatter": 2, "collect": 2, "divide": 1, "join": 1},
    "InPlace": {"scatter": 2, "collect": 2, "divide": 1, "join": 1},
    "Mixing": {"scatter": 2, "collect": 2, "divide": 2, "whole": 1, "join": 1},
    "Dropping": {"scatter": 2, "collect": 2, "divide": 2, "whole": 1, "join": 1},
    "Flat": {"scatter": 1, "collect": 1, "divide": 2, "whole": 1, "join": 1},
    "Counting": {"scatter": 0, "collect": 0, "divide": 0, "join": 0},
}


@sharded_replicas
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=[] if one in ("Block", "Mixing", "Flat") else pytest.mark.slow) for one in KINDS]
)
def test_steps_are_those_of_one_process(name):
    """Sums in another order: 1e-5 in float32. Lengths that can't be divided are for evaluation."""
    found = run_ranks(compared, 2, (name, plan_of(name)))
    for rank in found:
        kinds = {kind: rank["kinds"].count(kind) for kind in EXPECTED[name]}
        assert kinds == EXPECTED[name]
        assert rank["output"] < 1e-5 and rank["gradients"] < 1e-5 and rank["odd"] < 1e-5


def with_odd_length(text):
    model = made("Block")
    autoshard.apply(model, Plan.from_json(text), inputs={"ids": IDS})
    try:
        model(IDS[:, :5])
    except ApplyError as error:
        return str(error)
    return ""


@sharded_replicas
def test_steps_of_lengths_that_ranks_cannot_divide_are_refused():
    text = plan_of("Block")
    (said, _) = run_ranks(with_odd_length, 2, text)
    assert "has 5 tokens, which 2 ranks can't divide" in said and "sequence_parallel=False" in said
    whole = replace(Plan.from_json(text), sequence_parallel=False)
    assert run_ranks(with_odd_length, 2, whole.to_json()) == ["", ""]

"""Sequence parallelism: ranks that share matrices divide the tokens between cuts, and every number is as before."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import autoshard
from autoshard.axes.tokens import can_divide_tokens
from autoshard.capture.capture import capture
from autoshard.errors import ApplyError
from autoshard.plan.workload import Workload
from autoshard.runtime.cut_state import whole_tensor
from autoshard.runtime.cuts import cut_record
from tests.ranks import run_jobs, run_ranks
from tests.runtime.test_launched import completed, devices_of
from tests.torch_releases import sharded_replicas

WIDTH, TOKENS, SAMPLES = 16, 6, 2


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q * (q.square().mean(-1, keepdim=True) + 1e-5).rsqrt()  # over all heads: a mean of what ranks have
        q, k, v = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x, bias):
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


class NormsBehind(Block):
    def forward(self, x, bias):
        x = self.first(x + self.attention(x))
        return self.second(x + self.mlp(x))


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


class Apart(Block):
    """Matrices of its second half are cut each by itself: what is between them mixes the columns."""

    def forward(self, x, bias):
        x = x + self.attention(self.first(x))
        return x + self.mlp.down(self.mlp.up(self.second(x)).cumsum(-1) / 64)


class Twice(Block):
    """Without a residual connection: what it is given is divided and collected at one call."""

    def forward(self, x, bias):
        return self.mlp(x)


class Net(nn.Module):
    skip, recomputes = None, False

    def __init__(self, kind):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, WIDTH), nn.Linear(WIDTH, 24)
        self.bias = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.blocks = nn.ModuleList(kind() for _ in range(3))

    def forward(self, ids):
        x = self.embed(ids)
        for number, block in enumerate(self.blocks):
            if number != self.skip:
                run = partial(checkpoint, block, use_reentrant=False) if self.recomputes else block
                x = run(x, self.bias[:, : ids.shape[1]])
        return self.head(x)


class Forked(Net):
    def forward(self, ids):
        first, second, third = self.blocks
        x = second(first(self.embed(ids), self.bias), self.bias)
        return self.head(x + third(x, self.bias))


IDS = torch.arange(SAMPLES * TOKENS).reshape(SAMPLES, TOKENS) % 24


def made(kind):
    torch.manual_seed(0)
    return (Forked if kind is Twice else Net)(kind)


def plans_of(kinds):
    """One plan, with where to cut each of the models, which is found once here and not by every process."""
    plan = autoshard.plan(
        made(Block), devices_of(2), inputs={"ids": IDS}, launch="processes", mesh="tp=2", precision="full",
        workload=Workload(mode="training", batch_size=SAMPLES),
    )  # fmt: skip
    return {kind: completed(plan.to_json(), made(kind), {"ids": IDS}) for kind in kinds}


def step(model, ids):
    torch.manual_seed(1)
    out = model(ids)
    out.square().mean().backward()
    return out.detach(), {name: one.grad for name, one in model.named_parameters()}


def refusal(model, ids):
    try:
        model(ids)
    except ApplyError as error:
        return str(error)
    return ""


def skipped(kind, plan):
    """What is said of a call without the first block, and without the last; how far one without another is off."""
    model, original = made(kind), made(kind)
    autoshard.apply(model, plan)
    model.recomputes = True
    torch.compile(model, backend="eager")(IDS).sum().backward()
    found = []
    for model.skip in (0, 2, 1):
        found.append(refusal(model, IDS))
    original.skip = 1
    return found, float((model(IDS) - original(IDS)).abs().max())


def compared(kind, plan):
    """Errors of a step, how often each kind of action is in the plan, and what is said of a length in training."""
    model = made(kind)
    expected = step(copy.deepcopy(model), IDS)
    autoshard.apply(model, plan)
    record = cut_record(model)
    kinds = [action.kind for cut in record.cuts for action in cut.actions]
    out, gradients = step(model, IDS)
    errors = [
        float((whole_tensor(gradients[key], key, record) - one).abs().max() / one.abs().max().clamp(min=1e-6))
        for key, one in expected[1].items() if one is not None and ".k.bias" not in key  # those are 0 but for rounding
    ]  # fmt: skip
    if kind is Block:  # of one sample, parts are pieces of memory, to which biases are added
        single = step(model, IDS[:1])[0] - step(made(kind), IDS[:1])[0]
        errors.append(float(single.abs().max()))
    said = refusal(model, IDS[:, :5])
    with torch.no_grad():
        odd, whole = model.eval()(IDS[:, :5]), made(kind).eval()(IDS[:, :5])
    counts = tuple(kinds.count(one) for one in ("scatter", "collect", "divide", "own", "whole", "join"))
    return max(float((out - expected[0]).abs().max()), *errors, float((odd - whole).abs().max())), counts, said


EXPECTED = {
    Block: (2, 2, 1, 0, 0, 1),
    NormsBehind: (2, 2, 1, 0, 0, 1),
    Mixing: (2, 2, 1, 1, 1, 1),
    Dropping: (2, 2, 1, 0, 0, 1),
    Flat: (1, 1, 1, 1, 1, 1),
    Twice: (1, 1, 2, 0, 0, 2),
    Counting: (0, 0, 0, 0, 0, 0),
    Apart: (0, 0, 0, 0, 0, 0),
    "whole": (0, 0, 0, 0, 0, 0),
}


@sharded_replicas
@pytest.mark.parametrize(
    "kinds",
    [(Block, Twice, Counting), pytest.param((Mixing, NormsBehind, Dropping, Flat), marks=pytest.mark.slow)],
    ids=["usual", "more"],
)
def test_steps_are_those_of_one_process(kinds):
    """Sums in another order: 1e-5 in float32. Lengths that can't be divided are for evaluation."""
    plans = plans_of(kinds)
    if Block in plans:
        undivided = replace(plans[Block], sequence_parallel=False, cuts=())
        plans["whole"] = completed(undivided.to_json(), made(Block), {"ids": IDS})
    jobs = {kind: (compared, Block if kind == "whole" else kind, plan) for kind, plan in plans.items()}
    for found in run_ranks(run_jobs, 2, jobs):
        for kind, (error, counts, said) in found.items():
            assert error < 1e-5 and counts == EXPECTED[kind], (kind, error, counts)
            if kind is Block:
                assert "has 5 tokens, which 2 ranks can't divide" in said and "sequence_parallel=False" in said
            assert (said == "") == (not any(counts)), (kind, said)


@sharded_replicas
def test_a_call_that_skips_the_ends_of_divided_blocks_is_refused():
    """LayerDrop: what follows would take whole tokens for a part, or a part for whole ones."""
    for (first, last, other), error in run_ranks(skipped, 2, Block, plans_of([Block])[Block]):
        assert not other and error < 1e-5
        assert "blocks.1.attention" in first and "the block that divides them was not called" in first
        assert "blocks.0 began to divide tokens" in last and "sequence_parallel=False" in last


class Channels(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.InstanceNorm2d(8)
        self.up, self.down = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 1)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def test_channels_of_which_each_has_its_own_bias_are_no_tokens():
    """Those of the whole bias would be added to a rank's part of the sum."""
    model = nn.Sequential(*(Channels() for _ in range(3)))
    assert not can_divide_tokens(capture(model, torch.randn(2, 8, 4, 4), composite=True), 2)

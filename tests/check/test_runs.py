"""Ranks are followed in further runs too: other lengths, gradients, a cache; and nobody may be given a part by hand."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.capture.capture import capture
from autoshard.check import runs
from autoshard.plan.sharding import Cut, Refusal
from autoshard.plan.workload import Workload
from tests.check.leaks import Stack, Wide
from tests.check.stateful import Generating
from tests.check.test_follow import X, outcome
from tests.check.watchers import (
    ByLength,
    ByNorm,
    Keeping,
    KeepingSum,
    Long,
    Tripled,
    WithGradients,
    through,
)


def refused(model: nn.Module, inputs: torch.Tensor = X, size: int = 48) -> str:
    found = outcome(model, inputs, size)
    assert isinstance(found, Refusal)
    return found.reason


COMPARED = {
    "the longer": (40, lambda x, heads: max(x.shape[1], heads)),
    "the shorter": (1, lambda x, heads: min(x.shape[1], heads)),
    "equal": (40, lambda x, heads: 2 if x.shape[1] == heads else 3),
    "more": (1, lambda x, heads: 2 if x.shape[1] > heads else 3),
    "more rows": (3, lambda x, heads: max(x.shape[0], heads)),
    "equal rows": (3, lambda x, heads: 2 if x.shape[0] == heads else 3),
}


SLOW = ("the longer", "equal rows")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in COMPARED])
def test_lengths_that_are_compared_with_heads_are_refused_whatever_the_plan_is_made_with(name):
    length, kind = COMPARED[name]
    model = Stack(lambda: Long(kind)).eval()
    assert "div in blocks.0 has" in refused(model, torch.randn(5, length, 24), 4)


def test_a_length_alone_may_reach_numbers():
    assert isinstance(outcome(Stack(lambda: Long(lambda x, heads: x.shape[1])).eval(), size=4), Cut)


def test_branches_of_a_forward_with_gradients_are_followed():
    assert "div in blocks.0 has 48 as other in the whole and 24 on a rank" in refused(Stack(WithGradients).eval())
    assert "with gradients" in refused(Stack(WithGradients).eval())


@pytest.mark.parametrize("function", [ByLength, ByNorm, Tripled])
def test_autograd_functions_on_parts_are_refused_by_name(function):
    said = f"{function.__name__} in blocks.0 is an autograd function on a part of a tensor"
    assert said in refused(Stack(through(function)).eval())


@pytest.mark.parametrize("at", ["part", "sum"])
def test_hooks_on_gradients_of_parts_are_refused(at):
    class Hooked(Wide):
        def between(self, hidden):
            if at == "part" and hidden.requires_grad:
                hidden.register_hook(lambda gradient: gradient / gradient.norm())
            return hidden

        def forward(self, x):
            x = super().forward(x)
            if at == "sum" and x.requires_grad:
                x.register_hook(lambda gradient: gradient / gradient.norm())
            return x

    if at == "part":
        assert "hangs a hook on a gradient, of which a rank may have a part" in refused(Stack(Hooked).eval())
    else:
        assert isinstance(outcome(Stack(Hooked).eval()), Cut)


def test_parts_that_modules_keep_are_refused():
    assert "what silu in blocks.0 makes is kept after the forward" in refused(Stack(Keeping).eval())
    assert isinstance(outcome(Stack(KeepingSum).eval()), Cut)


def test_backward_hooks_on_parts_are_refused():
    model = Stack(Wide).eval()
    model.blocks[1].up.register_full_backward_hook(lambda module, inputs, outputs: None)
    assert "blocks.1.up has a backward hook" in refused(model)
    model = Stack(Wide).eval()
    model.blocks[1].register_full_backward_hook(lambda module, inputs, outputs: None)
    assert isinstance(outcome(model), Cut)


def test_hooks_that_keep_parts_are_refused():
    model = Stack(Wide).eval()
    model.blocks[0].up.register_forward_hook(lambda module, inputs, output: model.__dict__.update(seen=output))
    assert "what linear in blocks.0.up makes is kept" in refused(model)


def test_a_plan_says_nothing_of_a_run_that_the_model_refuses():
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Stack(Wide)

        def forward(self, x):
            assert x.shape == (2, 5, 24)
            return self.inner(x)

    plan = autoshard.plan(Fixed().eval(), ["cpu:0", "cpu:1"], inputs=X, strategy="column-parallel", objective="memory")
    assert plan.cuts


class Pairs(nn.Module):
    """Adds to each token all that came before, one by one: as many ops as pairs of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 96), nn.Linear(96, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)).unflatten(-1, (4, 24))
        rows = [sum((hidden[:, at] for at in range(end)), hidden[:, end]) for end in range(hidden.shape[1])]
        return self.down(torch.stack(rows, dim=1).flatten(2))


def test_a_model_that_loops_over_tokens_is_tried_with_fewer_of_them(monkeypatch):
    monkeypatch.setattr(runs, "MOST_OPS", 2_000)
    model, given = Stack(Pairs).eval(), (torch.randn(2, 12, 24),)
    groups = find_groups(capture(model, *given, composite=True)).groups
    assert isinstance(outcome(model, *given, size=4), Cut)
    found = [run.what for run in runs.other_runs(model, (given, {}), Workload(), groups)]
    assert found == ["with gradients and inputs [4, 2, 24]", "with inputs [2, 4, 24]", "with inputs [16, 24, 24]"]


@pytest.mark.parametrize("new_tokens", [0, 4])
def test_a_step_of_generation_is_followed_though_the_state_is_in_the_modules(new_tokens):
    torch.manual_seed(0)
    model, ids = Generating().eval(), torch.randint(0, 32, (2, 5))
    workload = Workload(new_tokens=new_tokens)
    with autoshard.simulate("2x1MiB") as devices, torch.no_grad():
        logits, tokens = model(ids)["logits"], model.generate(ids, 4)
        plan = autoshard.plan(model, devices, inputs={"input_ids": ids}, strategy="column-parallel", workload=workload)
        cut = {shard.name for one in plan.cuts for shard in one.shards}
        assert "head.weight" in cut and "conv.weight" not in cut and "weight" in cut
        autoshard.apply(model, plan)
        assert torch.allclose(model(ids)["logits"], logits, atol=1e-6)
        assert torch.equal(model.generate(ids, 4), tokens)


class Named(nn.Module):
    """A table and a head; the result is an object of a class that is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)

    def forward(self, ids):
        return SimpleNamespace(logits=self.head(self.table(ids)))


def test_a_result_in_an_object_of_any_class_is_whole():
    model, ids = Named().eval(), torch.randint(0, 32, (2, 5))
    with autoshard.simulate("2x1MiB") as devices, torch.no_grad():
        logits = model(ids).logits
        plan = autoshard.plan(model, devices, inputs={"ids": ids}, strategy="column-parallel")
        assert plan.cuts
        autoshard.apply(model, plan)
        found = model(ids).logits
        assert found.shape == logits.shape and torch.allclose(found, logits, atol=1e-6)

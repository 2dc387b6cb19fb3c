"""check_first_batch: the first call also runs in one piece, and what differs is named with figures."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.plan.batching import ASSUMED
from tests.runtime.pipelines import ROWS, pipeline, replicas

HERE = {"cpu:0": "16MiB", "cpu:1": "16MiB"}
PLANS = {"pipeline": pipeline, "replicas": replicas}
BOTH = pytest.mark.parametrize("how", PLANS)


class Blocks(nn.Module):
    """`mixing`: rows are divided by the norm of the whole batch. Counts its calls, and draws random numbers."""

    def __init__(self, mixing: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout)) for _ in range(3))
        self.register_buffer("seen", torch.zeros(()))
        self.mixing, self.calls = mixing, 0

    def forward(self, x):
        self.calls += 1
        for block in self.blocks:
            x = block(x)
        return x / x.norm() if self.mixing else x


def divided(model, x, how):
    return PLANS[how](model, {"x": x}, replace(ROWS, assumed=True))


@BOTH
def test_rows_that_mix_are_found_with_the_first_batch(how):
    model, x = Blocks(mixing=True), torch.randn(8, 8)
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, divided(model, x, how), check_first_batch=True)
        for _ in range(2):  # it stays on guard
            with pytest.raises(autoshard.VerifyError) as raised:
                model(x)
        text = str(raised.value)
        assert "the first batch of Blocks gives something else divided" in text and ASSUMED in text
        assert "the output by up to" in text
        assert "balanced" in text and model.calls == 0
        assert model(x[:1]).shape == (1, 8)  # a call of one row is not the one that is waited for
        autoshard.remove(model)
        assert model(x).shape == (8, 8)


@BOTH
def test_equal_rows_pass_and_the_model_is_as_one_call_leaves_it(how):
    torch.manual_seed(0)
    model, x = Blocks(dropout=0.4).train(), torch.randn(8, 8)
    with autoshard.simulate("3x16MiB"):
        plan = divided(model, x, how)
        results = []
        for check in (False, True):
            model.calls = 0
            autoshard.apply(model, plan, check_first_batch=check)
            torch.manual_seed(1)
            results.append((model(x), model.calls, torch.get_rng_state()))
            after = len(model._forward_pre_hooks)
            model(x)
            assert len(model._forward_pre_hooks) == after
            autoshard.remove(model)
    (first, calls, state), (second, checked_calls, checked_state) = results
    assert torch.equal(first, second) and calls == checked_calls and torch.equal(state, checked_state)


def test_cut_columns_are_compared_with_the_whole_model():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).eval()
    x = torch.randn(4, 16)
    expected = model(x)
    with autoshard.simulate("2x16MiB"):
        plan = autoshard.plan(model, HERE, inputs=x, strategy="column-parallel")
        assert plan.cuts
        autoshard.apply(model, plan, check_first_batch=True)
        assert torch.allclose(model(x), expected, atol=1e-5)
        autoshard.remove(model)
        (cut,) = plan.cuts
        twice = replace(cut, actions=tuple(replace(one, addend="") for one in cut.actions))  # each rank adds the bias
        autoshard.apply(model, replace(plan, cuts=(twice,)), check_first_batch=True)
        with pytest.raises(autoshard.VerifyError, match="with its parameters cut than in one piece"):
            model(x)


def test_a_model_that_cannot_be_copied_is_refused():
    model, x = Blocks(), torch.randn(8, 8)
    plan = divided(model, x, "pipeline")
    model.lines = (line for line in "abc")
    with autoshard.simulate("3x16MiB"):
        autoshard.apply(model, plan, check_first_batch=True)
        with pytest.raises(autoshard.VerifyError, match="can't be copied"):
            model(x)


def test_a_plan_that_only_places_modules_is_applied_as_ever():
    model, x = Blocks(), torch.randn(8, 8)
    with autoshard.simulate("2x16MiB"):
        plan = autoshard.plan(model, HERE, inputs=x, strategy="sequential")
        autoshard.apply(model, plan, check_first_batch=True)
        assert model(x).shape == (8, 8) and model.calls == 1

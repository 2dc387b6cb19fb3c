"""Flags are compared with what they were when the plan was made: others may switch on what mixes rows."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.runtime.flags import changed_flag, flags_of


class Block(nn.Module):
    centred = False

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.linear, self.gated, self.folded = nn.Linear(8, 8), gated, False

    def forward(self, x):
        self.folded = True
        x = x + self.linear(x).relu()
        return x - x.mean(0) if self.centred else x


def blocks() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(gated=True), Block())


def test_what_changed_is_named():
    """Flags of instances and of classes; not whether they train, nor what nobody knew at planning."""
    model = blocks()
    planned = flags_of(model)
    assert set(planned) >= {"Block.centred=False", "Block.gated=010", "Block.folded=False"}
    assert not [flag for flag in planned if "training" in flag]
    model.train().later = True
    assert not changed_flag(planned, model)
    model[2].gated = True
    assert changed_flag(planned, model) == "gated of Block is 011, and was 010 when the plan was made"


@pytest.mark.parametrize(
    "settings", [{"strategy": "pipeline", "num_microbatches": 2}, {"strategy": "data-parallel"}], ids=str
)
def test_a_call_with_another_flag_runs_undivided(settings):
    model, x = blocks(), torch.randn(8, 8)
    with autoshard.simulate("2x1MiB") as devices, torch.no_grad():
        plan = autoshard.plan(model, devices, inputs=x, **settings)
        assert "Block.centred=False" in plan.batch.flags
        assert not [flag for flag in plan.batch.flags if "folded" in flag]  # the forward sets it itself
        assert autoshard.Plan.from_json(plan.to_json()) == plan
        autoshard.apply(model, plan)
        torch.testing.assert_close(model(x).cpu(), blocks()(x))
        wanted = blocks()
        for one in (model, wanted):
            one[1].centred = True
        with pytest.warns(RuntimeWarning, match="runs undivided.*centred of Block is 010, and was False when"):
            found = model(x)
        torch.testing.assert_close(found.cpu(), wanted(x))

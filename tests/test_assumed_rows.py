"""assume_independent_rows: the user's word is taken, recorded in the plan, and said wherever the plan is shown."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan import Mesh, Plan

HERE = {"cpu:0": "16MiB", "cpu:1": "16MiB"}


class ClippedByBatch(nn.Module):
    """Rows are scaled down by the norm of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        x = self.layers(x)
        return x * (1.0 / x.norm().clamp(min=1.0))


def plan_of(model, x, **settings):
    workload = autoshard.Workload(batch_size=8)
    return autoshard.plan(model, HERE, inputs=x, workload=workload, **settings)


def test_a_plan_keeps_what_was_assumed_in_its_file(tmp_path):
    batch = BatchAxis(
        size=8, inputs=(BatchInput(path="x", dim=0, axis="*8"),),
        outputs=(BatchOutput(path="", how="cat", axis="*8"),), assumed=True,
    )  # fmt: skip
    plan = plan_of(nn.Linear(8, 8), torch.randn(8, 8), strategy="sequential")
    placed = {"": "cpu:0"}
    plan = replace(plan, mesh=Mesh(data=2), batch=batch, placements=placed, strategy="data-parallel")
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    checked = replace(plan, batch=replace(batch, assumed=False))
    assert "assumed" not in json.loads(checked.to_json())["batch"]
    assert Plan.from_json(checked.to_json()) == checked


@pytest.mark.parametrize("strategy", ["balanced", "sequential", "column-parallel"])
def test_strategies_that_do_not_divide_the_batch_refuse_it(strategy):
    with pytest.raises(autoshard.SpecError, match="assume_independent_rows is about dividing the batch"):
        plan_of(nn.Linear(8, 8), torch.randn(8, 8), strategy=strategy, assume_independent_rows=True)

"""auto: the best of all strategies by their estimates, with the others and what stands against them in its reasons."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import price
from autoshard.errors import PlanError, SpecError
from autoshard.plan.workload import Workload
from autoshard.search.planning import candidates_of, compare, plan_measured
from autoshard.search.request import Request
from autoshard.strategies.compare import explained, value_of
from tests.blocks import Blocks, Mixes
from tests.engine.test_mesh_cost import BATCH, INPUTS


def request(model=None, *, devices="4xA100-40GB", mode="inference", objective="latency", assumed=False):
    model = model or Blocks()
    workload = Workload(batch_size=None if assumed else BATCH, mode=mode, assumed=assumed)
    inputs = INPUTS if isinstance(model, Blocks) else torch.randn(BATCH, 64)
    profile = autoshard.profile(model, inputs, workload=workload)
    return Request(model=model, inputs=inputs, profile=profile, cluster=parse_devices(devices), objective=objective,
                   processes=0)  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "objective"), [("inference", "latency"), ("training", "throughput"), ("training", "memory")]
)
def test_never_worse_than_a_strategy(mode, objective):
    asked = request(mode=mode, objective=objective)
    found = compare(asked)
    training = mode == "training"
    assert found.chosen.usable and found.bound <= found.chosen.value
    for row in found.alternatives:
        if row.plan is None:
            continue
        figures = price(row.plan, asked.profile, asked.limited)
        assert figures.fits and row.value == value_of(figures, objective, training)
        assert row.value >= found.bound
        assert not row.usable or row.value >= found.chosen.value * (1 - 1e-8)
    names = [row.name for row in found.alternatives]
    assert names == ["placement", "data-parallel", "pipeline"]


def test_reasons_say_what_was_not_chosen():
    text = "\n".join(explained(compare(request())).reasons)
    for words in ("not chosen: data-parallel", "not chosen: pipeline", "chosen: placement"):
        assert words in text, words
    assert "is below" not in text  # the bound is said once, with the figures


def test_a_forward_that_differentiates_is_placed():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 1)

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                return torch.autograd.grad(self.two(self.one(x).tanh()).sum(), x)

    found = compare(request(Force(), devices="2xA100-40GB"))
    assert found.chosen.name == "placement"
    assert "differentiates" in next(row.refused for row in found.alternatives if row.name == "pipeline")


def test_a_batch_that_mixes_drops_what_divides_it_with_the_reason():
    found = compare(request(Mixes(64), devices="2xA100-40GB"))
    refused = {row.name: row.refused for row in found.alternatives if row.plan is None}
    assert set(refused) == {"data-parallel", "pipeline"} and all("mean" in why for why in refused.values())
    assert any(reason.startswith("pipeline is not possible") for reason in explained(found).reasons)


def test_a_workload_nobody_stated_is_placed():
    asked = request(assumed=True)
    plan = plan_measured(asked.model, asked.inputs, asked.profile, asked.cluster)
    assert plan.mesh is None and not plan.cuts
    assert [row.name for row in candidates_of(asked)] == ["placement"]


@pytest.mark.parametrize("strategy", ["hybrid", "pipeline", "data-parallel"])
def test_what_divides_the_batch_has_no_pins_and_no_disk(strategy):
    asked = request()
    with pytest.raises(SpecError, match="can't be pinned"):
        plan_measured(asked.model, asked.inputs, asked.profile, asked.cluster, strategy=strategy,
                      pins={"blocks.0": "cuda:0"})  # fmt: skip
    with pytest.raises(SpecError, match='"disk" computes nothing'):
        cluster = parse_devices({"cpu": "4GiB", "disk": "100GiB"})
        plan_measured(asked.model, asked.inputs, asked.profile, cluster, strategy=strategy)


def test_nothing_fits_says_what_would():
    """What would help is looked for once, when no strategy is possible."""
    asked = request(devices="2x2GiB")
    small = {d.name: d.overhead_bytes + 100_000 for d in asked.cluster.devices}
    with pytest.raises(PlanError, match="It was checked that it fits"):
        plan_measured(asked.model, asked.inputs, asked.profile, asked.cluster.with_memory(small))

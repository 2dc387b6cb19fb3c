"""auto: the best of all strategies by their estimates, with the others and what stands against them in its reasons."""

import itertools
from dataclasses import replace

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
from autoshard.strategies.compare import Alternative, Candidate, _best_of, devices_used, explained, lowest, value_of
from autoshard.strategies.compare import compare as compare_candidates
from tests.engine.test_mesh_cost import BATCH, INPUTS, Net

OBJECTIVES = ("latency", "throughput", "memory")


class Mixed(nn.Module):
    """Rows of the batch meet: its mean is taken off."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        x = self.one(x)
        return self.two(x - x.mean(0, keepdim=True))


def request(model=None, *, devices="4xA100-40GB", mode="inference", objective="latency", processes=0, assumed=False):
    model = model or Net()
    workload = Workload(batch_size=None if assumed else BATCH, mode=mode, assumed=assumed)
    inputs = INPUTS if isinstance(model, Net) else torch.randn(BATCH, 64)
    profile = autoshard.profile(model, inputs, workload=workload)
    return Request(model=model, inputs=inputs, profile=profile, cluster=parse_devices(devices), objective=objective,
                   processes=processes)  # fmt: skip


@pytest.mark.parametrize(("mode", "objective"), list(itertools.product(["inference", "training"], OBJECTIVES)))
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
    assert names == ["placement", "data-parallel", "pipeline", "column-parallel"]


@pytest.mark.parametrize(
    ("mode", "processes"),
    [
        ("inference", 4), ("training", 0),
        pytest.param("inference", 0, marks=pytest.mark.slow), pytest.param("training", 4, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_never_worse_than_any_single_strategy_that_is_asked_for(mode, processes):
    """What `auto` takes against what each strategy gives by itself, as the run is: one process, or one per device."""
    asked = request(mode=mode, objective="throughput", processes=processes)
    found = compare(asked)
    for strategy in ("sequential", "balanced", "pipeline", "data-parallel", "column-parallel"):
        if not processes and strategy == "column-parallel":  # what they give is not run in one process
            continue
        try:
            plan = plan_measured(
                asked.model, asked.inputs, asked.profile, asked.cluster,
                strategy=strategy, objective="throughput", processes=processes,
            )  # fmt: skip
        except PlanError:
            continue
        assert value_of(asked.price(plan), "throughput", mode == "training") >= found.chosen.value * (1 - 1e-9), (
            strategy
        )


def test_under_torchrun_plans_are_priced_as_they_run_there(monkeypatch):
    asked = request(processes=4)
    plan = next(one.make() for one in candidates_of(asked) if one.name == "data-parallel")
    alone = autoshard.estimate(plan, asked.profile, asked.limited)
    monkeypatch.setattr("autoshard.runtime.collectives.count_processes", lambda: 4)
    among_others = autoshard.estimate(plan, asked.profile, asked.limited)
    assert among_others == asked.price(plan) and among_others != alone


def test_the_same_plan_each_time():
    one, other = (explained(compare(request(mode="training"))) for _ in range(2))
    assert one.to_json() == other.to_json()


def test_reasons_say_what_was_not_chosen():
    text = "\n".join(explained(compare(request())).reasons)
    for words in ("with a process per device (torchrun) column-parallel", "not chosen: pipeline", "chosen: placement"):
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
    found = compare(request(Mixed(), devices="2xA100-40GB"))
    refused = {row.name: row.refused for row in found.alternatives if row.plan is None}
    assert set(refused) == {"data-parallel", "pipeline"} and all("mean" in why for why in refused.values())
    assert any(reason.startswith("pipeline is not possible") for reason in explained(found).reasons)


def test_a_workload_nobody_stated_is_placed():
    asked = request(assumed=True)
    plan = plan_measured(asked.model, asked.inputs, asked.profile, asked.cluster, processes=0)
    assert plan.mesh is None and not plan.cuts
    assert [row.name for row in candidates_of(asked)] == ["placement", "column-parallel"]


def test_under_processes_everything_can_be_taken():
    found = compare(request(mode="training", processes=4, objective="memory"))
    assert all(row.usable for row in found.alternatives)
    assert found.chosen.value == min(row.value for row in found.alternatives)
    assert found.chosen.plan.cuts or found.chosen.plan.mesh.size == 4


def test_of_equals_the_one_on_the_fewest_devices_is_taken():
    """A pipeline of one micro-batch does what a placement does, and may be less by rounding."""
    plans = {row.name: row.plan for row in compare(request()).alternatives}
    rows = [Alternative(name=name, plan=plans[name], value=1.0 - 1e-12 * rank)
            for rank, name in enumerate(("placement", "pipeline", "data-parallel"))]  # fmt: skip
    counts = [devices_used(row) for row in rows]
    assert counts[0] < counts[1] and _best_of(rows) == 0 and _best_of(rows[1:]) == 0
    assert _best_of([rows[0], replace(rows[1], value=0.99)]) == 1 and _best_of([]) is None


def test_nothing_possible_raises_what_the_first_said():
    asked = request()

    def no(text):
        def make():
            raise PlanError(text)

        return make

    with pytest.raises(PlanError, match="first"):
        compare_candidates([Candidate(name="a", make=no("first")), Candidate(name="b", make=no("second"))],
                           asked.profile, asked.cluster, "latency")  # fmt: skip


@pytest.mark.parametrize("strategy", ["hybrid", "pipeline", "data-parallel"])
def test_what_divides_the_batch_has_no_pins_and_no_disk(strategy):
    asked = request()
    with pytest.raises(SpecError, match="can't be pinned"):
        plan_measured(asked.model, asked.inputs, asked.profile, asked.cluster, strategy=strategy,
                      pins={"blocks.0": "cuda:0"})  # fmt: skip
    with pytest.raises(SpecError, match='"disk" computes nothing'):
        cluster = parse_devices({"cpu": "4GiB", "disk": "100GiB"})
        plan_measured(asked.model, asked.inputs, asked.profile, cluster, strategy=strategy)


def test_more_devices_never_make_it_worse():
    for objective in OBJECTIVES:
        values = [compare(request(devices=f"{n}xA100-40GB", objective=objective)).chosen.value for n in (1, 2, 4)]
        assert all(b <= a * (1 + 1e-9) for a, b in itertools.pairwise(values)), (objective, values)


def test_bound_of_memory_counts_what_is_held():
    asked = request(mode="training", objective="memory")
    held = asked.profile.parameter_bytes * 3
    assert lowest(asked.profile, asked.cluster, "memory") == pytest.approx(
        held / sum(d.memory_bytes for d in asked.cluster.devices)
    )


def test_nothing_fits_says_what_would():
    """What would help is looked for once, when no strategy is possible."""
    asked = request(devices="2x2GiB")
    small = {d.name: d.overhead_bytes + 100_000 for d in asked.cluster.devices}
    with pytest.raises(PlanError, match="It was checked that it fits"):
        plan_measured(asked.model, asked.inputs, asked.profile, asked.cluster.with_memory(small), processes=0)

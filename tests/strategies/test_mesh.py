"""hybrid: plans of real models fit, take part as asked for, and cut only what is proved."""

import itertools
from dataclasses import replace

import pytest

import autoshard
from autoshard.axes.unproved import unproved
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import estimate_mesh
from autoshard.errors import PlanError
from autoshard.module_paths import is_below
from autoshard.plan import Plan
from autoshard.plan_cuts import Refusal
from autoshard.strategies.pipeline import hybrid
from autoshard.workload import Workload
from tests.engine.test_mesh_cost import BATCH, INPUTS, Net, batch, groups  # noqa: F401 - a fixture

# ---- plans of a model


@pytest.fixture(scope="module")
def profile():
    return autoshard.profile(Net(), INPUTS, workload=Workload(batch_size=BATCH, mode="training"))


@pytest.mark.parametrize("objective", ["latency", "throughput", "memory"])
def test_plan_of_a_model(profile, groups, objective):  # noqa: F811
    cluster = parse_devices("2 hosts of 4xA100-40GB")
    plan = hybrid(profile, cluster, batch(), groups, unproved, objective=objective)
    mesh = plan.mesh
    assert sum(n > 1 for n in (mesh.data, mesh.pipeline, mesh.tensor)) >= 2 and mesh.size == len(plan.devices)
    assert estimate_mesh(plan, profile, cluster).fits
    assert Plan.from_json(plan.to_json()) == plan
    for block in (block for cut in plan.cuts if plan.stages for block in cut.blocks):
        assert block and sum(any(is_below(block, path) for path in stage.paths) for stage in plan.stages) == 1
    again = hybrid(profile, cluster, batch(), groups, unproved, objective=objective)
    assert again.to_json() == plan.to_json()
    for data, position in itertools.product(range(mesh.data), range(mesh.pipeline)):
        group = {plan.devices[mesh.rank(data=data, pipeline=position, tensor=t)].host for t in range(mesh.tensor)}
        assert mesh.tensor > 4 or len(group) == 1  # a tensor-parallel group is in one host


def test_as_many_as_processes(profile, groups):  # noqa: F811
    plan = hybrid(profile, parse_devices("4xA100-40GB"), batch(), groups, unproved, objective="memory", processes=4)
    assert plan.mesh.size == 4 and [d.name for d in plan.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_what_can_not_be_proved_is_not_cut(profile, groups):  # noqa: F811
    """The proof refuses every cut: what is left are replicas of stages."""

    def refuse(found, shares):
        return [Refusal(reason="no") for _ in found]

    plan = hybrid(profile, parse_devices("4xA100-40GB"), batch(), groups, refuse, objective="memory")
    assert plan.mesh.tensor == 1 and plan.mesh.data > 1 and plan.mesh.pipeline > 1 and not plan.cuts


@pytest.mark.parametrize("nbytes", [683_744, 443_392])
def test_a_mesh_that_holds_more_than_the_search_counts_does_not_keep_others_from_being_found(groups, nbytes):  # noqa: F811
    """The next round knows by how much, for this mesh alone: less room for every mesh would leave none."""
    made = autoshard.profile(Net(), INPUTS, workload=Workload(batch_size=BATCH))
    some = parse_devices(dict.fromkeys((f"cuda:{i}" for i in range(8)), nbytes))
    cluster = replace(some, devices=tuple(replace(d, overhead_bytes=0, block_bytes=1) for d in some.devices))
    plan = hybrid(made, cluster, batch(), groups, unproved, objective="latency")
    assert estimate_mesh(plan, made, cluster).fits


def test_nothing_fits(profile, groups):  # noqa: F811
    cluster = parse_devices("4xA100-40GB")
    small = cluster.with_memory({d.name: d.overhead_bytes + 100_000 for d in cluster.devices})
    with pytest.raises(PlanError, match="no mesh"):
        hybrid(profile, small, batch(), groups, unproved)

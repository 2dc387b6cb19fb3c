"""What every plan with a mesh has in common: bounds, what is refused, generation, old plans."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import in_one_piece, price
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.workload import Workload
from tests.blocks import Blocks

BATCH, WIDTH = 16, 64


INPUTS = torch.zeros(BATCH, 32, WIDTH)


def batch():
    row = {"dim": 0, "axis": f"*{BATCH}"}
    return BatchAxis(
        size=BATCH, inputs=(BatchInput(path="x", **row),), outputs=(BatchOutput(path="", how="cat", **row),)
    )


def profile_of(mode):
    return autoshard.profile(Blocks(), INPUTS, workload=Workload(batch_size=BATCH, mode=mode))


@pytest.fixture(scope="module")
def profiles():
    return {mode: profile_of(mode) for mode in ("inference", "training")}


def plan_on(cluster, profile, mesh, *, cuts=(), microbatches=1, schedule="gpipe"):
    devices = tuple(PlanDevice(name=d.name, memory_bytes=d.memory_bytes, kind=d.kind, host=d.host)
                    for d in cluster.devices[: mesh.size])  # fmt: skip
    bounds = [4 * i // mesh.pp for i in range(mesh.pp + 1)]
    stages = tuple(Stage(paths=tuple(f"blocks.{i}" for i in range(a, b))) for a, b in pairwise(bounds))
    placements = {path: devices[mesh.rank(pipeline=i)].name for i, stage in enumerate(stages) for path in stage.paths}
    if mesh.pp == 1:
        stages, placements = (), {"": devices[0].name}
    return Plan(
        strategy="mesh", objective="latency", workload=profile.workload, devices=devices, placements=placements,
        mesh=mesh, batch=batch(), stages=stages, num_microbatches=microbatches, schedule=schedule, cuts=cuts,
        fingerprint=profile.graph.fingerprint,
    )  # fmt: skip


def test_what_cannot_be_priced_is_refused(profiles):
    cluster = parse_devices("4xA100-40GB")
    plan = plan_on(cluster, profiles["training"], Mesh(pp=2), microbatches=2)
    with pytest.raises(PlanError, match="does not say how the batch is divided"):
        price(replace(plan, batch=None), profiles["training"], cluster)
    with pytest.raises(PlanError, match="priced with the model itself"):
        price(replace(plan, mesh=Mesh(dp=2, pp=2)), profiles["training"], cluster)
    with pytest.raises(PlanError, match="a batch of 16 can't be divided into 17"):
        price(replace(plan, num_microbatches=17), profiles["training"], cluster)


@pytest.mark.parametrize(
    ("mesh", "schedule"), [(Mesh(dp=2, pp=2), "1f1b"), (Mesh(pp=4), "zero-bubble"), (Mesh(fsdp=4), "none")]
)
def test_an_old_plan_of_processes_is_priced_as_a_new_one(mesh, schedule):
    """Plans of earlier versions have no launch."""
    cluster = parse_devices("4xA100-40GB")
    profile = profile_of("training")
    plan = plan_on(cluster, profile, mesh, microbatches=1 if mesh.pp == 1 else 4, schedule=schedule)
    found = autoshard.estimate(plan, profile, cluster)
    assert found.tokens_per_second > 0 and len(found.ranks) >= 1


def _device(name, rate):
    return Device(name=name, memory_bytes=10**9, flops_per_second={"default": rate}, bytes_per_second=rate / 10)


def _linked(devices):
    from autoshard.cluster.links import make_links

    return Cluster(devices=devices, links=make_links(devices))


@pytest.mark.parametrize("mesh", [Mesh(pp=2), Mesh(dp=2)])
def test_tokens_are_generated_undivided_and_priced_so(profiles, mesh):
    cluster = _linked([_device("cuda:0", 1e12), _device("cuda:1", 1e12)])
    profile = profiles["inference"]
    profile = replace(profile, workload=replace(profile.workload, new_tokens=4))
    plan = plan_on(cluster, profile, mesh, microbatches=2 if mesh.pp > 1 else 1)
    found, whole = price(plan, profile, cluster), price(in_one_piece(plan), profile, cluster)
    assert found.devices == whole.devices and found.latency_seconds == whole.latency_seconds
    assert any("runs undivided" in note for note in found.notes)

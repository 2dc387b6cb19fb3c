"""data-parallel in one process: shares by speed and memory, how many devices, and what is refused."""

import pytest
import torch

import autoshard
from autoshard.cluster.device import Device
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis, BatchInput
from autoshard.plan.workload import Workload
from autoshard.strategies.data_parallel import data_parallel
from tests.blocks import Blocks
from tests.clusters import linked

BATCH = BatchAxis(size=12, inputs=(BatchInput(path="x", dim=0, axis="*12"),), outputs=())
GIB = 1 << 30


def cluster(speeds, memory=None, link=1e9, latency=1e-7, hosts=None):
    names = [f"cuda:{index}" for index in range(len(speeds))]
    memory, hosts = memory or [GIB] * len(speeds), hosts or ["host0"] * len(speeds)
    rows = zip(names, speeds, memory, hosts, strict=True)
    devices = tuple(
        Device(name=name, memory_bytes=size, host=host, launch_seconds=0.0, bytes_per_second=speed * 10,
               flops_per_second={"default": speed}) for name, speed, size, host in rows
    )  # fmt: skip
    return linked(devices, link, latency)


@pytest.fixture(scope="module")
def profiles():
    model, made = Blocks(), {}
    for mode in ("inference", "training"):
        made[mode] = autoshard.profile(model, {"x": torch.randn(12, 32, 64)}, workload=Workload(mode=mode))
    return made


@pytest.mark.parametrize(("speeds", "shares"), [((1e8,) * 3, ()), ((3e8, 1e8), (9, 3))])
def test_rows_are_shared_by_speed(profiles, speeds, shares):
    plan = data_parallel(profiles["inference"], cluster(speeds), BATCH)
    assert (plan.mesh.data, plan.mesh.shares, plan.mesh.sharded) == (len(speeds), shares, False)
    assert plan.placements == {"": "cuda:0"} and plan.strategy == "data-parallel"
    assert Plan.from_json(plan.to_json()) == plan


def test_devices_that_do_not_help_are_left_out(profiles):
    plan = data_parallel(profiles["training"], cluster([1e12, 1e12], link=1e6), BATCH)
    assert plan.mesh.data == 2  # they were asked for by name
    assert any("one device would be faster" in reason for reason in plan.reasons)
    plan = data_parallel(profiles["inference"], cluster([1e8, 1e8, 1e4]), BATCH)
    assert [device.name for device in plan.devices] == ["cuda:0", "cuda:1"]
    assert any("left out: cuda:2" in reason for reason in plan.reasons)


def test_what_does_not_fit_is_refused(profiles):
    with pytest.raises(PlanError, match="more than there is"):
        data_parallel(profiles["training"], cluster([1e8, 1e8], memory=[100_000] * 2), BATCH)


def test_of_few_devices_that_differ_every_set_is_tried(profiles):
    """The fastest device has room for one row, and two more copies over slow links for it do not pay."""
    one_row = 660_000
    devices = cluster([2e8, 1e8, 3e8], memory=[GIB, GIB, one_row], latency=2e-3)
    plan = data_parallel(profiles["inference"], devices, BATCH)
    assert [device.name for device in plan.devices] == ["cuda:0", "cuda:1"] and plan.mesh.shares == (8, 4)

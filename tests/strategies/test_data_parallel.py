"""data-parallel: shares by speed and memory, how many devices, when parameters are sharded, and what is refused."""

import itertools

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Link
from autoshard.engine.replicas import estimate_replicas
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis, BatchInput
from autoshard.plan.workload import Workload
from autoshard.strategies.data_parallel import data_parallel, gathered_blocks

BATCH = BatchAxis(size=12, inputs=(BatchInput(path="x", dim=0, axis="*12"),), outputs=())
GIB = 1 << 30


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(64, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def cluster(speeds, memory=None, link=1e9, latency=1e-7, hosts=None):
    names = [f"cuda:{index}" for index in range(len(speeds))]
    memory, hosts = memory or [GIB] * len(speeds), hosts or ["host0"] * len(speeds)
    rows = zip(names, speeds, memory, hosts, strict=True)
    devices = tuple(
        Device(name=name, memory_bytes=size, host=host, launch_seconds=0.0, bytes_per_second=speed * 10,
               flops_per_second={"default": speed}) for name, speed, size, host in rows
    )  # fmt: skip
    links = tuple(
        Link(source=a, destination=b, bytes_per_second=link, latency_seconds=latency)
        for a, b in itertools.permutations(names, 2)
    )
    return Cluster(devices=devices, links=links)


@pytest.fixture(scope="module")
def profiles():
    model, made = Model(), {}
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
    assert data_parallel(profiles["training"], cluster([1e12, 1e12], link=1e6), BATCH, processes=2).mesh.data == 2
    plan = data_parallel(profiles["inference"], cluster([1e8, 1e8, 1e4]), BATCH)
    assert [device.name for device in plan.devices] == ["cuda:0", "cuda:1"]
    assert any("left out: cuda:2" in reason for reason in plan.reasons)


def test_parameters_are_sharded_where_a_replica_does_not_fit(profiles):
    profile = profiles["training"]
    held = profile.parameter_bytes * 4
    small = cluster([1e8] * 4, memory=[int(held * 0.9)] * 4)
    plan = data_parallel(profile, small, BATCH, processes=4)
    assert plan.mesh.sharded and not plan.mesh.shares
    assert [stage.paths for stage in plan.stages] == [(f"blocks.{index}",) for index in range(4)]
    assert Plan.from_json(plan.to_json()) == plan
    assert estimate_replicas(plan, profile, small).fits
    with pytest.raises(PlanError, match="torchrun --nproc-per-node 4"):
        data_parallel(profile, small, BATCH)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.layers = nn.ModuleList(Block() for _ in range(3)), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return sum(expert(x) for expert in self.experts)


def test_what_may_be_skipped_is_not_gathered_on_its_own():
    graph = autoshard.capture(Experts(), {"x": torch.randn(4, 64)})
    assert gathered_blocks(graph) == ["layers.0", "layers.1"]


def test_memory_as_objective_shards(profiles):
    plan = data_parallel(profiles["training"], cluster([1e8] * 2), BATCH, objective="memory", processes=2)
    assert plan.mesh.sharded


def test_what_can_not_be_divided_is_refused(profiles):
    with pytest.raises(PlanError, match="more than there is"):
        data_parallel(profiles["training"], cluster([1e8, 1e8], memory=[100_000] * 2), BATCH)
    with pytest.raises(PlanError, match="12 rows can't be divided over 13 processes"):
        data_parallel(profiles["inference"], cluster([1e8] * 13), BATCH, processes=13)


def test_of_few_devices_that_differ_every_set_is_tried(profiles):
    """The fastest device has room for one row, and two more copies over slow links for it do not pay."""
    one_row = 660_000
    devices = cluster([2e8, 1e8, 3e8], memory=[GIB, GIB, one_row], latency=2e-3)
    plan = data_parallel(profiles["inference"], devices, BATCH)
    assert [device.name for device in plan.devices] == ["cuda:0", "cuda:1"] and plan.mesh.shares == (8, 4)

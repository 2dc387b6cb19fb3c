"""Plans that divide more than modules, each with what its sliders are computed from."""

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import torch
from torch import nn

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.axes.unproved import unproved
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.capture.capture import capture
from autoshard.cluster.cluster import plan_device
from autoshard.cluster.parse import parse_devices
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.scaling import find_scaling
from autoshard.report.whatif import what_if_data
from autoshard.strategies.column_parallel import column_parallel
from autoshard.workload import Workload
from tests.test_mesh_cost import slow

WIDTH, BLOCKS = 48, 4
BASE = (8, 20)
STORE = {"cpu": "1GiB"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        inner = self.up(self.norm(x)).relu()
        return x + self.down(inner / inner.square().mean(-1, keepdim=True))  # a sum of little where that is cut


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Kept:
    """A cache: no container."""

    def __init__(self, keys):
        self.keys = keys


class Keeping(Net):
    """Returns what every block gave beside the output, in an object."""

    def forward(self, x):
        kept = []
        for block in self.blocks:
            x = block(x)
            kept.append(torch.cat([x, x], -1))
        return x, Kept(kept)


STAGED = {"schedule": "gpipe", "microbatches": 4}
ONE, TWO = {"mesh": Mesh(pp=2)}, "2xA100-40GB"
CASES = {
    "one process, inference": (TWO, {**ONE, **STAGED, "mode": "inference"}),
    "one process, one part": (TWO, {**ONE, **STAGED, "microbatches": 1}),
    "one process, gpipe": ("2x1GiB", {**ONE, **STAGED}),
    "one process, 1f1b, recomputed": (TWO, {**ONE, **STAGED, "schedule": "1f1b", "recompute": True}),
    "gpipe, recomputed": ("2 hosts of 1xA100-40GB", {**ONE, **STAGED, "recompute": True}),
    "1f1b": ("2 hosts of 1xA100-40GB", {**ONE, **STAGED, "schedule": "1f1b"}),
    "interleaved": (TWO, {**ONE, **STAGED, "schedule": "interleaved", "stages": 4}),
    "zero-bubble": ("1xA100-40GB,1xH100-80GB", {**ONE, **STAGED, "schedule": "zero-bubble"}),
    "replicas of stages of ranks": (
        "2 hosts of 4xA100-40GB", {**STAGED, "microbatches": 2, "mesh": Mesh(dp=2, pp=2, tp=2)},
    ),
    "recomputed stages of ranks": (
        slow(parse_devices("8xA100-40GB")),
        {**STAGED, "microbatches": 2, "mesh": Mesh(pp=2, tp=4), "recompute": True},
    ),
    "uneven replicas of stages": (
        "4xA100-40GB", {**STAGED, "microbatches": 2, "mesh": Mesh(dp=2, pp=2, shares=(3, 1))},
    ),
    "replicas": ("3x1GiB", {"mesh": Mesh(dp=3)}),
    "uneven replicas": ("1xA100-40GB,1xH100-80GB", {"mesh": Mesh(dp=2, shares=(1, 3))}),
    "replicas, inference": (TWO, {"mesh": Mesh(dp=2), "mode": "inference"}),
    "replicas with a cache": ("3x1GiB", {"mesh": Mesh(dp=3), "mode": "training, keeping"}),
    "replicas with a cache, inference": (TWO, {"mesh": Mesh(dp=2), "mode": "inference, keeping"}),
    "replicas of processes": ("2 hosts of 1xA100-40GB", {"mesh": Mesh(dp=2)}),
    "sharded replicas": (TWO, {"mesh": Mesh(fsdp=2), "stages": 4}),
    "ranks in two hosts": ("2 hosts of 2xA100-40GB", {"tensor": 4, "mode": "inference"}),
    "streamed": ({"cpu:0": "480KiB", **STORE}, {"streams": True, "mode": "inference"}),
    "streamed to two": (
        {"cpu:0": "1MiB", "cpu:1": "1MiB", **STORE},
        {"streamed": {f"blocks.{i}": "cpu" for i in range(BLOCKS)}, "mode": "inference"},
    ),
    "streamed from disk": (
        {"cpu:0": "480KiB", "cpu": "80KiB", "disk": "1GiB"}, {"streams": True, "mode": "inference"},
    ),
    "streamed ranks": (
        {"cpu:0": "1MiB", "cpu:1": "1MiB", **STORE},
        {"streamed": {"blocks.0": "cpu", "blocks.2": "cpu"}, "tensor": 2, "mode": "inference"},
    ),
}  # fmt: skip


def inputs_of(size, length):
    return torch.zeros(size, length, WIDTH)


@cache
def profile_of(mode, size, length):
    kind, _, keeping = mode.partition(", ")
    workload = Workload(batch_size=size, sequence_length=length, mode=kind)
    return autoshard.profile(Keeping() if keeping else Net(), inputs_of(size, length), workload=workload)


@cache
def _groups():
    return find_groups(capture(Net(), inputs_of(*BASE), workload=Workload(batch_size=BASE[0]), composite=True))


def batch_of(size, keeping=False):
    row = {"dim": 0, "axis": f"*{size}"}
    paths = ["0", *(f"1.keys.{i}" for i in range(BLOCKS))] if keeping else [""]
    outputs = tuple(BatchOutput(path=path, how="cat", **row) for path in paths)
    return BatchAxis(size=size, inputs=(BatchInput(path="x", **row),), outputs=outputs)


def _by_hand(cluster, profile, *, mesh=None, tensor=1, schedule="none", microbatches=1, stages=0, recompute=False,
             streamed=None, keeping=False) -> Plan:  # fmt: skip
    names = cluster.names
    degree = mesh.tensor if mesh is not None else tensor
    few = replace(cluster, devices=cluster.devices[:degree])
    cuts = column_parallel(profile, few, _groups(), unproved, degree=degree, even=True).cuts if degree > 1 else ()
    count = stages or (mesh.pipeline if mesh is not None and mesh.pipeline > 1 else 0)
    bounds = [BLOCKS * i // count for i in range(count + 1)] if count else []
    found = tuple(
        Stage(paths=tuple(f"blocks.{i}" for i in range(a, b)), recompute=recompute) for a, b in pairwise(bounds)
    )
    placements = {"": names[0]}
    if mesh is not None and mesh.pipeline > 1:
        placements = {path: names[mesh.rank(pipeline=i % mesh.pipeline)]
                      for i, stage in enumerate(found) for path in stage.paths}  # fmt: skip
    if streamed and not cuts:
        placements = {path: names[2 * i // BLOCKS] for i, path in enumerate(streamed)}
    return Plan(
        strategy="by hand", objective="latency", workload=profile.workload,
        devices=tuple(plan_device(device) for device in (few if cuts and mesh is None else cluster).devices),
        placements=placements, cuts=cuts, mesh=mesh,
        batch=batch_of(BASE[0], keeping) if mesh is not None else None, stages=found, num_microbatches=microbatches,
        schedule=schedule, streamed=streamed or {}, fingerprint=profile.graph.fingerprint,
    )  # fmt: skip


@cache
def divided(name):
    """(plan, cluster, what the sliders have, mode) of a case."""
    spec, options = CASES[name]
    options = dict(options)
    mode = options.pop("mode", "training")
    cluster, profile = parse_devices(spec), profile_of(mode, *BASE)
    if options.pop("streams", False):
        plan = autoshard.plan(Net(), spec, inputs=inputs_of(*BASE))
        assert plan.streamed and plan.mesh is None
    else:
        plan = _by_hand(cluster, profile, keeping="keeping" in mode, **options)
    scaling = find_scaling(profile, profile_of(mode, 3 * BASE[0], BASE[1] // 2))
    data = what_if_data(plan, autoshard.estimate(plan, profile, cluster), profile, cluster, scaling)
    return plan, cluster, json.loads(json.dumps(data)), mode


def at_size(plan, size):
    """The same plan for another batch."""
    return plan if plan.batch is None else replace(plan, batch=batch_of(size, len(plan.batch.outputs) > 1))

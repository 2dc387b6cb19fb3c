"""mesh_cost: what it says of one dimension alone is what the other estimates say, and of several what follows."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.groups import find_groups
from autoshard.axes.unproved import unproved
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.capture.capture import capture
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cluster.parse import parse_devices
from autoshard.cost import divided_bound, estimate
from autoshard.engine.cuts import estimate_cuts
from autoshard.engine.links import all_reduce_seconds
from autoshard.engine.mesh import estimate_stages
from autoshard.engine.pricer import Pricer, estimate_mesh, in_one_piece
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan, PlanDevice, Stage
from autoshard.profile.part import part_of_batch
from autoshard.strategies.column_parallel import column_parallel
from autoshard.workload import Workload

BATCH, WIDTH = 16, 64


class Block(nn.Module):
    """`leveled`: with a mean between its matrices, which is a sum of little where they are cut."""

    def __init__(self, leveled=False):
        super().__init__()
        self.leveled = leveled
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        inner = self.up(x).relu()
        return x + self.down(inner / inner.square().mean(-1, keepdim=True) if self.leveled else inner)


class Net(nn.Module):
    def __init__(self, leveled=False):
        super().__init__()
        self.blocks = nn.ModuleList(Block(leveled) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


INPUTS = torch.zeros(BATCH, 32, WIDTH)


def batch():
    row = {"dim": 0, "axis": f"*{BATCH}"}
    return BatchAxis(
        size=BATCH, inputs=(BatchInput(path="x", **row),), outputs=(BatchOutput(path="", how="cat", **row),)
    )


def profile_of(mode):
    return autoshard.profile(Net(), INPUTS, workload=Workload(batch_size=BATCH, mode=mode))


@pytest.fixture(scope="module")
def profiles():
    return {mode: profile_of(mode) for mode in ("inference", "training")}


@pytest.fixture(scope="module")
def groups():
    return find_groups(capture(Net(), INPUTS, workload=Workload(batch_size=BATCH), composite=True))


def plan_on(cluster, profile, mesh, *, cuts=(), microbatches=1, schedule="gpipe"):
    devices = tuple(PlanDevice(name=d.name, memory_bytes=d.memory_bytes, kind=d.kind, host=d.host)
                    for d in cluster.devices[: mesh.size])  # fmt: skip
    bounds = [4 * i // mesh.pipeline for i in range(mesh.pipeline + 1)]
    stages = tuple(Stage(paths=tuple(f"blocks.{i}" for i in range(a, b))) for a, b in pairwise(bounds))
    placements = {path: devices[mesh.rank(pipeline=i)].name for i, stage in enumerate(stages) for path in stage.paths}
    if mesh.pipeline == 1:
        stages, placements = (), {"": devices[0].name}
    return Plan(
        strategy="mesh", objective="latency", workload=profile.workload, devices=devices, placements=placements,
        mesh=mesh, batch=batch(), stages=stages, num_microbatches=microbatches, schedule=schedule, cuts=cuts,
        fingerprint=profile.graph.fingerprint,
    )  # fmt: skip


def combined(plan, profile, cluster):
    return estimate_stages(plan, profile, cluster, processes=True)


def slow(cluster):
    """The same devices with links on which bytes count and not messages."""
    return replace(cluster, links=tuple(replace(link, bytes_per_second=1e6) for link in cluster.links))


def cuts_of(profile, cluster, groups, degree):
    few = replace(cluster, devices=cluster.devices[:degree])
    return column_parallel(profile, few, groups, unproved, degree=degree, even=True).cuts


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("links", ["fast", "slow"])
def test_ranks_alone_are_a_plan_with_cuts(mode, links):
    """Over slow links a sum of little, as backward has it, takes less than its gather in forward."""
    workload = Workload(batch_size=BATCH, mode=mode)
    profile = autoshard.profile(Net(leveled=True), INPUTS, workload=workload)
    groups = find_groups(capture(Net(leveled=True), INPUTS, workload=Workload(batch_size=BATCH), composite=True))
    cluster = parse_devices("4xA100-40GB")
    if links == "slow":
        cluster = slow(cluster)
    cuts = cuts_of(profile, cluster, groups, 4)
    plan = plan_on(cluster, profile, Mesh(tp=4), cuts=cuts)
    one = combined(plan, profile, cluster)
    other = estimate_cuts(replace(plan, mesh=None), profile, cluster)
    assert cuts and one.latency_seconds == pytest.approx(other.latency_seconds, rel=1e-9)
    assert one.collective_seconds == pytest.approx(other.collective_seconds, rel=1e-9)
    assert (one.all_reduces, one.all_gathers) == (other.all_reduces, other.all_gathers) and one.all_gathers
    for a, b in zip(one.devices, other.devices, strict=True):
        assert a.compute_seconds == pytest.approx(b.compute_seconds, rel=1e-9)
        assert a.peak_bytes == pytest.approx(b.peak_bytes, rel=0.05)


def test_replicas_add_the_sum_of_their_gradients(profiles):
    """Two replicas of two stages, in two hosts: each as a pipeline of half the batch, then the slow link."""
    cluster, profile = parse_devices("2 hosts of 2xA100-40GB"), profiles["training"]
    plan = plan_on(cluster, profile, Mesh(dp=2, pp=2), microbatches=4, schedule="1f1b")
    both = combined(plan, profile, cluster)
    assert len({(d.peak_bytes, d.compute_seconds) for d in both.devices}) == 2  # one row per stage
    half = part_of_batch(profile, batch(), BATCH // 2)
    rows = replace(batch(), size=BATCH // 2)
    one = replace(plan, devices=plan.devices[:2], mesh=Mesh(pp=2), batch=rows)
    alone = combined(one, half, cluster)
    nbytes = profile.parameter_bytes // 2
    sum_seconds = all_reduce_seconds(cluster, [cluster.names[0], cluster.names[2]], nbytes)
    assert both.latency_seconds == pytest.approx(alone.latency_seconds + sum_seconds, rel=1e-3)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_three_dimensions(profiles, groups, mode):
    cluster, profile = parse_devices("2 hosts of 4xA100-40GB"), profiles[mode]
    cuts = cuts_of(profile, cluster, groups, 2)
    plan = plan_on(cluster, profile, Mesh(dp=2, pp=2, tp=2), cuts=cuts, microbatches=4)
    found = estimate_mesh(plan, profile, cluster)
    assert found.fits and len(found.devices) == 8
    whole = sum(d.parameter_bytes for d in found.devices)
    held = 2 * profile.parameter_bytes  # a copy per replica; biases behind an all-reduce are on every rank
    assert held <= whole <= held * 1.01
    assert found.latency_seconds >= divided_bound(profile, cluster) == found.lower_bound_seconds
    for device in found.devices:  # the clock of every device adds up to what is said of it
        own = [
            e for e in found.pipelining.events if e.device == device.name and e.kind not in ("transfer", "all-reduce")
        ]
        busy = sum(e.end_seconds - e.begin_seconds for e in own)
        assert device.compute_seconds <= busy <= found.latency_seconds
        assert max(e.end_seconds for e in found.pipelining.events) == pytest.approx(found.latency_seconds)


def test_unequal_replicas_have_unequal_rows(profiles):
    fast, slow = parse_devices("2xA100-40GB"), parse_devices("2xT4")
    devices = (*fast.devices, *(replace(d, name=f"cuda:{i + 2}") for i, d in enumerate(slow.devices)))
    cluster = _linked(devices)
    plan = plan_on(cluster, profiles["training"], Mesh(dp=2, pp=2, shares=(3, 1)), microbatches=2)
    found = combined(plan, profiles["training"], cluster)
    assert found.devices[0].activation_bytes > 2 * found.devices[2].activation_bytes


def test_no_plan_is_below_the_bound(profiles):
    cluster = _linked((_device("a", 1e12), _device("b", 2e12), _device("c", 4e12)))
    one = [divided_bound(profiles["inference"], replace(cluster, devices=(d,))) for d in cluster.devices]
    assert divided_bound(profiles["inference"], cluster) == pytest.approx(
        1 / sum(1 / seconds for seconds in one), rel=0.2
    )
    assert divided_bound(profiles["inference"], cluster) <= min(one)


def test_what_cannot_be_priced_is_refused(profiles):
    cluster = parse_devices("4xA100-40GB")
    plan = plan_on(cluster, profiles["training"], Mesh(dp=2, pp=2), microbatches=2)
    with pytest.raises(PlanError, match="does not say how the batch is divided"):
        estimate_mesh(replace(plan, batch=None), profiles["training"], cluster)
    with pytest.raises(PlanError, match="can't have stages"):
        estimate_mesh(replace(plan, mesh=Mesh(fsdp=2, pp=2)), profiles["training"], cluster)
    with pytest.raises(PlanError, match="a batch of 8 can't be divided into 9"):
        estimate_mesh(replace(plan, num_microbatches=9), profiles["training"], cluster)


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
    plan = plan_on(cluster, profile, mesh, microbatches=2 if mesh.pipeline > 1 else 1)
    found, whole = estimate_mesh(plan, profile, cluster), estimate(in_one_piece(plan), profile, cluster)
    assert found.devices == whole.devices and found.latency_seconds == whole.latency_seconds
    assert any("runs undivided" in note for note in found.notes)


def test_what_a_plan_says_about_itself_does_not_change_its_price():
    """A plan is priced once: its reasons, and what is noted for its run, are written after."""
    model = Net()
    profile, cluster = autoshard.profile(model, INPUTS), parse_devices({"cuda:0": "1GiB", "cuda:1": "1GiB"})
    found = find_groups(capture(model, INPUTS, composite=True))
    price = Pricer(profile, cluster)
    plan = column_parallel(profile, cluster, found, unproved, degree=2, price=price)
    assert plan.cuts and plan.reasons and plan.results
    known = len(price._known)
    figures = price(plan)
    assert len(price._known) == known and price(replace(plan, reasons=())) is figures

"""column_parallel: what is cut over which devices, and every no has a reason."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.groups import AxisGroup, AxisGroups, Unshardable
from autoshard.axes.regions import Region
from autoshard.cluster.device import Device
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.sharding import Action, Cut, Refusal, Shard
from autoshard.plan.workload import Workload
from autoshard.strategies.column_parallel import column_parallel
from tests.blocks import Blocks
from tests.clusters import linked

WIDTH = 256


@pytest.fixture(scope="module")
def profile():
    return autoshard.profile(Blocks(4, WIDTH, 512), torch.arange(64).reshape(1, 64), workload=Workload())


def group(index, *, size=8, nbytes=1000, blocks=("",), names=("head.weight",), conflicts=(), reduced=0, gathered=0):
    actions = [Action(kind="reduce", module=name, function="linear", occurrence=0) for name in names[:1] if reduced]
    actions += [Action(kind="gather", module=name) for name in names[:1] if gathered]
    return AxisGroup(
        index=index, blocks=blocks, size=size, actions=tuple(actions), summed=(), nbytes=nbytes, flops=0,
        shards=tuple(Shard(name=name, dim=int("down" in name), axis=f"*{size}") for name in names),
        reduced_bytes=reduced, gathered_bytes=gathered, conflicts=tuple(conflicts), factor=None, walk=None,
    )  # fmt: skip


def net_groups(depth=4, size=4 * WIDTH):
    """What the analysis finds in the model: the inner width of the blocks, the rows of the table, those of the head."""
    blocks = tuple(f"blocks.{i}" for i in range(depth))
    inner = group(
        0, size=size, nbytes=8 * 4 * WIDTH * WIDTH, blocks=blocks,
        names=("down.weight", "up.weight"), reduced=64 * WIDTH * 4,
    )  # fmt: skip
    head = group(1, size=512, nbytes=512 * WIDTH * 4, names=("head.weight",), gathered=4096)
    return AxisGroups(
        groups=(inner, head),
        unshardable=(Unshardable(name="embed.weight", dim=0, reason="embedding says no"),),
        regions=(Region(path="", ops=(), paths=("",)), Region(path="blocks.0", ops=(), paths=blocks)),
    )


def device(name, *, memory=10**9, rate=1e12, speed=1e11, host="host0"):
    return Device(
        name=name, memory_bytes=memory, flops_per_second={"default": rate}, bytes_per_second=speed, host=host,
        launch_seconds=1e-6,
    )  # fmt: skip


def cluster(*devices, latency=1e-6, rate=1e11):
    return linked(devices, rate, latency)


def alike(count, *, latency=1e-6, rate=1e11, **figures):
    return cluster(*(device(f"d:{i}", **figures) for i in range(count)), latency=latency, rate=rate)


def prove(groups, shares):
    """Everything can be cut as it is."""
    return [
        Cut(blocks=g.blocks, size=g.size, shares=s, shards=g.shards, actions=g.actions, summed=g.summed)
        for g, s in zip(groups, shares, strict=True)
    ]


# ---- the plan


def test_a_plan_says_what_it_does(profile):
    plan = column_parallel(profile, alike(2), net_groups(), prove)
    assert plan.strategy == "column-parallel" and plan.placements == {"": "d:0"}
    assert [cut.shares for cut in plan.cuts] == [(512, 512), (256, 256)]
    assert Plan.from_json(plan.to_json()) == plan
    assert "4 all-reduces and 1 all-gather of a forward" in plan.reasons[0] and "times as fast as" in plan.reasons[0]
    assert [(row.names, row.reason) for row in plan.whole] == [(("embed.weight",), "embedding says no")]
    assert plan == column_parallel(profile, alike(2), net_groups(), prove)


def test_one_device_where_links_are_slow(profile):
    plan = column_parallel(profile, alike(4, latency=1e-2), net_groups(), prove)
    assert plan.cuts == () and plan.placements == {"": "d:0"} and len(plan.devices) == 4
    assert plan.reasons[0].startswith("one device is best: d:0 takes") and "in collectives" in plan.reasons[0]
    assert plan.device_map == {"": "d:0"}
    for demand in ({"degree": 4}, {"asked": True}):
        asked = column_parallel(profile, alike(4, latency=1e-2), net_groups(), prove, **demand)
        assert len(asked.cuts) == 2 and len(asked.devices) == 4 and "slower than" in asked.reasons[0]


def test_what_is_refused_stays_whole_with_its_reason(profile):
    asked = []

    def doubtful(groups, shares):
        asked.append([g.index for g in groups])
        done = prove(groups, shares)
        return [Refusal(reason="a square root of it") if g.index == 0 else c for g, c in zip(groups, done, strict=True)]

    plan = column_parallel(profile, alike(2), net_groups(), doubtful)
    assert [cut.shards[0].name for cut in plan.cuts] == ["head.weight"]
    (row,) = [row for row in plan.whole if row.reason == "a square root of it"]
    assert row.blocks == tuple(f"blocks.{i}" for i in range(4)) and set(row.names) == {"up.weight", "down.weight"}
    assert sum(0 in indices for indices in asked) == 1  # one refusal, not asked again

    def never(groups, shares):
        return [Refusal(reason="it is round")] * len(groups)

    alone = column_parallel(profile, alike(2), net_groups(), never)
    assert alone.cuts == () and "it is round" in alone.reasons[0]
    with pytest.raises(PlanError, match="over 2 devices: it is round"):
        column_parallel(profile, alike(2), net_groups(), never, degree=2)


def test_slices_that_do_not_divide_are_shared_as_evenly_as_they_go(profile):
    plan = column_parallel(profile, alike(3), net_groups(), prove, degree=3)
    assert [cut.shares for cut in plan.cuts] == [(342, 341, 341), (171, 171, 170)]
    assert any("2 cuts are uneven" in reason for reason in plan.reasons)
    with pytest.raises(PlanError, match="into equal parts over 3 devices"):
        column_parallel(profile, alike(3), net_groups(), prove, degree=3, even=True)


def test_a_degree_that_nothing_allows(profile):
    found = AxisGroups(groups=(group(0, size=25),), unshardable=(), regions=())
    with pytest.raises(PlanError, match=r"into equal parts over 2 devices\. .*allow: 5, 25\."):
        column_parallel(profile, alike(2), found, prove, degree=2, even=True)
    with pytest.raises(PlanError, match="Ask for 1 to 2"):
        column_parallel(profile, alike(2), found, prove, degree=3)
    with pytest.raises(PlanError, match="balanced"):
        column_parallel(profile, alike(2), replace(found, groups=()), prove, degree=2)
    assert column_parallel(profile, alike(2), replace(found, groups=()), prove).cuts == ()


def test_what_no_run_uses_stays_whole_and_the_plan_says_so():
    model = Blocks(2, WIDTH, 512)
    model.spare = nn.Linear(WIDTH, WIDTH)
    measured = autoshard.profile(model, torch.arange(64).reshape(1, 64), workload=Workload())
    plan = column_parallel(measured, alike(2), net_groups(depth=2), prove, objective="memory")
    assert ("spare.weight",) in [row.names for row in plan.whole if row.reason == "nothing in the recorded run uses it"]


def test_too_little_memory(profile):
    need = profile.peak_bytes
    cut = 4 * net_groups().groups[0].nbytes + net_groups().groups[1].nbytes
    plan = column_parallel(profile, alike(2, memory=need - cut // 3, latency=1e-2), net_groups(), prove)
    assert len(plan.cuts) == 1 and "one device would be faster" in plan.reasons[0]
    with pytest.raises(PlanError, match=r"does not fit.*d:0 needs .*It was checked that it fits with one more device"):
        column_parallel(profile, alike(2, memory=need - cut * 6 // 10), net_groups(), prove)
    with pytest.raises(PlanError, match=r"does not fit.*weights.*It was checked that it fits if every device has"):
        column_parallel(profile, alike(2, memory=need - cut - 10**5), net_groups(), prove)


def test_groups_of_two_analyses_never_cut_one_parameter_twice(profile):
    whole = group(0, names=("head.weight", "embed.weight"), nbytes=10**5)
    factor = group(1, names=("weight",), blocks=("embed",), nbytes=10**5)
    found = AxisGroups(groups=(whole, factor), unshardable=(), regions=())
    assert len(column_parallel(profile, alike(2), found, prove, objective="memory").cuts) == 1

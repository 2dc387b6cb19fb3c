"""column_parallel: the choice equals brute force, shares fill like water, and every no has a reason."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard.axes.groups import AxisGroup, AxisGroups, Blocked, find_groups
from autoshard.axes.regions import Region
from autoshard.capture.capture import capture
from autoshard.cluster.cluster import Cluster, Device, Link
from autoshard.engine.cuts import Collective, estimate_cuts
from autoshard.engine.pricer import Pricer
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan_cuts import Refusal
from autoshard.sharding import Action, Cut, Shard, even_shares
from autoshard.sizes import format_seconds
from autoshard.strategies import cut_choice
from autoshard.strategies.column_parallel import column_parallel, valid_degrees
from autoshard.strategies.cut_savings import Saving
from autoshard.strategies.cut_search import best_choice
from autoshard.strategies.cut_task import held_bytes, make_task
from autoshard.strategies.shares import divide
from autoshard.workload import Workload

WIDTH = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(512, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 512, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture(scope="module")
def profile():
    return autoshard.profile(Net(), torch.arange(64).reshape(1, 64), workload=Workload())


def group(index, *, size=8, nbytes=1000, blocks=("",), names=("head.weight",), conflicts=(), reduced=0, gathered=0):
    actions = [Action(kind="reduce", module=name, function="linear", occurrence=0) for name in names[:1] if reduced]
    actions += [Action(kind="gather", module=name) for name in names[:1] if gathered]
    return AxisGroup(
        index=index, blocks=blocks, size=size, actions=tuple(actions), summed=(), nbytes=nbytes, flops=0,
        shards=tuple(Shard(name=name, dim=int("down" in name), axis=f"*{size}") for name in names),
        reduced_bytes=reduced, gathered_bytes=gathered, conflicts=tuple(conflicts), leaf=None, walk=None,
    )  # fmt: skip


def groups_only(groups):
    return AxisGroups(groups=tuple(groups), blocked=(), regions=())


def saving(one, flops=0):
    """What a group saves if all that its ops compute and move is cut."""
    sent = ((one.reduced_bytes, one.reductions, False), (one.gathered_bytes, one.gathers, True))
    return Saving(
        flops=np.array([float(flops)]), moved=np.array([float(one.nbytes)]), dtypes=("float32",),
        flops_cut=np.ones(1), moved_cut=np.ones(1), trained_bytes=0,
        collectives=tuple(
            Collective(op=0, block="", gathers=gathers, nbytes=nbytes // count)
            for nbytes, count, gathers in sent for _ in range(count)
        ),
    )  # fmt: skip


def task_of(profile, posed, groups, objective="latency", even=False, flops=()):
    """The task of choosing among groups that this model does not have."""
    savings = itertools.starmap(saving, itertools.zip_longest(groups, flops, fillvalue=0))
    task = make_task(profile, posed, groups_only(()), objective, even)
    parameters = sum(len(g.blocks) * g.nbytes for g in groups)
    return replace(
        task, groups=tuple(groups), savings=tuple(savings), cuttable_bytes=parameters,
        conflicts=tuple(frozenset(g.conflicts) for g in groups), whole_bytes=10**7 + parameters,
    )  # fmt: skip


def net_groups(depth=4, size=4 * WIDTH):
    """What the analysis finds in `Net`: the inner width of the blocks, the rows of the table, those of the head."""
    blocks = tuple(f"blocks.{i}" for i in range(depth))
    inner = group(
        0, size=size, nbytes=8 * 4 * WIDTH * WIDTH, blocks=blocks,
        names=("down.weight", "up.weight"), reduced=64 * WIDTH * 4,
    )  # fmt: skip
    head = group(1, size=512, nbytes=512 * WIDTH * 4, names=("head.weight",), gathered=4096)
    return AxisGroups(
        groups=(inner, head),
        blocked=(Blocked(name="embed.weight", dim=0, reason="embedding says no"),),
        regions=(Region(path="", ops=(), paths=("",)), Region(path="blocks.0", ops=(), paths=blocks)),
    )


def device(name, *, memory=10**9, rate=1e12, speed=1e11, host="host0"):
    return Device(
        name=name, memory_bytes=memory, flops_per_second={"default": rate}, bytes_per_second=speed, host=host,
        launch_seconds=1e-6,
    )  # fmt: skip


def cluster(*devices, latency=1e-6, rate=1e11):
    links = tuple(
        Link(source=a.name, destination=b.name, bytes_per_second=rate, latency_seconds=latency)
        for a, b in itertools.permutations(devices, 2)
    )
    return Cluster(devices=devices, links=links)


def alike(count, *, latency=1e-6, rate=1e11, **figures):
    return cluster(*(device(f"d:{i}", **figures) for i in range(count)), latency=latency, rate=rate)


def prove(groups, shares):
    """Everything can be cut as it is."""
    return [
        Cut(blocks=g.blocks, size=g.size, shares=s, shards=g.shards, actions=g.actions, summed=g.summed)
        for g, s in zip(groups, shares, strict=True)
    ]


# ---- shares


@given(
    st.integers(1, 9).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.lists(st.tuples(st.floats(0.1, 3), st.integers(0, 9)), min_size=1, max_size=3),
        )
    )
)
def test_shares_are_the_best_there_are(given_):
    size, ranks = given_
    seconds, most = [own for own, _ in ranks], [limit for _, limit in ranks]
    found = divide(size, seconds, most)
    ways = [
        shares
        for shares in itertools.product(range(1, size + 1), repeat=len(ranks))
        if sum(shares) == size and all(share <= limit for share, limit in zip(shares, most, strict=True))
    ]
    if not ways:
        assert found is None
        return
    assert found in ways

    def last(shares):
        return max(share * own for share, own in zip(shares, seconds, strict=True))

    assert last(found) <= min(map(last, ways)) * 1.02 * (1 + 1e-9)


def test_shares_by_hand():
    assert divide(25, [1.0, 1.0]) == (13, 12) == even_shares(25, 2)
    assert divide(32, [1.0, 3.0]) == (24, 8)
    assert divide(32, [1.0, 1.01]) == (16, 16)  # almost equal is equal
    assert divide(32, [1.0, 1.0], [8, 32]) == (8, 24)
    assert divide(50257, [1.0, 1.0, 1.0]) == (16753, 16752, 16752)
    assert divide(2, [1.0, 1.0, 1.0]) is None and divide(4, [1.0, 1.0], [1, 2]) is None
    assert divide(4, [0.0, 0.0]) == (2, 2)


# ---- the choice


@st.composite
def instances(draw):
    count = draw(st.integers(0, 5))
    groups = []
    for index in range(count):
        groups.append(
            group(
                index,
                size=draw(st.sampled_from([2, 3, 6, 8])),
                nbytes=draw(st.integers(1, 20)) * 10**6,
                blocks=tuple(f"{index}.{i}" for i in range(draw(st.integers(1, 3)))),
                conflicts=[other for other in range(count) if other != index and draw(st.booleans())],
                reduced=draw(st.sampled_from([0, 10**4, 10**6, 10**8])),
                gathered=draw(st.sampled_from([0, 10**6])),
            )
        )
    devices = [
        device(f"d:{i}", memory=draw(st.sampled_from([30, 100, 300])) * 10**6 + 12345)
        for i in range(draw(st.integers(1, 3)))
    ]
    posed = cluster(*devices, latency=draw(st.sampled_from([1e-6, 1e-4])), rate=draw(st.sampled_from([1e9, 1e11])))
    flops = [draw(st.integers(0, 20)) * 10**8 for _ in groups]
    return groups, flops, posed, draw(st.sampled_from(["latency", "memory"])), draw(st.booleans())


def by_brute_force(task):
    """The best value over all sets of devices and compatible groups, with even shares."""
    best = None
    for count in range(1, len(task.cluster.devices) + 1):
        for devices in itertools.combinations(task.cluster.devices, count):
            names = [d.name for d in devices]
            for size in range(len(task.groups) + 1 if count > 1 else 1):
                for chosen in itertools.combinations(task.groups, size):
                    indices = {g.index for g in chosen}
                    if any(indices.intersection(task.conflicts[g.index]) for g in chosen):
                        continue
                    if any(g.size % count if task.even else g.size < count for g in chosen):
                        continue
                    saved, peaks, collectives = [0.0] * count, [task.whole_bytes] * count, 0.0
                    shared = task.profile.peak_bytes - task.profile.parameter_bytes
                    peaks = [peak - int(shared * (1 - 1 / count)) for peak in peaks]
                    for g in chosen:
                        one, whole = task.savings[g.index], len(g.blocks) * g.nbytes
                        parts = [share / g.size for share in even_shares(g.size, count)]
                        own = [one.seconds(task.profile, d, part) for d, part in zip(devices, parts, strict=True)]
                        saved = [a + len(g.blocks) * b for a, b in zip(saved, own, strict=True)]
                        peaks = [p - int(whole * (1 - part)) for p, part in zip(peaks, parts, strict=True)]
                        collectives += len(g.blocks) * one.collective_seconds(task.cluster, names)
                    alone = [task.whole_seconds[name] for name in names]
                    seconds = collectives + max(max(a - b, 0) for a, b in zip(alone, saved, strict=True))
                    if any(p > d.budget_bytes for p, d in zip(peaks, devices, strict=True)):
                        continue
                    full = max(p / d.budget_bytes for p, d in zip(peaks, devices, strict=True))
                    value = full if task.objective == "memory" else seconds
                    best = value if best is None else min(best, value)
    return best


@pytest.mark.parametrize("most_sets", [4096, 0])
@settings(max_examples=20)
@given(instances())
def test_the_choice_is_the_best_there_is(profile, most_sets, instance):
    """Whether all sets of groups are looked at, or the solver of integer programs is asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cut_choice, "_MOST_SETS", most_sets)
        check_choice(profile, instance)


def check_choice(profile, instance):
    groups, flops, posed, objective, _ = instance
    task = task_of(profile, posed, groups, objective, even=True, flops=flops)
    task = replace(task, whole_seconds={d.name: 5e-3 for d in posed.devices})
    found, best = best_choice(task), by_brute_force(task)
    assert (found is None) == (best is None)
    if found is not None:
        assert found.value(objective)[0] == pytest.approx(best, rel=2e-6)
        indices = {option.index for option in found.picked}
        assert not any(indices.intersection(option.conflicts) for option in found.picked)


@settings(max_examples=15)
@given(instances(), st.floats(1, 50))
def test_faster_links_and_more_devices_never_hurt(profile, instance, factor):
    groups, flops, posed, _, even = instance
    posed = replace(posed, devices=tuple(replace(d, memory_bytes=10**9) for d in posed.devices))
    faster = replace(posed, links=tuple(replace(k, bytes_per_second=k.bytes_per_second * factor) for k in posed.links))
    fewer = replace(posed, devices=posed.devices[:-1] or posed.devices)
    tasks = [task_of(profile, c, groups, even=even, flops=flops) for c in (faster, posed, fewer)]
    seconds = [best_choice(replace(t, whole_seconds=dict.fromkeys(t.whole_seconds, 5e-3))).seconds for t in tasks]
    assert seconds[0] <= seconds[1] * (1 + 1e-9) <= seconds[2] * (1 + 1e-8)
    assert seconds[2] <= 5e-3 * (1 + 1e-9)  # never slower than one device


@given(instances())
@settings(max_examples=15)
def test_what_is_chosen_fits(profile, instance):
    groups, flops, posed, objective, _ = instance
    task = task_of(profile, posed, groups, objective, flops=flops)
    found = best_choice(task)
    if found is not None:
        assert all(peak <= d.budget_bytes for peak, d in zip(found.peak_bytes, found.devices, strict=True))
        for option in found.picked:
            assert sum(option.shares) == task.groups[option.index].size and min(option.shares) > 0


def test_unequal_devices_get_unequal_shares(profile):
    fast, slow = device("fast", rate=3e12, speed=3e11), device("slow")
    plan = column_parallel(profile, cluster(fast, slow), net_groups(), prove, degree=2)
    assert plan.cuts[0].shares == (768, 256)
    even = column_parallel(profile, cluster(fast, slow), net_groups(), prove, degree=2, even=True)
    assert even.cuts[0].shares == (512, 512)
    small = replace(slow, name="small", memory_bytes=profile.peak_bytes - int(0.8 * 4 * net_groups().groups[0].nbytes))
    plan = column_parallel(profile, cluster(slow, small), net_groups(), prove)
    assert plan.cuts[0].shares[1] < 512 and len(plan.devices) == 2  # as much as it has room for
    assert any("uneven" in reason for reason in plan.reasons)


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


def test_fewer_devices_where_more_cost_too_much(profile):
    posed = cluster(*(device(f"d:{i}", host=f"h{i // 2}") for i in range(4)))
    links = tuple(
        link if posed.device(link.source).host == posed.device(link.destination).host
        else replace(link, latency_seconds=1e-2) for link in posed.links
    )  # fmt: skip
    plan = column_parallel(profile, replace(posed, links=links), net_groups(), prove)
    assert [d.name for d in plan.devices] == ["d:0", "d:1"]


def test_memory_cuts_all_however_large_the_devices(profile):
    plan = column_parallel(profile, alike(2, memory=10**13, latency=1e-2), net_groups(), prove, objective="memory")
    assert len(plan.cuts) == 2 and "less memory was asked for" in plan.reasons[0]


def test_what_can_not_be_proved_stays_whole_with_its_reason(profile):
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


def test_uneven_shares_that_are_refused_are_tried_even(profile):
    def only_even(groups, shares):
        done = prove(groups, shares)
        return [c if len(set(c.shares)) == 1 else Refusal(reason="uneven") for c in done]

    fast, slow = device("fast", rate=3e12, speed=3e11), device("slow")
    plan = column_parallel(profile, cluster(fast, slow), net_groups(), only_even, degree=2)
    assert plan.cuts[0].shares == (512, 512)


@pytest.mark.parametrize(
    "sizes, even, degrees",
    [
        ((32, 8), True, (2, 4, 8)),
        ((32, 8), False, (2, 3, 4, 5, 6, 7, 8)),
        ((25, 100), True, (5, 25)),
        ((7,), True, (7,)),
        ((), True, ()),
    ],
)
def test_valid_degrees(profile, sizes, even, degrees):
    groups = [group(i, size=size, names=(f"w{i}",)) for i, size in enumerate(sizes)]
    assert valid_degrees(task_of(profile, alike(2), groups, even=even)) == degrees


def test_degrees_at_which_more_is_sent_are_not_as_good(profile):
    """What single modules can be cut into, with a gather behind each, does not make a degree valid."""
    both = group(0, size=4, names=("a", "b"), nbytes=2000, reduced=8)
    one = group(1, size=100, names=("a",), gathered=8, conflicts=[0])
    other = group(2, size=100, names=("b",), gathered=8, conflicts=[0])
    assert valid_degrees(task_of(profile, alike(2), [both, one, other], even=True)) == (2, 4)


def test_a_degree_that_nothing_allows(profile):
    found = AxisGroups(groups=(group(0, size=25),), blocked=(), regions=())
    with pytest.raises(PlanError, match=r"into equal parts over 2 devices\. .*allow: 5, 25\."):
        column_parallel(profile, alike(2), found, prove, degree=2, even=True)
    with pytest.raises(PlanError, match="Ask for 1 to 2"):
        column_parallel(profile, alike(2), found, prove, degree=3)
    with pytest.raises(PlanError, match="balanced"):
        column_parallel(profile, alike(2), replace(found, groups=()), prove, degree=2)
    assert column_parallel(profile, alike(2), replace(found, groups=()), prove).cuts == ()


def test_single_modules_are_cut_only_where_no_block_cuts_them(profile):
    """Cutting `up` alone would save a little more (its bias too), and costs gathers."""
    found = net_groups()
    paths = tuple(f"blocks.{i}.up" for i in range(4))
    inner, head = found.groups
    alone = group(2, size=1024, nbytes=inner.nbytes + 10**5, blocks=paths, names=("weight",), gathered=8)
    table = group(3, size=512, nbytes=10**5, blocks=("embed",), names=("weight",), gathered=8)
    found = replace(found, groups=(inner, head, alone, table))
    plan = column_parallel(profile, alike(2), found, prove, objective="memory")
    assert [cut.blocks[0] for cut in plan.cuts] == ["blocks.0", "", "embed"]

    def not_inside(groups, shares):
        return [Refusal(reason="no") if g.index == 0 else c for g, c in zip(groups, prove(groups, shares), strict=True)]

    plan = column_parallel(profile, alike(2), found, not_inside, objective="memory")
    assert [cut.blocks[0] for cut in plan.cuts] == ["", "blocks.0.up", "embed"]


def test_a_single_module_is_cut_instead_where_that_takes_less_time(profile):
    """As where a loop in a block would add up over ranks each time around."""
    found = net_groups()
    paths = tuple(f"blocks.{i}.up" for i in range(4))
    inner, head = found.groups
    alone = replace(inner, index=2, blocks=paths, shards=(Shard(name="weight", dim=0, axis="*1024"),))
    task = make_task(profile, alike(2), replace(found, groups=(inner, head, alone)))
    assert [option.index for option in best_choice(task).picked] == [0, 1]
    inside, other, module = task.savings
    often = replace(inside, collectives=inside.collectives * 20)
    assert [option.index for option in best_choice(replace(task, savings=(often, other, module))).picked] == [1, 2]


def test_what_enters_a_block_is_gathered_before_the_modules_in_it_are_cut():
    groups = find_groups(capture(Net(depth=2), torch.arange(4).reshape(1, 4), composite=True)).groups
    tables = {group.index for group in groups if any(shard.name == "embed.weight" for shard in group.shards)}
    inside = [group for group in groups if group.blocks == ("blocks.0.up", "blocks.1.up")]
    assert tables and inside and all(tables.isdisjoint(group.conflicts) for group in inside)


def test_what_no_run_uses_stays_whole_and_the_plan_says_so():
    model = Net(depth=2)
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
    with pytest.raises(PlanError, match=r"does not fit.*parameters.*It was checked that it fits if every device has"):
        column_parallel(profile, alike(2, memory=need - cut - 10**5), net_groups(), prove)


def test_groups_of_two_analyses_never_cut_one_parameter_twice(profile):
    whole = group(0, names=("head.weight", "embed.weight"), nbytes=10**5)
    leaf = group(1, names=("weight",), blocks=("embed",), nbytes=10**5)
    found = AxisGroups(groups=(whole, leaf), blocked=(), regions=())
    assert len(column_parallel(profile, alike(2), found, prove, objective="memory").cuts) == 1


def test_figures_are_those_of_the_estimate_and_activations_count_as_they_are():
    """Most memory goes into activations that are cut: it fits though it would not if they counted whole."""
    model, inputs = Net(depth=2).eval(), torch.zeros(8, 512, dtype=torch.long)
    profile = autoshard.profile(model, inputs, workload=Workload())
    found = find_groups(capture(model, inputs, composite=True))
    plan = column_parallel(profile, alike(2), found, prove)
    figures = estimate_cuts(plan, profile, alike(2))
    assert plan.reasons[0].startswith(f"{format_seconds(figures.latency_seconds)} per pass over 2 devices")
    peak = max(device.peak_bytes for device in figures.devices)
    cut = sum(len(g.blocks) * g.nbytes for g in found.groups)
    assert profile.peak_bytes - cut > peak + 10**6
    tight = column_parallel(profile, alike(2, memory=peak + 10**5), found, prove)
    assert len(tight.devices) == 2 and estimate_cuts(tight, profile, alike(2, memory=peak + 10**5)).fits


def test_all_that_is_held_beside_parameters_may_turn_out_to_be_shared(profile):
    """A cache, too: a plan that fits by the exact figures must not be left out before they are known."""
    caching = replace(profile, peak_bytes=10**9, cache_bytes=9 * 10**8, activation_peak_bytes=10**6)
    task = make_task(caching, alike(2), groups_only(()))
    assert held_bytes(task, task.cluster.devices) < 0.51 * 10**9


class Dear(Pricer):
    """Finds that cuts take ten times as long as they do."""

    def __call__(self, plan):
        found = super().__call__(plan)
        return replace(found, latency_seconds=found.latency_seconds * 10) if plan.cuts else found


def test_cuts_that_do_not_pay_by_exact_figures_are_left(profile):
    """As where two groups make the same ops smaller, which counts twice when groups are chosen."""
    plan = column_parallel(profile, alike(2), net_groups(), prove, price=Dear(profile, alike(2)))
    assert plan.cuts == () and plan.reasons[0].startswith("one device is best")

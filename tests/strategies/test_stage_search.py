"""The search for stages against all partitions, orders of devices and ways to compute again, priced one by one."""

from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest

from autoshard.errors import SpecError
from autoshard.schedules.orders import in_flight, make_order
from autoshard.schedules.simulate import Times, simulate
from autoshard.strategies import stage_search, stage_tables
from autoshard.strategies.stage_line import Line
from autoshard.strategies.stage_search import Search


def random_line(seed: int, *, microbatches: int = 0, pieces: int = 0, training: bool | None = None) -> Line:
    rng = np.random.default_rng(seed)
    n, devices = pieces or int(rng.integers(3, 7)), int(rng.integers(2, 4))
    training = bool(rng.random() < 0.7) if training is None else training
    speed = np.ones(devices) if rng.random() < 0.5 else rng.integers(1, 4, devices)
    work = rng.integers(1, 20, n).astype(float)
    backward = rng.integers(1, 40, n) * float(training)
    kept = rng.integers(0, 20, n).astype(float)
    static = rng.integers(1, 30, n).astype(float)
    m = microbatches or int(rng.integers(1, 7))
    room = static.sum() + kept.sum() * m
    capacity = rng.integers(int(static.sum() * 0.5), int(room) + 20, devices).astype(float)
    sends = np.stack([rng.integers(0, 3, n + 1), rng.integers(0, 30, n + 1)]).astype(float)
    sends[:, [0, -1]] = 0
    uneven = rng.random() < 0.5
    links = rng.uniform(1, 5, (devices, devices)) if uneven else np.full((devices, devices), 3.0)
    return Line(
        microbatches=m, begins=np.arange(n + 1), forward=work[None] * speed[:, None],
        backward=backward[None] * speed[:, None], weight=backward[None] * speed[:, None] * 0.5,
        static=static, kept=kept * training, transient=rng.integers(0, 9, n).astype(float),
        kept_again=kept * 0.25, again=kept, lasting=rng.integers(0, 3, n).astype(float),
        sends=sends, returns=sends * (rng.random() < 0.5), capacity=capacity,
        latency=np.full((devices, devices), 0.5), bandwidth=links, training=training,
        one_process=bool(rng.random() < 0.5),
    )  # fmt: skip


def by_hand(line: Line, schedule: str, per_device: int, cuts, devices, recompute) -> tuple[float, float]:
    """(seconds, load) of one partition, stage by stage."""
    positions, stages = len(devices), len(cuts) - 1
    order = make_order(
        schedule, positions, line.microbatches,
        stages_per_device=per_device, training=line.training, one_process=line.one_process,
    )  # fmt: skip
    flying = in_flight(order)
    forward, backward, weight, sends, returns = [], [], [], [], []
    held, most = [0.0] * positions, [0.0] * positions
    for s in range(stages):
        pieces, at = range(cuts[s], cuts[s + 1]), s % positions
        device = devices[at]
        forward.append(sum(line.forward[device, i] for i in pieces))
        backward.append(sum(line.backward[device, i] for i in pieces) + forward[-1] * recompute[s])
        weight.append(backward[-1] if s == 0 else sum(line.weight[device, i] for i in pieces))
        came = line.sends[1, cuts[s]]
        kept = sum(line.kept[i] for i in pieces) + came
        again = max(line.again[i] for i in pieces)
        if recompute[s]:
            again = again if line.one_process else kept - came
            kept = sum(line.kept_again[i] for i in pieces) if line.one_process else came
        if line.training:
            held[at] += flying[s] * kept
        held[at] += sum(line.static[i] + line.microbatches * line.lasting[i] for i in pieces)
        more = max(line.transient[i] for i in pieces) + (0 if line.training else came)
        most[at] = max(most[at], more + again * recompute[s])
        if s + 1 < stages:
            ends = device, devices[(s + 1) % positions]
            for table, rows, (a, b) in ((sends, line.sends, ends), (returns, line.returns, ends[::-1])):
                count, nbytes = rows[:, cuts[s + 1]]
                table.append(0.0 if a == b else count * line.latency[a, b] + nbytes / line.bandwidth[a, b])
    times = Times(forward=forward, backward=backward, weight=weight, sends=sends, returns=returns)
    load = max((held[p] + most[p]) / line.capacity[devices[p]] for p in range(positions))
    return simulate(order, times).seconds, load


def brute(line: Line, schedule: str, positions: int, per_device: int, figure: str) -> float:
    """The least figure of all that fit; inf if none does."""
    stages, best = positions * per_device, np.inf
    if line.training and schedule != "zero-bubble":
        ways = list(product((False, True), repeat=stages)) if per_device == 1 else [(False,) * stages, (True,) * stages]
    else:
        ways = [(False,) * stages]
    for inner in combinations(range(1, line.size), stages - 1):
        for devices in permutations(range(len(line.capacity)), positions):
            for way in ways:
                seconds, load = by_hand(line, schedule, per_device, (0, *inner, line.size), devices, way)
                if load <= 1:
                    best = min(best, load if figure == "load" else seconds)
    return best


CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]


@pytest.mark.parametrize("seed", range(200))
def test_equals_all_partitions(seed):
    line = random_line(seed)
    schedule, per_device = CASES[seed % 4]
    positions = 2 if per_device > 1 else min(2 + seed % 2, len(line.capacity))
    if positions * per_device > line.size:
        positions = 2
    if positions * per_device > line.size:
        per_device, schedule = 1, "gpipe"
    try:
        search = Search(line, schedule, positions, per_device)
    except SpecError:
        search, schedule, per_device = Search(line, "gpipe", positions), "gpipe", 1
    found = search.best(range(len(line.capacity)))
    expected = brute(line, schedule, positions, per_device, "seconds")
    assert (found.seconds if found else np.inf) == pytest.approx(expected, rel=1e-9)
    if found:
        assert search.bound(range(len(line.capacity))) <= found.seconds * (1 + 1e-9)
        alone = by_hand(line, schedule, per_device, found.cuts, found.devices, found.recompute)
        assert (found.seconds, found.load) == pytest.approx(alone)


@pytest.mark.parametrize("seed", range(200, 240))
def test_forwards_only_are_exact_by_the_sweep_too(seed, monkeypatch):
    monkeypatch.setattr(stage_search, "MAX_ALL", 0)
    monkeypatch.setattr(stage_tables, "MAX_LIMITS", 10_000)
    line = replace(random_line(seed, training=False), returns=np.zeros_like(random_line(seed).returns))
    # copies that take no time: T = F + (m - 1) L holds for stages without them
    line = replace(random_line(seed, training=False), latency=np.zeros_like(line.latency), sends=line.sends * 0)
    found = Search(line, "gpipe", 2).best(range(len(line.capacity)))
    expected = brute(line, "gpipe", 2, 1, "seconds")
    assert (found.seconds if found else np.inf) == pytest.approx(expected, rel=1e-9)


def test_the_sweep_comes_close_in_training(monkeypatch):
    """With a backward no dynamic program is exact: how far from the best it ends is measured."""
    ratios = []
    for seed in range(300, 330):
        line = random_line(seed, pieces=9, microbatches=4, training=True)
        line = replace(line, capacity=line.capacity * 3)
        every = Search(line, "1f1b", 2).best(range(len(line.capacity)))
        with monkeypatch.context() as patch:
            patch.setattr(stage_search, "MAX_ALL", 0)
            swept = Search(line, "1f1b", 2).best(range(len(line.capacity)))
        assert every is not None and swept is not None
        ratios.append(swept.seconds / every.seconds)
    assert max(ratios) < 1.05 and float(np.mean(ratios)) < 1.005


@pytest.mark.parametrize("seed", range(240, 270))
def test_least_memory_equals_all_partitions(seed):
    line = random_line(seed)
    found = Search(line, "gpipe", 2, figure="load").best(range(len(line.capacity)))
    # seconds decide who computes again, so load is that of what fits without; the least of those is found
    expected = brute(line, "gpipe", 2, 1, "load")
    assert (found.load if found else np.inf) >= expected - 1e-9
    assert (found is None) == (expected == np.inf)


@pytest.mark.parametrize("seed", range(40))
def test_stages_of_a_few_pieces_are_enough_on_long_lines(seed, monkeypatch):
    """Tables of a band are widened until no longer stage could be in what comes out."""
    positions = 5
    line = random_line(seed, pieces=70 if seed % 2 else 12, microbatches=4)
    order = tuple(i % len(line.capacity) for i in range(positions))
    found = {}
    for short in (1_000, 1):
        monkeypatch.setattr(stage_tables, "_SHORT", short)
        monkeypatch.setattr(stage_tables, "_WIDTH", 1)
        search = Search(line, "gpipe", positions, figure="load" if seed % 5 == 0 else "seconds")
        found[short] = search.tables.even(order)
    assert found[1] == found[1_000]


@pytest.mark.parametrize("seed", range(400, 440))
def test_only_what_can_not_fit_is_not_looked_at(seed):
    line = random_line(seed)
    line = replace(line, capacity=line.capacity * 0.8)
    devices = range(len(line.capacity))
    if brute(line, "gpipe", 2, 1, "seconds") < np.inf:
        assert line.may_fit(2, 1, devices)


def test_largest_piece_of_any_run_is_known():
    line = random_line(1, pieces=13)
    for low in range(13):
        for high in range(low + 1, 14):
            assert line.most("again", np.array(low), np.array(high)) == line.again[low:high].max()

"""Where stages are cut, against all partitions, priced one by one."""

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from autoshard.schedules.simulate import simulate
from autoshard.strategies import stage_cuts
from autoshard.strategies.stage_cuts import Line, StageCuts

CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1)]


def random_line(seed: int, *, microbatches: int, layers: int = 8, positions: int = 2) -> Line:
    rng = np.random.default_rng(seed)
    training = bool(rng.random() < 0.7)
    speed = np.ones(positions) if rng.random() < 0.5 else rng.integers(1, 4, positions)
    forward = rng.integers(1, 20, layers).astype(float)[None] * speed[:, None]
    kept, static = (rng.integers(1, 20, layers).astype(float) for _ in range(2))
    sends = np.stack([rng.integers(0, 3, layers + 1), rng.integers(0, 10, layers + 1)]).astype(float)
    sends[:, [0, -1]] = 0
    room = (static.sum() + kept.sum() * microbatches) / positions
    return Line(
        microbatches=microbatches, begins=np.arange(layers + 1), forward=forward, backward=2 * forward * training,
        weight=forward * training, after=0 * forward, static=static, trained=static, step=0 * static,
        kept=kept * training, kept_again=kept * 0.25, again=kept, transient=rng.integers(0, 9, layers).astype(float),
        lasting=rng.integers(0, 3, layers).astype(float), sends=sends, returns=sends * training,
        capacity=np.full(positions, room * rng.uniform(0.6, 3)), latency=np.full((positions, positions), 0.5),
        bandwidth=np.full((positions, positions), 3.0), training=training, one_process=bool(rng.random() < 0.5),
    )  # fmt: skip


def best(search: StageCuts) -> float:
    found = search.candidates()
    if search.figure == "load":
        return min((one.load for one in found), default=np.inf)
    return min((search.simulated(one) for one in found), default=np.inf)


def brute(search: StageCuts) -> float:
    """The least figure of all partitions and all stages that may recompute."""
    least, size = np.inf, search.line.size
    ways = list(product((False, True), repeat=search.count)) if search.may_recompute else [(False,) * search.count]
    for inner, way in product(combinations(range(1, size), search.count - 1), ways):
        cuts = (0, *inner, size)
        load = search._load(cuts, way)
        if load <= 1 and search.figure == "load":
            least = min(least, load)
        elif load <= 1:
            least = min(least, simulate(search.order, search.times(cuts, way)).seconds)
    return least


@pytest.mark.parametrize("figure", ["seconds", "load"])
@pytest.mark.parametrize(("schedule", "per_device"), CASES)
def test_close_to_all_partitions(schedule, per_device, figure, monkeypatch):
    """By the dynamic programme alone. It makes stages even; where several share a device, not their sums."""
    monkeypatch.setattr(stage_cuts, "_ALL", 0)
    gaps = []
    for seed in range(30):
        line = random_line(seed, microbatches=4, layers=7)
        if not line.training and schedule != "gpipe":
            continue
        search = StageCuts(line, schedule, 2, per_device, figure)
        wanted, got = brute(search), best(search)
        if np.isfinite(wanted) and (per_device == 1 or np.isfinite(got)):
            gaps.append(got / wanted)
    assert len(gaps) > 8 and min(gaps) >= 1 - 1e-9
    mean, most = (1.02, 1.15) if per_device == 1 else (1.05, 1.25)
    assert np.mean(gaps) < mean and max(gaps) < most


def test_the_slowest_stage_is_as_fast_as_can_be(monkeypatch):
    monkeypatch.setattr(stage_cuts, "_ALL", 0)
    for seed in range(20):
        line = random_line(seed, microbatches=3, layers=9, positions=3)
        line = replace(line, capacity=np.full(3, np.inf), latency=np.zeros((3, 3)), bandwidth=np.full((3, 3), np.inf))
        search = StageCuts(line, "gpipe", 3, 1, "busiest")
        whole = line.forward + line.backward

        def slowest(cuts, whole=whole):
            return max(whole[at, low:high].sum() for at, (low, high) in enumerate(pairwise(cuts)))

        wanted = min(slowest((0, *inner, 9)) for inner in combinations(range(1, 9), 2))
        assert slowest(search.partitions()[0]) == pytest.approx(wanted)


def test_nothing_fits():
    line = random_line(1, microbatches=2)
    search = StageCuts(replace(line, capacity=np.zeros(2)), "gpipe", 2, 1, "seconds")
    assert best(search) == np.inf

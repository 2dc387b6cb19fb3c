"""Which mesh: replicas x stages x tensor-parallel ranks, with micro-batches and schedule, and where to cut the stages.

    8 devices      2 x 2 x 2, 1 x 4 x 2, 4 x 1 x 2, …      all ways to write the number of devices as a product
    of each        micro-batches x schedule                from the least lower bound on, until that exceeds the best

The devices of a stage's ranks are as one device here: as slow as the slowest of them, plus its all-reduces (`Line`).
Stages follow the devices in their order, so that of each mesh only the cuts are left to find (`stage_search`). After
the last micro-batch every stage sums its gradients over the replicas, and steps.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.strategies.stage_line import Line
from autoshard.strategies.stage_search import Found, Many, Search, figure_of

FINALISTS = 4
"""Large meshes that are searched closely; of the others one partition is priced by a formula."""
_LARGE = 256
"""Stages times micro-batches from which on a mesh is large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to use `data * pipeline * tensor` devices. `variant`: which of several sets of cuts."""

    data: int
    pipeline: int
    tensor: int
    microbatches: int = 1
    schedule: str = "gpipe"
    per_device: int = 1
    variant: int = 0

    @property
    def size(self) -> int:
        """How many devices it uses."""
        return self.data * self.pipeline * self.tensor

    @property
    def ranks(self) -> tuple[int, int, int, int]:
        """What its devices hold parts of, however the batch is run through them."""
        return self.data, self.pipeline, self.tensor, self.variant


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posed:
    """What a shape costs.

    Attributes:
        line: its pieces, with its positions as devices.
        after: [positions, pieces] seconds that a piece adds to the end of a pass: its gradients are summed over
            replicas, its parameters stepped.
    """

    line: Line
    after: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meshed:
    """The best partition of a shape. `value` is what is minimised; `held`: [positions] bytes, by the search."""

    shape: Shape
    line: Line
    found: Found
    value: float
    held: np.ndarray


class MeshSearch(Search):
    """The partitions of one shape, its positions in order. `objective` as in `best_mesh`."""

    def __init__(self, posed: Posed, shape: Shape, objective: str) -> None:
        super().__init__(
            posed.line, "gpipe" if shape.schedule == "none" else shape.schedule, shape.pipeline, shape.per_device,
            figure=figure_of(objective, posed.line.training), may_recompute=shape.pipeline > 1,
        )  # fmt: skip
        self.shape = shape
        self.after = np.concatenate([np.zeros((len(posed.after), 1)), np.cumsum(posed.after, axis=1)], axis=1)

    def orders(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """Tensor-parallel ranks are neighbours and stages follow one another: the order is given."""
        return [tuple(devices[: self.positions])]

    def rough(self) -> float:
        """About what the best partition has: stages that take equally long, without the order of their actions.

        T = F + (m - 1) L for L the slowest position, of which every round of v stages fills and drains a v-th part.
        """
        totals = self.line.totals
        summed = (totals["forward"] + totals["backward"])[0]
        cuts = self._split(summed)
        found = self._fitting(cuts) or self._fitting(self._split(totals["static"]))
        if found is None:
            return float("inf")
        cuts, again = found
        forward, whole = totals["forward"][0], summed + again * totals["forward"][0]
        own = [0.0] * self.positions
        for stage in range(self.count):
            own[stage % self.positions] += float(whole[cuts[stage + 1]] - whole[cuts[stage]])
        m, slowest = self.line.microbatches, max(own)
        fill = float(whole[-1]) / (self.count // self.positions) - slowest
        sends = sum(float(self.line.sends[1][cut]) for cut in cuts[1:-1]) / float(self.line.bandwidth[0, -1])
        if self.figure == "load":
            return float(forward[-1])
        if self.figure == "busiest":
            return m * slowest
        end = max(float(self.after[0, cuts[s + 1]] - self.after[0, cuts[s]]) for s in range(self.count))
        return m * slowest + max(fill, 0.0) + sends + end

    def _split(self, summed: np.ndarray) -> tuple[int, ...]:
        """Cuts at which a sum over pieces is most even; every stage has a piece."""
        size, count = self.line.size, self.count
        wanted = np.searchsorted(summed, summed[-1] * np.arange(1, count) / count)
        cuts = [0]
        for stage, cut in enumerate(wanted.tolist(), 1):
            cuts.append(min(max(cut, cuts[-1] + 1), size - (count - stage)))
        return (*cuts, size)

    def _fitting(self, cuts: tuple[int, ...]) -> tuple[tuple[int, ...], bool] | None:
        """The cuts, and whether all stages have to compute again, if they fit in one way."""
        devices = np.arange(self.count)[None, :] % self.positions
        for again in (False, True) if self.may_recompute else (False,):
            many = Many(np.array([cuts]), devices, np.full((1, self.count), again))
            if float(self._loads(many)[0]) <= 1:
                return cuts, again
        return None

    def value(self, found: Found) -> float:
        """As in `Search`; seconds of a pass with what comes after its last micro-batch."""
        if self.figure != "seconds":
            return super().value(found)
        own = [0.0] * self.positions
        for stage in range(self.count):
            low, high, at = found.cuts[stage], found.cuts[stage + 1], stage % self.positions
            own[at] += float(self.after[at, high] - self.after[at, low])
        return found.seconds + max(own)


def least_value(posed: Posed, shape: Shape, objective: str) -> float:
    """Return what no partition of a shape goes below.

    A position does m micro-batches of its pieces. With one stage per position the first micro-batch reaches stage s,
    and the last leaves it, through all stages before: T >= t_0 + … + t_(s-1) + m t_s. Stages that make up all pieces
    then need T >= F / (1 - (1 - 1/m)^p), with F one micro-batch through all of them. Gradients of parameters that a
    schedule leaves for later don't count there.
    """
    line, p, m = posed.line, shape.pipeline, posed.line.microbatches
    if objective == "memory":
        return 0.0
    whole = line.forward + line.backward
    fastest = whole.min(axis=0)
    busy = m * max(float(fastest.max(initial=0.0)), float(fastest.sum()) / p)
    if shape.per_device > 1 or (objective == "throughput" and not line.training):
        return busy
    passing = whole - line.weight if shape.schedule == "zero-bubble" else whole
    through = float(passing.min(axis=0).sum())
    return max(busy, through / (1 - (1 - 1 / m) ** p) if m > 1 else through)


def factorings(count: int) -> Iterator[tuple[int, int, int]]:
    """All (data, pipeline, tensor) whose product is `count`."""
    for tensor in _divisors(count):
        for pipeline in _divisors(count // tensor):
            yield count // tensor // pipeline, pipeline, tensor


def _divisors(count: int) -> list[int]:
    return [n for n in range(1, count + 1) if count % n == 0]


def best_mesh(
    shapes: Iterable[Shape], pose: Callable[[Shape], Posed | None], objective: str,
    searched: dict[Posed, Meshed | None] | None = None,
) -> Meshed | None:  # fmt: skip
    """Return the best shape with its partition; None if none fits. Between equals the simplest.

    `pose`: the arrays of a shape, or None where it makes no sense. `objective`: "latency" is the seconds of a pass,
    "throughput" those of the busiest position where there is no backward, "memory" the fullest position. `searched`:
    the best partitions of what was posed before.
    """
    tried: list[tuple[float, int, Shape, Posed]] = []
    for number, shape in enumerate(shapes):
        posed = pose(shape)
        if posed is not None and posed.line.size >= shape.pipeline * shape.per_device:
            tried.append((least_value(posed, shape, objective), number, shape, posed))
    searched = {} if searched is None else searched

    def closely(search: MeshSearch, posed: Posed) -> Meshed | None:
        if posed not in searched:
            searched[posed] = _found(search)
        return searched[posed]

    best: Meshed | None = None
    rough: list[tuple[float, int, MeshSearch, Posed]] = []
    least = float("inf")
    for bound, number, shape, posed in sorted(tried, key=lambda one: one[:2]):
        if bound > min(least, float("inf") if best is None else best.value) * (1 + 1e-9):
            break
        search = MeshSearch(posed, shape, objective)
        if search.count * shape.microbatches >= _LARGE:
            value = search.rough()
            if np.isfinite(value):
                rough.append((value, number, search, posed))
                least = min(least, value)
            continue
        best = _better(closely(search, posed), best)
    for _, _, search, posed in sorted(rough, key=lambda one: one[:2])[:FINALISTS]:
        best = _better(closely(search, posed), best)
    return best


def _found(search: MeshSearch) -> Meshed | None:
    """The best partition of a shape; None if none fits."""
    found = search.best(range(search.positions))
    if found is None:
        return None
    value, held = search.value(found), search.held(found)
    return Meshed(shape=search.shape, line=search.line, found=found, value=value, held=held)


def _better(one: Meshed | None, best: Meshed | None) -> Meshed | None:
    """Less; between equals fewer devices, then the simpler shape: the order of trying does not matter."""
    if one is None or best is None:
        return one or best

    def key(meshed: Meshed) -> tuple[object, ...]:
        shape = meshed.shape
        return (float(f"{meshed.value:.9g}"), shape.size, shape.per_device, shape.microbatches, shape.pipeline,
                shape.tensor, shape.schedule, shape.variant, meshed.found.cuts)  # fmt: skip

    return min(one, best, key=key)

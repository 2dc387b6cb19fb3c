"""Partitions of a line into stages by dynamic programming, over tables of what every stage would take.

    even     the partition whose slowest (or fullest) stage is least
    sweep    for several limits on the slowest stage, the partition with the least sum

Of long lines only stages of a few pieces are looked at (`Band`): wide enough that no longer one is in a partition that
could come out, as it alone would exceed the limit, or a device.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from autoshard.strategies.stage_line import Array, Band, Line

MAX_LIMITS = 12
"""Limits on the slowest stage that are tried."""
_STEPS = (1.0, 1.005, 1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.25, 1.5, 2.0)
"""These limits, in parts of the least, if there are more."""
_SHORT = 64
"""Pieces up to which stages of any length are looked at."""
_WIDTH = 4
"""Pieces of the longest stage in the first look at a long line, as a multiple of those of an even one."""

Partition = tuple[int, ...]
"""[stages + 1] cuts in pieces."""


class StageTables:
    """What the stages of one line take. `keep`: per stage, how many micro-batches it keeps at one time."""

    def __init__(self, line: Line, positions: int, keep: Sequence[int], *, load: bool, may_recompute: bool) -> None:
        self.line, self.positions, self.keep = line, positions, keep
        self.load, self.may_recompute = load, may_recompute
        self._known: dict[tuple, Array] = {}

    def even(self, order: Sequence[int]) -> Partition | None:
        """The partition whose slowest (or fullest) stage is least; `order`: the device of every position."""
        found = self._even(order)
        return None if found is None else found[1]

    def sweep(self, order: Sequence[int]) -> list[Partition]:
        """Partitions with the least sum for limits on the slowest stage, from the least that there is."""
        least = self._even(order, _STEPS[-1])
        if least is None:
            return []
        slowest, even, tables = least
        found = {even: None}
        every = np.unique(np.concatenate([table[np.isfinite(table)] for table in _different(tables)]))
        limits = every[every >= slowest * (1 - 1e-12)]
        if len(limits) > MAX_LIMITS:
            steps = slowest * np.array(_STEPS)
            limits = np.unique([*limits[np.searchsorted(limits, steps[steps <= limits[-1]])], limits[-1]])
        for limit in limits:
            cheapest = _solve(tables, float(limit), np.add)
            if cheapest is not None:
                found[cheapest[1]] = None
        return list(found)

    def _even(self, order: Sequence[int], room: float = 1.0) -> tuple[float, Partition, list[Array]] | None:
        """Also its figure, and tables with all stages that take up to `room` times as much."""
        longest = self._longest(order)
        width = longest if self.line.size <= _SHORT else min(longest, _WIDTH * -(-self.line.size // len(self.keep)))
        while True:
            tables = [self._table(stage, order, width) for stage in range(len(self.keep))]
            found = _solve(tables, np.inf, np.maximum)
            if width >= longest or (found is not None and self._least_of(width + 1, order) >= found[0] * room):
                return None if found is None else (*found, tables)
            width = min(longest, 2 * width)

    def _longest(self, order: Sequence[int]) -> int:
        """The most pieces of a stage whose static bytes a device has room for."""
        sums = self.line.totals["static"]
        ends = np.searchsorted(sums, sums + float(self.line.capacity[list(order)].max()), side="right") - 1
        return max(int((ends - np.arange(len(sums))).max(initial=1)), 1)

    def _least_of(self, count: int, order: Sequence[int]) -> float:
        """The least that any stage of so many pieces takes."""
        if count > self.line.size:
            return np.inf
        if self.load:
            sums = [self.line.totals["static"] / max(float(self.line.capacity[list(order)].max()), 1e-9)]
        else:
            totals = self.line.totals["forward"] + self.line.totals["backward"]
            sums = [totals[d] for d in {self.line.paces[d] for d in order}]
        return min(float((one[count:] - one[:-count]).min()) for one in sums)

    def _table(self, stage: int, order: Sequence[int], width: int) -> Array:
        """The figure of a stage from one cut to another, as in `Band`; inf where it does not fit."""
        line, device = self.line, order[stage % self.positions]
        before = order[(stage - 1) % self.positions] if stage else device
        there_and_back = ((before, device), (device, before)) if before != device else ()
        links = tuple(float(table[ends]) for table in (line.latency, line.bandwidth) for ends in there_and_back)
        key = width, line.paces[device], float(line.capacity[device]), links, self.keep[stage]
        if key not in self._known:
            self._known[key] = self._make(line.band(width), device, before, self.keep[stage])
        return self._known[key]

    def _make(self, band: Band, device: int, before: int, keep: int) -> Array:
        line = self.line
        plain = band.passing + keep * (band.between("kept") + band.came)
        plain = np.maximum(plain, band.between("stepping"))
        room = float(line.capacity[device])  # of several stages on a device the sum is looked at when they are run
        fits = plain <= room
        again = plain
        if self.may_recompute:
            if line.one_process:
                again = band.passing + keep * band.between("kept_again") + band.most("again")
            else:
                again = band.passing + keep * band.came + band.between("kept")
            again = np.maximum(again, band.between("stepping"))
        if self.load:
            load = np.minimum(plain, again) / max(room, 1e-9)
            return np.where(band.exists & (load <= 1), load, np.inf)
        forward = band.between("forward", device)
        seconds = forward + band.between("backward", device)
        if before != device:
            for what, ends in ((line.sends, (before, device)), (line.returns, (device, before))):
                seconds = seconds + over_link(line, what, *ends)[band.begins]
        table = np.where(fits, seconds, np.inf)
        if self.may_recompute and not fits.all():
            table = np.where(~fits & (again <= room), seconds + forward, table)
        return np.where(band.exists, table, np.inf)


def over_link(line: Line, what: Array, source: Array | int, destination: Array | int) -> Array:
    """Seconds of tensors, [2, …] (how many, bytes), from one device to another; 0 within a device."""
    seconds = what[0] * line.latency[source, destination] + what[1] / line.bandwidth[source, destination]
    return np.where(np.equal(source, destination), 0.0, seconds)


def _different(tables: Sequence[Array]) -> list[Array]:
    """Stages that are alike share a table."""
    return list({id(table): table for table in tables}.values())


def _solve(tables: Sequence[Array], limit: float, join: Callable[..., Array]) -> tuple[float, Partition] | None:
    """The partition with the least sum, or maximum, of stages that all stay within a limit."""
    size, width = len(tables[0]) - 1, tables[0].shape[1]
    within = {id(table): np.where(table <= limit, table, np.inf) for table in _different(tables)}
    best = np.full(width + size + 1, np.inf)  # of no piece there is nothing to take from
    best[width] = 0.0
    came_from = []
    rows = np.arange(size + 1)
    for table in tables:
        value = join(sliding_window_view(best, width)[:-1], within[id(table)])
        column = value.argmin(axis=1)
        came_from.append(rows - width + column)
        best[width:] = value[rows, column]
    if not np.isfinite(best[-1]):
        return None
    cuts = [size]
    for previous in reversed(came_from):
        cuts.append(int(previous[cuts[-1]]))
    return float(best[-1]), tuple(reversed(cuts))

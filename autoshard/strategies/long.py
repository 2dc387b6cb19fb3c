"""Long chains (thousands of units): the same search without dense tables, O(m log m) per edge of the lattice.

A stage [i, j) costs P[j] - P[i] for its units, plus A[i] for tensors that come from before it, plus B[j] for tensors
that come from after it, minus what a short stage inside a gap does not need (p < i, j <= v: made before, used after):

    p . . [ i . . j ) . . v

Stages shorter than the longest such gap are priced exactly in a band of `width`; the others need no correction. Gaps
beyond `MAX_BAND` are left uncorrected, which prices stages inside them too high, and the memory of what a loop brings
back, or a pinned unit is given, is rounded up; `exact` says that there are no such gaps, loops and pins.
For a start i the stages that fit end at i+1..reach[i], so a start is painted onto a range of ends: a sparse table
upside down, 2 log m vector operations.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.lattice import Lattice
from autoshard.strategies.problem import Problem, Rectangles, base_copies, rectangles

MAX_BAND = 64


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """One figure of all stages: row 0 exactly, others as P[j] - P[i] + A[i] + B[j] - band[k, i] for j = i + k."""

    first: Array
    start: Array
    stop: Array
    band: Array
    idle: float

    def plus(self, other: "Sums", weight: float) -> "Sums":
        return Sums(
            self.first + weight * other.first,
            self.start + weight * other.start,
            self.stop + weight * other.stop,
            self.band + weight * other.band,
            self.idle + weight * other.idle,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LongStages:
    """Seconds and memory of all stages on one device, and how far a stage from each start may go within the limits."""

    seconds: Sums
    reach: Array
    fits_first: Array
    fits_band: Array
    idle: float


class LongTables:
    """Makes `LongStages` of a problem whose links depend on the destination alone."""

    def __init__(self, problem: Problem, links: tuple[Array, Array]) -> None:
        self.problem, self.links = problem, links
        self.size = problem.size
        self._copies: dict[int, tuple[Sums, Sums, Sums]] = {}
        self._seconds: dict[int, Sums] = {}
        self._memory: dict[int, Sums] = {}
        self._reach: dict[int, tuple[float, Array]] = {}
        self._peaks = _sparse_max(problem.transient)
        found = rectangles(problem, -2)
        inner = (found.i_low > 0) | (found.i_high > 0)
        length = np.where(found.j_high == self.size, found.j_low - 1 - found.i_low, found.j_high - found.i_high - 1)
        long = inner & (length > MAX_BAND)
        loops = (found.j_high < self.size) & (found.i_high > 0) & (found.i_high < self.size)
        self.exact = not (long | loops).any() and not any(problem.pinned)
        self.width = int(length[inner & ~long].max(initial=0)) + 1

    def seconds(self, device: int) -> Sums:
        """Seconds of stages on a device."""
        kind = self.problem.kinds[device]
        if kind not in self._seconds:
            problem, (count, moved, _) = self.problem, self.copies(device)
            latency, bandwidth = float(self.links[0][device]), float(self.links[1][device])
            units = _of_units(problem.seconds[device], self.width, float(problem.base_seconds[device]))
            self._seconds[kind] = units.plus(count, latency).plus(moved, 1 / bandwidth)
        return self._seconds[kind]

    def memory(self, device: int) -> Sums:
        """Bytes of stages on a device, without their transient bytes."""
        key = device if self.problem.pinned[device] else -1
        if key not in self._memory:
            kept = self.copies(device)[2]
            units = _of_units(self.problem.resident, self.width, float(self.problem.base_resident[device]))
            self._memory[key] = units.plus(kept, 1.0)
        return self._memory[key]

    def copies(self, device: int) -> tuple[Sums, Sums, Sums]:
        """Number of copies into stages, bytes moved and bytes kept."""
        key = device if self.problem.pinned[device] else -1
        if key not in self._copies:
            problem, found = self.problem, rectangles(self.problem, device)
            weights = problem.copies, problem.copies * problem.nbytes, problem.nbytes
            made = [
                _of_rectangles(found, weight, self.size, self.width, idle)
                for weight, idle in zip(weights, base_copies(problem, device), strict=True)
            ]
            self._copies[key] = (made[0], made[1], made[2])
        return self._copies[key]

    def stages(self, device: int, seconds_limit: float = np.inf, load_limit: float = 1.0) -> LongStages:
        """Return the stages of a device within limits on its seconds and its relative memory."""
        problem, size, width = self.problem, self.size, self.width
        seconds, memory = self.seconds(device), self.memory(device)
        capacity = float(problem.chain.capacity_bytes[device]) * load_limit
        floor = float(problem.base_transient[device])
        starts = np.arange(size + 1)
        reach = self._memory_reach(device, capacity)
        if np.isfinite(seconds_limit):
            ends = np.maximum.accumulate(seconds.stop)
            reach = np.minimum(reach, np.searchsorted(ends, seconds_limit - seconds.start, "right") - 1)
        peaks = np.maximum(np.maximum.accumulate(np.concatenate([[0.0], problem.transient])), floor)
        fits_first = (memory.first + peaks <= capacity) & (seconds.first <= seconds_limit) & (starts > 0)
        fits_band = np.zeros((width, size + 1), bool)
        for k in range(1, width):
            here = starts[: size + 1 - k]
            peak = np.maximum(_range_max(self._peaks, here, here + k), floor)
            held = memory.start[here] + memory.stop[here + k] - memory.band[k, here] + peak
            spent = seconds.start[here] + seconds.stop[here + k] - seconds.band[k, here]
            fits_band[k, here] = (held <= capacity) & (spent <= seconds_limit)
        fits_band[:, 0] = False
        idle_bytes = memory.idle + floor if problem.pinned[device] else 0.0
        idle = seconds.idle if idle_bytes <= capacity and seconds.idle <= seconds_limit else np.inf
        return LongStages(seconds, np.maximum(reach, starts), fits_first, fits_band, idle)

    def _memory_reach(self, device: int, capacity: float) -> Array:
        """[m+1] per start, the largest end of a stage that fits (the start itself if none does)."""
        key = self.problem.kinds[device]
        if self._reach.get(key, (None,))[0] != capacity:
            memory, starts = self.memory(device), np.arange(self.size + 1)
            floor = float(self.problem.base_transient[device])
            ends = np.maximum.accumulate(memory.stop)
            room = capacity - memory.start
            largest = max(float(self.problem.transient.max(initial=0.0)), floor)
            low = np.maximum(np.searchsorted(ends, room - largest, "right") - 1, starts)
            high = np.maximum(np.searchsorted(ends, room - floor, "right") - 1, starts)
            while (low < high).any():  # the largest end whose own peak still fits
                middle = (low + high + 1) // 2
                peak = np.maximum(_range_max(self._peaks, starts, middle), floor)
                fits = (ends[middle] + peak <= room) | (middle <= starts)
                low, high = np.where(fits, middle, low), np.where(fits, high, middle - 1)
            self._reach[key] = capacity, low
        return self._reach[key][1]


def _of_units(weight: Array, width: int, base: float) -> Sums:
    prefix = np.concatenate([[0.0], np.cumsum(weight)])
    return Sums(prefix + base, base - prefix, prefix, np.zeros((width, len(prefix))), base)


def _of_rectangles(found: Rectangles, weight: Array, size: int, width: int, idle: float) -> Sums:
    """Turn rectangles into row 0, A, B and the band. See `rectangles` for their two shapes."""
    w = weight[found.x]
    forward = found.j_high == size
    top = found.i_low == 0
    first = _ramp(found.j_low[top], found.j_high[top], w[top], size)
    start = _ramp(found.i_low[forward], found.i_high[forward], w[forward], size)
    back = ~forward & (found.i_high > 0)
    stop = _ramp(found.j_low[back], found.j_high[back], w[back], size)
    band = np.zeros((width, size + 1))
    for k in range(1, width):
        # forward: starts in [i_low, j_low - 1 - k] end before the consumer; backward: in [i_high + 1, j_high - k]
        low = np.where(forward, found.i_low, found.i_high + 1)
        high = np.where(forward, np.minimum(found.i_high, found.j_low - 1 - k), found.j_high - k)
        inside = (low <= high) & (forward | back) & (np.where(forward, found.j_low - 1, found.j_high) - low <= MAX_BAND)
        band[k] = _ramp(low[inside], high[inside], w[inside], size)
    return Sums(first, start, stop, band, idle)


def _ramp(low: Array, high: Array, weight: Array, size: int) -> Array:
    """[size+1]: sum of the weights of the ranges low..high that cover each place."""
    ends = np.bincount(low, weight, size + 2) - np.bincount(high + 1, weight, size + 2)
    return ends.cumsum()[: size + 1]


def _sparse_max(values: Array) -> Array:
    """Row k, column i: the largest of 2^k values from i."""
    levels = [np.append(values, 0.0)]
    while (1 << len(levels)) <= len(values):
        half = 1 << (len(levels) - 1)
        last = levels[-1]
        levels.append(np.maximum(last, np.append(last[half:], np.zeros(half))))
    return np.stack(levels)


def _range_max(levels: Array, start: Array, stop: Array) -> Array:
    """Largest of values[start:stop]; 0 where empty."""
    level = np.frexp(np.maximum(stop - start, 1))[1] - 1
    found = np.maximum(levels[level, start], levels[level, np.maximum(stop - (1 << level), 0)])
    return np.where(stop > start, found, 0.0)


def paint(total: Array, stages: LongStages) -> Array:
    """Add one stage to [nodes, m+1] sums: best over i of total[:, i] + seconds[i, j]."""
    seconds, size = stages.seconds, total.shape[1] - 1
    out = np.where(stages.fits_first, total[:, :1] + seconds.first, np.inf)
    base = total + seconds.start
    starts = np.flatnonzero(np.isfinite(base).any(axis=0) & (stages.reach > np.arange(size + 1)))
    starts = starts[starts > 0]
    if len(starts):
        length = stages.reach[starts] - starts
        level = np.frexp(length)[1] - 1
        table = np.full((total.shape[0], size + 2), np.inf)
        for k in range(int(level.max()), -1, -1):
            here = starts[level == k]
            if len(here):
                table[:, here + 1] = np.minimum(table[:, here + 1], base[:, here])
                right = stages.reach[here] - (1 << k) + 1
                order = np.argsort(right, kind="stable")
                edges = np.flatnonzero(np.diff(right[order], prepend=-1))
                least = np.minimum.reduceat(base[:, here[order]], edges, axis=1)
                places = right[order][edges]
                table[:, places] = np.minimum(table[:, places], least)
            if k:
                half = 1 << (k - 1)
                table[:, half:] = np.minimum(table[:, half:], np.copy(table[:, :-half]))
        out = np.minimum(out, table[:, : size + 1] + seconds.stop)
    for k in range(1, len(stages.fits_band)):
        cost = base[:, : size + 1 - k] + seconds.stop[k:] - seconds.band[k, : size + 1 - k]
        out[:, k:] = np.minimum(out[:, k:], np.where(stages.fits_band[k, : size + 1 - k], cost, np.inf))
    return out


def flood(able: Array, stages: LongStages) -> Array:
    """Add one stage to [nodes, m+1] flags: can units 0..j-1 be placed?"""
    size = able.shape[1] - 1
    out = able[:, :1] & stages.fits_first
    goes = able & (stages.reach > np.arange(size + 1))
    goes[:, 0] = False
    for row in range(len(able)):
        starts = np.flatnonzero(goes[row])
        ends = np.zeros(size + 2, np.int64)
        ends[starts + 1] += 1
        ends -= np.bincount(stages.reach[starts] + 1, minlength=size + 2)
        out[row] |= ends.cumsum()[: size + 1] > 0
    for k in range(1, len(stages.fits_band)):
        out[:, k:] |= able[:, : size + 1 - k] & stages.fits_band[k, : size + 1 - k]
    return out


def sweep_long(
    lattice: Lattice, tables: LongTables, seconds_limit: float = np.inf, load_limit: float = 1.0
) -> tuple[float, list[tuple[int, int, int]]] | None:
    """Find the least sum of seconds within the limits, and its stages."""
    made: dict[int, LongStages] = {}

    def stages_on(device: int) -> LongStages:
        kind = tables.problem.kinds[device]
        if kind not in made:
            made[kind] = tables.stages(device, seconds_limit, load_limit)
        return made[kind]

    total = [np.full((nodes, tables.size + 1), np.inf) for nodes in lattice.sizes]
    total[0][:, 0] = 0.0
    for level, edges in enumerate(lattice.edges):
        for edge in edges:
            stages, before = stages_on(edge.devices[0]), total[level][edge.source]
            found = before + stages.idle if edge.empty else paint(before, stages)
            total[level + 1][edge.target] = np.minimum(total[level + 1][edge.target], found)
    best, end = np.inf, (-1, -1)
    for level in [len(lattice.sizes) - 1] if lattice.line else range(len(lattice.sizes)):
        for node in range(lattice.sizes[level]):
            unused = lattice.unused[level][node] if lattice.unused else ()
            value = float(total[level][node, -1]) + sum(stages_on(device).idle for device in unused)
            if value < best * (1 - 1e-12):
                best, end = value, (level, node)
    if end[0] < 0:
        return None
    found_stages, (level, node), stop = [], end, tables.size
    while level:
        node, start, device = _step_back(lattice, total, stages_on, level, node, stop)
        if start < stop:
            found_stages.append((start, stop, device))
        level, stop = level - 1, start
    return best, found_stages[::-1]


def _step_back(
    lattice: Lattice, total: list[Array], stages_on: Callable[[int], LongStages], level: int, node: int, stop: int
) -> tuple[int, int, int]:
    """Find the edge and start that gave the value of a node at `stop` (the least: sums differ in the last bit)."""
    best = (np.inf, -1, -1, -1)
    for edge in lattice.edges[level - 1]:
        for k in np.flatnonzero(edge.target == node).tolist():
            before, device = total[level - 1][edge.source[k]], edge.devices[k]
            stages = stages_on(device)
            if edge.empty:
                option = (float(before[stop] + stages.idle), int(edge.source[k]), stop, device)
            else:
                costs = before[:stop] + _column(stages, stop)
                start = int(costs.argmin()) if stop else 0
                option = (float(costs[start]) if stop else np.inf, int(edge.source[k]), start, device)
            if option[0] < best[0] * (1 - 1e-13) or best[1] < 0:
                best = option
    return best[1], best[2], best[3]


def _column(stages: LongStages, stop: int) -> Array:
    """Seconds of the stages [i, stop) for all i < stop; inf where they don't fit."""
    seconds = stages.seconds
    cost = np.where(stages.reach[:stop] >= stop, seconds.start[:stop] + seconds.stop[stop], np.inf)
    for k in range(1, min(len(stages.fits_band), stop + 1)):
        i = stop - k
        if stages.fits_band[k, i]:
            cost[i] = min(cost[i], seconds.start[i] + seconds.stop[stop] - seconds.band[k, i])
    cost[:1] = seconds.first[stop] if stages.fits_first[stop] else np.inf
    return cost


def fits(lattice: Lattice, tables: LongTables, seconds_limit: float, load_limit: float) -> bool:
    """Say whether there is any way within the limits."""
    made: dict[int, LongStages] = {}

    def stages_on(device: int) -> LongStages:
        kind = tables.problem.kinds[device]
        if kind not in made:
            made[kind] = tables.stages(device, seconds_limit, load_limit)
        return made[kind]

    able = [np.zeros((nodes, tables.size + 1), bool) for nodes in lattice.sizes]
    able[0][:, 0] = True
    for level, edges in enumerate(lattice.edges):
        for edge in edges:
            stages, before = stages_on(edge.devices[0]), able[level][edge.source]
            found = before & np.isfinite(stages.idle) if edge.empty else flood(before, stages)
            able[level + 1][edge.target] |= found
    for level in [len(lattice.sizes) - 1] if lattice.line else range(len(lattice.sizes)):
        for node in np.flatnonzero(able[level][:, -1]).tolist():
            unused = lattice.unused[level][node] if lattice.unused else ()
            if all(np.isfinite(stages_on(device).idle) for device in unused):
                return True
    return False


def least_limit(
    lattice: Lattice, tables: LongTables, *, load: bool, tolerance: float = 1e-7
) -> tuple[float, float] | None:
    """Bisect the least limit on seconds of one device (or on its relative memory); returns (not enough, enough)."""

    def enough(limit: float) -> bool:
        return fits(lattice, tables, *((np.inf, limit) if load else (limit, 1.0)))

    if not enough(1.0 if load else np.inf):
        return None
    low, high = 0.0, 1.0
    if not load:
        devices = range(tables.problem.chain.num_devices)
        low = float(tables.problem.seconds.min(axis=0).sum()) / len(devices)
        high = max(low * 1.05, 1e-12)
        while not enough(high):
            low, high = high, high * 2
    while high - low > tolerance * high:
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return low, high

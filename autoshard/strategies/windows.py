"""Windows: the exact search over orders of devices, looking only where a plan within a limit can be.

Within a limit (on the largest figure of one device, or on a sum) most of the lattice is out of reach. At a node with
some devices used up, units 0..j-1 can be placed and the rest still find room only for j in a narrow window:

    units      0 . . . . [ needs ---- reaches ] . . . . m
                          the devices left        the devices used
                          can do the rest         get no further

`reaches` and `needs` come from how far a stage can go from each start, in a few vector operations for all nodes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.grid import Grid
from autoshard.strategies.lattice import SLACK

CHUNK = 1 << 16
"""Sums made in one step: what is needed for them stays in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Costs:
    """One figure (seconds, or memory) of all stages of a grid, inf where impossible.

    Attributes:
        start: [K, m+1] of the first stage, units 0..j-1 on a device of kind k; [K * K, m+1] by promise * K + kind if
            the grid keeps promises.
        near: [P * K, m+1, m+1] of the others, by the stage before: row previous * K + kind, where previous is
            last * lengths + is_short of the node that the edge leaves.
        far: [P * K, m+1, m+1] what to add by the first stage, row first * K + kind; None where that plays no part.
        idle: [K] of a device without a stage.
        short: stages of fewer units than this are short.
    """

    start: Array
    near: Array
    far: Array | None
    idle: Array
    short: int = 0

    @property
    def size(self) -> int:
        return self.start.shape[1] - 1

    def stages(self, grid: Grid, edges: Array, i: Array, j: Array) -> Array:
        """[n, rows, columns] figures of the stages from i [n, rows] to j [n, columns] along n edges of one level."""
        i, j = i[:, :, None], j[:, None, :]
        source, kind = grid.source[edges], grid.kind[edges]
        if not source[0]:
            row = np.maximum(grid.promise[grid.target[edges]], 0) * grid.num_kinds + kind
            found = np.where((i == 0) & (j > 0), self.start[row[:, None, None], j], np.inf)
        else:
            kinds, table, cells = grid.num_kinds, (self.size + 1) ** 2, i * (self.size + 1) + j
            previous = grid.last[source] * grid.lengths + grid.is_short[source]
            found = self.near.reshape(-1).take(((previous * kinds + kind) * table)[:, None, None] + cells)
            if self.far is not None:
                far = (grid.first[source] * kinds + kind) * table
                found += self.far.reshape(-1).take(far[:, None, None] + cells)
        if grid.lengths == 2:
            found[(j - i < self.short) != (grid.is_short[grid.target[edges]] == 1)[:, None, None]] = np.inf
        return found


class TooWideError(Exception):
    """The windows of a search hold more stages than may be looked at; no way costs less than `bound`."""

    def __init__(self, bound: float = 0.0) -> None:
        super().__init__(bound)
        self.bound = bound


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Limits:
    """What a way may cost: at most `each` per stage, and at most `limit` with what is certain to come.

    `ahead` [levels, m+1] and `credit` [N] are added to a sum before it is held against `limit`. `stages` is how many
    stages may be looked at in one search.
    """

    limit: float
    each: float = np.inf
    ahead: Array | None = None
    credit: Array | None = None
    stages: float = np.inf


def reaches(tables: Array, limit: float) -> Array:
    """[..., m+1]: the furthest end of a stage within the limit that starts at i or before; 0 where there is none."""
    fits = tables <= limit
    last = fits.shape[-1] - 1 - fits[..., ::-1].argmax(axis=-1)
    return np.maximum.accumulate(np.where(fits.any(axis=-1), last, 0), axis=-1)


def needs(grid: Grid, reach: Array) -> Array:
    """[N] fewest units that must be placed at a node so that the devices left can take the rest; m + 1 if they can't.

    `reach` is [K, m+1], of the least that a stage on a kind can cost.
    """
    size = reach.shape[1] - 1
    back = np.stack([np.searchsorted(row, np.arange(size + 2), "left") for row in reach])
    back[:, size + 1] = size + 1
    need = np.full(len(grid.counts), size)
    for level in range(grid.num_levels - 1, -1, -1):
        edges = slice(grid.edge_levels[level], grid.edge_levels[level + 1])
        np.minimum.at(need, grid.source[edges], back[grid.kind[edges], need[grid.target[edges]]])
    return need


def search_windows(grid: Grid, costs: Costs, reach: Array, limits: Limits, *, worst: bool) -> Array:
    """[N, m+1] least sum of figures (or with `worst` the largest one) with units 0..j-1 placed; inf above the limits.

    `reach` is that of `needs`, within the limits. Raises `TooWideError`.
    """
    size, need, left = costs.size, needs(grid, reach), limits.stages
    total = np.full((len(grid.counts), size + 1), np.inf)
    total[0, 0] = 0.0 if need[0] == 0 else np.inf
    for level in range(grid.num_levels - 1):
        here = slice(grid.node_levels[level], grid.node_levels[level + 1])
        live = np.isfinite(total[here])
        some: Array = live.any(axis=1)
        if not some.any():
            break
        low, high = live.argmax(axis=1), size - live[:, ::-1].argmax(axis=1)
        edges = np.arange(grid.edge_levels[level], grid.edge_levels[level + 1])
        source = grid.source[edges] - here.start
        begin = np.maximum(need[grid.target[edges]], low[source] + 1)
        end = reach[grid.kind[edges], high[source]]
        if grid.lengths == 2:  # a short stage ends soon after its start, another one not before
            short = grid.is_short[grid.target[edges]] == 1
            begin = np.maximum(begin, low[source] + np.where(short, 1, costs.short))
            end = np.minimum(end, high[source] + np.where(short, costs.short - 1, costs.size))
        keep = some[source] & (begin <= end)
        edges, source, begin, end = edges[keep], source[keep], begin[keep], end[keep]
        rows, columns = high[source] - low[source] + 1, end - begin + 1
        for part in _parts(rows, columns):
            i = np.minimum(low[source[part], None] + np.arange(rows[part].max()), size)
            j = np.minimum(begin[part, None] + np.arange(columns[part].max()), size)
            _extend(grid, costs, limits, total, edges[part], i, j, worst)
            left -= i.size * j.shape[1]
            if left < 0:
                raise TooWideError
        if limits.ahead is not None and limits.credit is not None:
            following = slice(grid.node_levels[level + 1], grid.node_levels[level + 2])
            least = total[following] + limits.ahead[level + 1] + limits.credit[following, None]
            total[following][least > limits.limit] = np.inf
    return total


def _parts(rows: Array, columns: Array) -> Iterator[Array]:
    """Yield which edges to take at once: as many as fit into a chunk when all are as large as the largest of them."""
    if len(rows) * int(rows.max(initial=0)) * int(columns.max(initial=0)) <= CHUNK:
        if len(rows):
            yield np.arange(len(rows))
        return
    order = np.argsort(-rows * columns, kind="stable")
    at = 0
    while at < len(order):
        part = order[at : at + max(1, CHUNK // int(rows[order[at]] * columns[order[at]]))]
        yield part
        at += len(part)


def _extend(
    grid: Grid, costs: Costs, limits: Limits, total: Array, edges: Array, i: Array, j: Array, worst: bool
) -> None:
    """Lower `total` by stages from i [n, rows] to j [n, columns] along n edges of one level."""
    found = costs.stages(grid, edges, i, j)
    if limits.each < np.inf:
        found[found > limits.each] = np.inf
    before = total[grid.source[edges, None], i][:, :, None]
    best = (np.maximum if worst else np.add)(found, before, out=found).min(axis=1)
    if limits.ahead is None:
        best[best > limits.limit] = np.inf
    np.minimum.at(total.reshape(-1), (grid.target[edges, None] * (costs.size + 1) + j).reshape(-1), best.reshape(-1))


def best_end(grid: Grid, costs: Costs, total: Array, *, worst: bool) -> tuple[float, int]:
    """Return the best complete value and its node, with the devices left idle; (inf, -1) if no way ends.

    Of equals the one with fewer devices, then with earlier kinds of devices, in their order as far as that goes.
    """
    unused: Array = np.array([len(of) for of in grid.members]) - grid.counts
    idle = np.where(unused > 0, costs.idle, 0.0)
    value = np.maximum(total[:, -1], idle.max(axis=1)) if worst else total[:, -1] + idle.sum(axis=1)
    value = np.where((grid.promise >= 0) & (grid.promise != grid.last), np.inf, value)
    best, end = np.inf, -1
    for level in range(grid.num_levels):
        here = np.arange(grid.node_levels[level], grid.node_levels[level + 1])
        least = float(value[here].min(initial=np.inf))
        if least < best - SLACK * abs(best) or (end < 0 and least < np.inf):
            equal = here[value[here] <= least + SLACK * abs(least)]
            keys = (-grid.is_short[equal], grid.last[equal], -grid.first[equal], *grid.counts[equal, ::-1].T)
            best, end = float(least), int(equal[np.lexsort(keys)[-1]])
    return best, end


def trace_windows(grid: Grid, costs: Costs, total: Array, end: int, each: float = np.inf) -> list[tuple[int, int, int]]:
    """Walk back from a node with all units placed; returns the stages (i, j, device) of a least sum."""
    stages: list[tuple[int, int, int]] = []
    node, stop = end, costs.size
    while node:
        edges = np.flatnonzero(grid.target == node)
        edges = edges[np.lexsort((-grid.last[grid.source[edges]], -grid.kind[edges]))]
        i = np.broadcast_to(np.arange(stop), (len(edges), stop))
        found = costs.stages(grid, edges, i, np.full((len(edges), 1), stop))[:, :, 0]
        found[found > each] = np.inf
        found += total[grid.source[edges], :stop]
        close = np.argwhere(found <= found.min() + 4 * SLACK * abs(found.min()))
        edge, start = int(edges[close[0, 0]]), int(close[close[:, 0] == close[0, 0]][-1, 1])
        kind, source = int(grid.kind[edge]), int(grid.source[edge])
        stages.append((start, stop, grid.members[kind][int(grid.counts[source, kind])]))
        node, stop = source, start
    return stages[::-1]

"""Lattice: the exact search over stages in a row, with the devices in the given order or in any order.

A node says which devices are used up. Devices in the given order make a line; interchangeable devices of K kinds in any
order make a grid of counts (all different: subsets). Along an edge a device takes the next interval:

    given order   0 ──▶ 1 ──▶ 2 ──▶ 3          node d: devices 0..d-1 are used or left empty
    any order     (0,0) ──▶ (1,0) ──▶ (2,0)    node (a, b): a devices of the first kind and b of the second have a stage
                    └─▶ (0,1) ──▶ (1,1) ...

At every node and for every j the best value of units 0..j-1 is kept: a pair (sum of seconds, largest load), compared in
this order. `sweep` fills these in; `trace` walks back. O(m^2) per edge of the lattice, exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.stages import Stages

SLACK = 1e-12
"""Relative difference below which two sums of seconds count as equal (they are added up in different orders)."""


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Edges of one level that use the same device kind: from nodes `source` to nodes `target` (both unique).

    `devices[k]` is the device edge k uses; all of one kind.
    """

    source: Array
    target: Array
    devices: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Nodes by level (level l has used, or passed, l devices) and the edges that leave each level.

    `empty[l]` is true where a level may also be passed with its device left empty (given order); `unused[l][node]` the
    devices not yet used there (any order), which matters where they have pinned units.
    """

    sizes: tuple[int, ...]
    edges: tuple[tuple[Edges, ...], ...]
    line: bool
    unused: tuple[tuple[tuple[int, ...], ...], ...]


def make_line(order: tuple[int, ...]) -> Lattice:
    """Build the lattice of devices in one order, each with one interval or none."""
    zero = np.zeros(1, int)
    edges = tuple((Edges(zero, zero, (device,)),) for device in order)
    return Lattice((1,) * (len(order) + 1), edges, True, ())


def count_nodes(kinds: tuple[int, ...]) -> int:
    """Number of nodes that `make_grid` would build."""
    return int(np.prod([float(kinds.count(kind) + 1) for kind in set(kinds)]))


def make_grid(kinds: tuple[int, ...]) -> Lattice:
    """Build the lattice of devices in any order; those of one kind are used in the given order."""
    members = [[d for d, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))]
    levels: list[dict[tuple[int, ...], int]] = [{} for _ in range(len(kinds) + 1)]
    for counts in product(*(range(len(m) + 1) for m in members)):
        level = levels[sum(counts)]
        level[counts] = len(level)
    edges = []
    for level, following in zip(levels[:-1], levels[1:], strict=True):
        by_kind = []
        for kind, of_kind in enumerate(members):
            found = [(index, counts) for counts, index in level.items() if counts[kind] < len(of_kind)]
            target = [following[(*c[:kind], c[kind] + 1, *c[kind + 1 :])] for _, c in found]
            devices = tuple(of_kind[c[kind]] for _, c in found)
            by_kind.append(Edges(np.array([i for i, _ in found], int), np.array(target, int), devices))
        edges.append(tuple(e for e in by_kind if len(e.source)))
    unused = tuple(
        tuple(tuple(d for kind, c in enumerate(counts) for d in members[kind][c:]) for counts in level)
        for level in levels
    )
    return Lattice(tuple(len(level) for level in levels), tuple(edges), False, unused)


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Values of all nodes: `total[l]` and `worst[l]` are [nodes, m+1]. `value` is the best complete one, at `end`."""

    total: list[Array]
    worst: list[Array]
    value: tuple[float, float]
    end: tuple[int, int]


Tables = Callable[[int], Stages]


def sweep(lattice: Lattice, tables: Tables, size: int, *, fewest: bool = True) -> Sweep | None:
    """Find the least sum of seconds over all ways through the lattice, and among these the least largest load.

    In any order, `fewest` prefers fewer devices to less load.
    """
    total = [np.full((nodes, size + 1), np.inf) for nodes in lattice.sizes]
    worst = [np.full((nodes, size + 1), np.inf) for nodes in lattice.sizes]
    total[0][:, 0] = worst[0][:, 0] = 0.0
    for level, edges in enumerate(lattice.edges):
        for edge in edges:
            stages = tables(edge.devices[0])
            if lattice.line:
                _lower(total, worst, level + 1, edge.target, *_pass(total[level], worst[level], stages))
            for part in _parts(len(edge.source), size):
                source = edge.source[part]
                found = _extend(total[level][source], worst[level][source], stages)
                _lower(total, worst, level + 1, edge.target[part], *found)
    return _finish(lattice, tables, total, worst, fewest)


def _parts(rows: int, size: int) -> list[slice]:
    """Cut many nodes into slices small enough for one three-dimensional step."""
    step = max(1, 400_000 // (size + 1) ** 2)
    return [slice(k, k + step) for k in range(0, rows, step)]


def _pass(total: Array, worst: Array, stages: Stages) -> tuple[Array, Array]:
    return total + stages.idle_seconds, np.maximum(worst, stages.idle_load)


def _extend(total: Array, worst: Array, stages: Stages) -> tuple[Array, Array]:
    """Add one stage: best over i of total[:, i] + seconds[i, j], and among equals of max(worst[:, i], load[i, j])."""
    sums = total[:, :, None] + stages.seconds
    best = sums.min(axis=1)
    loads = np.maximum(worst[:, :, None], stages.load)
    loads[sums > (best * (1 + SLACK))[:, None, :]] = np.inf
    return best, loads.min(axis=1)


def _lower(total: list[Array], worst: list[Array], level: int, rows: Array, sums: Array, loads: Array) -> None:
    """Keep the better of what is there and what was found, as pairs; sums within `SLACK` are equal."""
    old, old_load = total[level][rows], worst[level][rows]
    better = sums < old * (1 - SLACK)
    equal = ~better & (sums <= old * (1 + SLACK))
    total[level][rows] = np.minimum(old, sums)
    worst[level][rows] = np.where(better, loads, np.where(equal, np.minimum(old_load, loads), old_load))


def _finish(
    lattice: Lattice, tables: Tables, total: list[Array], worst: list[Array], fewest: bool
) -> Sweep | None:
    """Pick the best complete value, levels with fewer devices first."""
    best, end = (np.inf, np.inf), (-1, -1)
    for level in [len(lattice.sizes) - 1] if lattice.line else range(len(lattice.sizes)):
        for node in range(lattice.sizes[level]):
            seconds, load = float(total[level][node, -1]), float(worst[level][node, -1])
            for device in lattice.unused[level][node] if lattice.unused else ():
                idle = tables(device)
                seconds, load = seconds + idle.idle_seconds, max(load, idle.idle_load)
            if np.isinf(seconds) or np.isinf(load):
                continue
            equal = seconds <= best[0] * (1 + SLACK) and (end[0] == level or not fewest)
            if seconds < best[0] * (1 - SLACK) or (equal and load < best[1]):
                best, end = (seconds, load), (level, node)
    return Sweep(total, worst, best, end) if end[0] >= 0 else None


def trace(lattice: Lattice, tables: Tables, found: Sweep) -> list[tuple[int, int, int]]:
    """Walk back from the best end and return its stages (i, j, device) in order."""
    (level, node), stop = found.end, found.total[0].shape[1] - 1
    stages: list[tuple[int, int, int]] = []
    while level:
        level, node, start, device = _step_back(lattice, tables, found, level, node, stop)
        if start < stop:
            stages.append((start, stop, device))
        stop = start
    return stages[::-1]


def _step_back(
    lattice: Lattice, tables: Tables, found: Sweep, level: int, node: int, stop: int
) -> tuple[int, int, int, int]:
    """Find the edge and the start i that gave the value of a node at `stop`; a device left empty comes first."""
    limit, load = found.total[level][node, stop] * (1 + 4 * SLACK), found.worst[level][node, stop]
    for edge in lattice.edges[level - 1]:
        for k in np.flatnonzero(edge.target == node).tolist():
            source, device = int(edge.source[k]), edge.devices[k]
            stages, total, worst = tables(device), found.total[level - 1][source], found.worst[level - 1][source]
            if lattice.line:
                sums, loads = _pass(total[stop], worst[stop], stages)
                if sums <= limit and loads == load:
                    return level - 1, source, stop, device
            sums, loads = total + stages.seconds[:, stop], np.maximum(worst, stages.load[:, stop])
            fitting = np.flatnonzero((sums <= limit) & (loads == load))
            if len(fitting):
                return level - 1, source, int(fitting[-1]), device
    raise AssertionError(f"no way back from level {level}, node {node}, stop {stop}")

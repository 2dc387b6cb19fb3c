"""Lattice: the exact search over stages in a row, with the devices in the given order or in any order.

A node says which devices are used up. Devices in the given order make a line; interchangeable devices of K kinds in any
order make a grid of counts (all different: subsets). Along an edge a device takes the next interval:

    given order   0 ──▶ 1 ──▶ 2 ──▶ 3          node d: devices 0..d-1 are used or left empty
    any order     (0,0) ──▶ (1,0) ──▶ (2,0)    node (a, b): a devices of the first kind and b of the second have a stage
                    └─▶ (0,1) ──▶ (1,1) ...

Where links differ from pair to pair, a node also says which device has the first stage and which the last so far.

At every node and for every j the best value of units 0..j-1 is kept: the sum of seconds ("sum"), the largest load
("max"), or both, compared in this order ("both"). `sweep` fills these in; `trace` walks back. O(m^2) per edge of the
lattice, exact.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.stages import Stages

SLACK = 1e-12
"""Relative difference below which two sums of seconds count as equal (they are added up in different orders)."""
BLOCK = 64
"""Columns of a table worked on at once: a block and its temporaries stay in the cache."""
CHUNK = 1 << 17
"""Sums made in one step over several nodes."""
NONE = -1
Mode = Literal["sum", "max", "both"]


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """Edges of one level whose stages cost the same: from nodes `source` to nodes `target` (both unique).

    `devices[k]` is the device edge k uses; all of one kind. `first` and `previous` are the devices (of the first edge)
    with the first and the previous stage, NONE where unknown or none. An `empty` edge leaves its device unused.
    """

    source: Array
    target: Array
    devices: tuple[int, ...]
    first: int = NONE
    previous: int = NONE
    empty: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Nodes by level (level l has used, or passed, l devices) and the edges that leave each level.

    On a line every way ends at the last level; otherwise a way may end at any node, and `unused[l][node]` are the
    devices it then leaves without a stage.
    """

    sizes: tuple[int, ...]
    edges: tuple[tuple[Edges, ...], ...]
    line: bool
    paired: bool
    unused: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @property
    def num_devices(self) -> int:
        return len(self.sizes) - 1


def make_line(order: tuple[int, ...], *, paired: bool = False) -> Lattice:
    """Build the lattice of devices in one order, each with one interval or none."""
    ends = [(NONE, NONE)]
    sizes, levels = [1], []
    for device in order:
        following = {end: index for index, end in enumerate(ends)}
        takers = []
        for index, (first, previous) in enumerate(ends):
            end = (device if first == NONE else first, device) if paired else (NONE, NONE)
            target = following.setdefault(end, len(following))
            takers.append(Edges(np.array([index]), np.array([target]), (device,), first, previous))
        rows = np.arange(len(ends))
        levels.append((Edges(rows, rows, (device,) * len(ends), empty=True), *takers))
        ends = list(following)
        sizes.append(len(ends))
    return Lattice(tuple(sizes), tuple(levels), True, paired)


def count_nodes(kinds: tuple[int, ...], *, paired: bool = False) -> int:
    """Number of nodes that `make_grid` would build, or a little more."""
    counts = [kinds.count(kind) for kind in set(kinds)]
    return int(np.prod([float(count + 1) for count in counts])) * (len(counts) ** 2 if paired else 1)


def make_grid(kinds: tuple[int, ...], *, paired: bool = False) -> Lattice:
    """Build the lattice of devices in any order; those of one kind are used in the given order."""
    members = [[d for d, k in enumerate(kinds) if k == kind] for kind in sorted(set(kinds))]
    level: dict[tuple[tuple[int, ...], int, int], int] = {((0,) * len(members), NONE, NONE): 0}
    sizes, levels, unused = [], [], []
    for _ in range(len(kinds) + 1):
        unused.append(tuple(tuple(d for of, c in zip(members, node[0], strict=True) for d in of[c:]) for node in level))
        sizes.append(len(level))
        following: dict[tuple[tuple[int, ...], int, int], int] = {}
        groups: dict[tuple[int, int, int], list[tuple[int, int, int, int, int]]] = {}
        for (counts, first, last), index in level.items():
            for kind, of in enumerate(members):
                if counts[kind] == len(of):
                    continue
                taken = (*counts[:kind], counts[kind] + 1, *counts[kind + 1 :])
                reached = (taken, kind if first == NONE else first, kind) if paired else (taken, NONE, NONE)
                target = following.setdefault(reached, len(following))
                begin = NONE if first == NONE else members[first][0]
                before = NONE if last == NONE else members[last][counts[last] - 1]
                groups.setdefault((first, last, kind), []).append((index, target, of[counts[kind]], begin, before))
        edges = []
        for rows in groups.values():
            sources, targets, devices, firsts, lasts = zip(*rows, strict=True)
            edges.append(Edges(np.array(sources), np.array(targets), devices, firsts[0], lasts[0]))
        levels.append(tuple(edges))
        level = following
    return Lattice(tuple(sizes), tuple(levels[:-1]), False, paired, tuple(unused))


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Values of all nodes: `total[l]` and `worst[l]` are [nodes, m+1]. `value` is the best complete one, at `end`.

    What the mode does not look at is 0 wherever there is a way at all.
    """

    mode: Mode
    total: list[Array]
    worst: list[Array]
    value: tuple[float, float]
    end: tuple[int, int]


Tables = Callable[[Edges], Stages]


def sweep(lattice: Lattice, tables: Tables, size: int, mode: Mode) -> Sweep | None:
    """Find the best value over all ways through the lattice; None if there is no way. Equal sums: fewer devices."""
    total = [np.full((nodes, size + 1), np.inf) for nodes in lattice.sizes]
    worst = [np.full((nodes, size + 1), np.inf) for nodes in lattice.sizes]
    total[0][:, 0] = worst[0][:, 0] = 0.0
    for level, edges in enumerate(lattice.edges):
        for edge in edges:
            stages = tables(edge)
            step = len(edge.source) if edge.empty else max(1, CHUNK // (BLOCK * (size + 1)))
            for k in range(0, len(edge.source), step):
                source = edge.source[k : k + step]
                found = (_pass if edge.empty else _extend)(total[level][source], worst[level][source], stages, mode)
                _lower(total, worst, level + 1, edge.target[k : k + step], *found)
    return _finish(lattice, tables, total, worst, mode)


def _pass(total: Array, worst: Array, stages: Stages, mode: Mode) -> tuple[Array, Array]:
    seconds = total + stages.idle_seconds if mode != "max" else total
    return seconds, np.maximum(worst, stages.idle_load) if mode != "sum" else worst


def _extend(total: Array, worst: Array, stages: Stages, mode: Mode) -> tuple[Array, Array]:
    """Add one stage: best over i of total[:, i] + seconds[i, j] and of max(worst[:, i], load[i, j])."""
    sums, loads = np.full_like(total, np.inf), np.full_like(worst, np.inf)
    for low in range(0, total.shape[1], BLOCK):
        high = min(low + BLOCK, total.shape[1])
        top = stages.first_row(low, high)
        if top >= high:
            continue
        rows, columns, cells = slice(top, high), slice(low, high), (slice(top, high), slice(low, high))
        if mode != "max":
            added = total[:, rows, None] + stages.seconds[cells]
            sums[:, columns] = least = added.min(axis=1)
        if mode != "sum":
            larger = np.maximum(worst[:, rows, None], stages.load[cells])
            if mode == "both":
                larger[added > (least * (1 + SLACK))[:, None, :]] = np.inf
            loads[:, columns] = larger.min(axis=1)
    if mode == "max":
        sums = np.where(loads < np.inf, 0.0, np.inf)
    if mode == "sum":
        loads = np.where(sums < np.inf, 0.0, np.inf)
    return sums, loads


def _lower(total: list[Array], worst: list[Array], level: int, rows: Array, sums: Array, loads: Array) -> None:
    """Keep the better of what is there and what was found, as pairs; sums within `SLACK` are equal."""
    old, old_load = total[level][rows], worst[level][rows]
    better = sums < old * (1 - SLACK)
    equal = ~better & (sums <= old * (1 + SLACK))
    total[level][rows] = np.minimum(old, sums)
    worst[level][rows] = np.where(better, loads, np.where(equal, np.minimum(old_load, loads), old_load))


def _finish(lattice: Lattice, tables: Tables, total: list[Array], worst: list[Array], mode: Mode) -> Sweep | None:
    """Pick the best complete value, levels with fewer devices first."""
    best, end = (np.inf, np.inf), (NONE, NONE)
    for level in [len(lattice.sizes) - 1] if lattice.line else range(len(lattice.sizes)):
        for node in range(lattice.sizes[level]):
            seconds, load = total[level][node, -1:], worst[level][node, -1:]
            if np.isinf(seconds[0]):
                continue
            for idle in idle_stages(lattice, tables, level, node):
                seconds, load = _pass(seconds, load, idle, mode)
            value = float(seconds[0]), float(load[0])
            if np.isinf(value).any():
                continue
            equal = value[0] <= best[0] * (1 + SLACK) and (end[0] == level or mode == "max")
            if value[0] < best[0] * (1 - SLACK) or (equal and value[1] < best[1]):
                best, end = value, (level, node)
    return Sweep(mode, total, worst, best, end) if end[0] != NONE else None


def idle_stages(lattice: Lattice, tables: Tables, level: int, node: int) -> list[Stages]:
    """Return the tables of the devices left without a stage when a way ends at this node."""
    nothing, unused = np.zeros(1, int), lattice.unused[level][node] if lattice.unused else ()
    return [tables(Edges(nothing, nothing, (device,), empty=True)) for device in unused]


def trace(lattice: Lattice, tables: Tables, found: Sweep) -> list[tuple[int, int, int]]:
    """Walk back from the best end and return its stages (i, j, device) in order."""
    (level, node), stop = found.end, found.total[0].shape[1] - 1
    stages: list[tuple[int, int, int]] = []
    while level:
        node, start, device = _step_back(lattice, tables, found, level, node, stop)
        if start < stop:
            stages.append((start, stop, device))
        level, stop = level - 1, start
    return stages[::-1]


def _step_back(
    lattice: Lattice, tables: Tables, found: Sweep, level: int, node: int, stop: int
) -> tuple[int, int, int]:
    """Find the edge and the start i that gave the value of a node at `stop`; a device left empty comes first."""
    limit, load = found.total[level][node, stop] * (1 + 4 * SLACK), found.worst[level][node, stop]
    for edge in lattice.edges[level - 1]:
        for k in np.flatnonzero(edge.target == node).tolist():
            source, device = int(edge.source[k]), edge.devices[k]
            stages, total, worst = tables(edge), found.total[level - 1][source], found.worst[level - 1][source]
            if edge.empty:
                sums, loads = _pass(total[stop : stop + 1], worst[stop : stop + 1], stages, found.mode)
                if sums[0] <= limit and loads[0] == load:
                    return source, stop, device
                continue
            sums = total + stages.seconds[:, stop] if found.mode != "max" else total
            loads = np.maximum(worst, stages.load[:, stop]) if found.mode != "sum" else worst
            fitting = np.flatnonzero((sums <= limit) & (loads == load))
            if len(fitting):
                return source, int(fitting[-1]), device
    raise AssertionError(f"no way back from level {level}, node {node}, stop {stop}")

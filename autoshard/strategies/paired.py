"""Links that differ from pair to pair: stage tables that never cost too much, and the exact search on top of them.

What a copy costs then depends on where its tensor is, which the interval alone does not say. `PairTables` charges
every copy the cheapest link into its device, and corrects what a lattice node knows: a tensor made by the unit just
before the stage comes from the previous device, one made by unit 0 from the first, and what the last unit makes for
unit 0 goes back to the first. For a plain chain that is everything, so the sweep over the lattice is exact in
O(m^2 D^2). With skips it is a lower bound, and `search` (A*) finishes the job: a label knows where every stage is, pays
the excess of each copy over the cheapest link as soon as its source is known, and the bound says which label is worth
extending.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.lattice import Edges, Lattice, Tables, idle_stages
from autoshard.strategies.problem import Problem, Rectangles, rectangles
from autoshard.strategies.stages import Stages, StageTables


def cheapest_links(problem: Problem) -> tuple[Array, Array]:
    """Return per device the least latency and the largest bandwidth of all links into it."""
    size = problem.chain.num_devices
    own = np.eye(size, dtype=bool)
    latency = np.where(own, np.inf, problem.chain.link_seconds).min(axis=0)
    bandwidth = np.where(own, 0.0, problem.chain.link_bytes_per_second).max(axis=0)
    return (latency, bandwidth) if size > 1 else (np.zeros(1), np.ones(1))


class PairTables:
    """Stage tables per (first, previous, device) of an edge. With `busy`, what is paid by other devices is left out."""

    def __init__(self, problem: Problem, *, busy: bool) -> None:
        self.plain = StageTables(problem, cheapest_links(problem))
        self.problem, self.busy = problem, busy
        found = rectangles(problem, NO_DEVICE)
        moved = problem.copies * problem.nbytes
        source = problem.source[found.x]
        near = (source >= 0) & (found.i_low == source + 1)  # first gap of a tensor that is used later
        self._near = self._pair(selected(found, near, found.i_low), moved)
        far = (source == 0) & (found.j_high == problem.size)
        self._far = self._pair(selected(found, far, found.i_high, minimum=2), moved)
        returned = np.zeros(len(problem.source), bool)
        returned[problem.edge_x[(problem.edge_at == 0)]] = True
        returned &= problem.source == problem.size - 1
        self._returned = float(problem.copies[returned].sum()), float(moved[returned].sum())
        self._made: dict[tuple[int, int, int], Stages] = {}

    def _pair(self, found: Rectangles, moved: Array) -> tuple[Array, Array]:
        return found.table(self.problem.copies, self.problem.size), found.table(moved, self.problem.size)

    def __call__(self, edge: Edges) -> Stages:
        device, plain = edge.devices[0], self.plain.stages(edge.devices[0])
        if edge.empty or edge.previous < 0 or self.problem.pinned[device]:
            return plain
        kinds = self.problem.kinds
        key = kinds[edge.first], kinds[edge.previous], kinds[device]
        if key not in self._made:
            if len(self._made) >= 512:
                self._made.clear()
            seconds = plain.seconds.copy()
            for source, (count, moved) in ((edge.previous, self._near), (edge.first, self._far)):
                more, per_byte = excess(self.problem, self.plain, source, device)
                seconds += more * count + per_byte * moved
            if not self.busy and not self.problem.pinned[edge.first]:
                more, per_byte = excess(self.problem, self.plain, device, edge.first)
                seconds[1:, -1] += more * self._returned[0] + per_byte * self._returned[1]
            self._made[key] = Stages(seconds, plain.load, 0.0, 0.0)
        return self._made[key]


NO_DEVICE = -2


def excess(problem: Problem, plain: StageTables, source: int, target: int) -> tuple[float, float]:
    """Seconds per copy and per byte by which this link is dearer than the cheapest into `target`."""
    latency, bandwidth = plain.links
    chain = problem.chain
    return (
        float(chain.link_seconds[source, target] - latency[target]),
        float(1 / chain.link_bytes_per_second[source, target] - 1 / bandwidth[target]),
    )


def selected(found: Rectangles, keep: Array, i_high: Array, *, minimum: Array | int = 0) -> Rectangles:
    """Keep some rectangles, cut at the last row `i_high` and the first row `minimum`."""
    low, high = np.maximum(found.i_low, minimum)[keep], i_high[keep]
    full = low <= high
    return Rectangles(
        found.x[keep][full], low[full], high[full], found.j_low[keep][full], found.j_high[keep][full]
    )  # fmt: skip


def bounds_from_here(lattice: Lattice, tables: Tables, size: int, *, worst: bool) -> list[Array]:
    """[level][nodes, m+1]: the least that is still to come from a node with units 0..i-1 placed.

    A sum of seconds, or with `worst` the largest seconds of one device.
    """
    ahead = [np.full((nodes, size + 1), np.inf) for nodes in lattice.sizes]
    last = len(lattice.sizes) - 1
    for level in range(last, -1, -1):
        if level == last or not lattice.line:
            for node in range(lattice.sizes[level]):
                idle = [stages.idle_seconds for stages in idle_stages(lattice, tables, level, node)]
                ahead[level][node, size] = max(idle, default=0.0) if worst else sum(idle)
        for edge in lattice.edges[level] if level < last else ():
            stages, following = tables(edge), ahead[level + 1][edge.target]
            if edge.empty:
                found = np.maximum(following, stages.idle_seconds) if worst else following + stages.idle_seconds
            elif worst:
                found = np.stack([np.maximum(stages.seconds, row).min(axis=1) for row in following])
            else:
                found = np.stack([(stages.seconds + row).min(axis=1) for row in following])
            ahead[level][edge.source] = np.minimum(ahead[level][edge.source], found)
    return ahead


@dataclass(frozen=True, slots=True, eq=False)
class _Label:
    """A way through the lattice up to unit `at`: its stages (start, device) and the seconds of every device so far."""

    level: int
    node: int
    at: int
    starts: tuple[int, ...]
    devices: tuple[int, ...]
    seconds: tuple[float, ...]

    def where(self, position: int) -> int:
        return self.devices[bisect_right(self.starts, position) - 1]


class _Flows:
    """Per position: which tensors cross it forward (with their next consumer), which are awaited by units before it."""

    def __init__(self, problem: Problem) -> None:
        size = problem.size
        self.live: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]
        self.awaited: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(size + 1)]
        self.fed: dict[int, list[int]] = {}
        for x, device in sorted(set(zip(problem.pinned_x.tolist(), problem.pinned_at.tolist(), strict=True))):
            self.fed.setdefault(x, []).append(device)
        consumers: dict[int, list[int]] = {}
        for x, at in zip(problem.edge_x.tolist(), problem.edge_at.tolist(), strict=True):
            consumers.setdefault(x, []).append(at)
        for x in sorted(set(consumers) | set(self.fed)):
            source, users = int(problem.source[x]), consumers.get(x, [])
            if not problem.copies[x]:
                continue
            last = source
            for user in (u for u in users if u > source):
                for position in range(last + 1, user + 1):
                    self.live[position].append((x, user))
                last = user
            if source >= 0:
                for position in range(0 if x in self.fed else min(users) + 1, source + 1):
                    before = tuple(u for u in users if u < position)
                    if before or x in self.fed:
                        self.awaited[position].append((x, before))


def search(
    problem: Problem, lattice: Lattice, tables: PairTables, *, upper: float, budget: int
) -> tuple[list[tuple[int, int, int]] | None, float]:
    """Find the best way with every copy at its own link; None if none is better than `upper`.

    Returns its stages and a lower bound: the optimum, unless `budget` labels were not enough.
    """
    busy, size = tables.busy, problem.size
    ahead = bounds_from_here(lattice, tables, size, worst=busy)
    flows = _Flows(problem)
    combine: Callable[[tuple[float, ...]], float] = max if busy else sum
    outgoing: list[list[list[tuple[Edges, int]]]] = [[[] for _ in range(nodes)] for nodes in lattice.sizes]
    for level, edges in enumerate(lattice.edges):
        for edge in edges:
            for k, node in enumerate(edge.source.tolist()):
                outgoing[level][node].append((edge, k))
    start = _Label(0, 0, 0, (), (), _pinned_excess(problem, tables.plain, flows))
    heap: list[tuple[float, int, int, _Label]] = [(combine(start.seconds), 0, 0, start)]
    seen: dict[tuple, list[tuple[float, ...]]] = {}
    pushed = 0
    while heap:
        bound, _, _, label = heapq.heappop(heap)
        ends = not lattice.line or label.level == len(lattice.edges)
        if label.at == size and ends:
            value = _ended(label, lattice, tables, combine)
            if value <= bound * (1 + 1e-12):
                return _stages(label), value
            if value < upper:
                pushed += 1
                heapq.heappush(heap, (value, -size, pushed, label))
            continue
        if _dominated(label, problem, flows, seen, busy):
            continue
        for edge, k in outgoing[label.level][label.node]:
            for following, value in _extensions(problem, tables, flows, label, edge, k, ahead, upper):
                pushed += 1
                heapq.heappush(heap, (value, -following.at, pushed, following))
        if pushed > budget:
            return None, min((entry[0] for entry in heap), default=upper)
    return None, upper


def _stages(label: _Label) -> list[tuple[int, int, int]]:
    starts = (*label.starts, label.at)
    return [(starts[k], starts[k + 1], device) for k, device in enumerate(label.devices)]


def _ended(label: _Label, lattice: Lattice, tables: PairTables, combine: Callable) -> float:
    """Value of a complete label, with what the devices without a stage need for their pinned units."""
    seconds = list(label.seconds)
    for device in lattice.unused[label.level][label.node] if lattice.unused else ():
        seconds[device] += tables.plain.stages(device).idle_seconds
    return combine(seconds)


def _pinned_excess(problem: Problem, plain: StageTables, flows: _Flows) -> tuple[float, ...]:
    """Excess of copies between pinned units, whose both ends are known from the start."""
    seconds = [0.0] * problem.chain.num_devices
    for x, devices in flows.fed.items():
        source = int(problem.source_device[x])
        for device in devices:
            if source >= 0 and device != source:
                seconds[device] += _excess_of(problem, plain, x, source, device)
    return tuple(seconds)


def _excess_of(problem: Problem, plain: StageTables, x: int, source: int, target: int) -> float:
    more, per_byte = excess(problem, plain, source, target)
    return float(problem.copies[x]) * (more + float(problem.nbytes[x]) * per_byte)


def _dominated(label: _Label, problem: Problem, flows: _Flows, seen: dict, busy: bool) -> bool:
    """True if a label that continues in the same way was as good in all that matters; otherwise remember this one."""
    sources = tuple(
        label.where(int(problem.source[x])) for x, _ in flows.live[label.at] if problem.source[x] >= 0
    )  # fmt: skip
    waiting = tuple(tuple(sorted({label.where(u) for u in users})) for _, users in flows.awaited[label.at])
    if busy:
        still_open = {d for devices in waiting for d in devices} | set(problem.chain.pins.values())
        value = (max(label.seconds), *(label.seconds[d] for d in sorted(still_open)))
    else:
        value = (sum(label.seconds),)
    known = seen.setdefault((label.level, label.node, label.at, sources, waiting), [])
    if any(all(a <= b for a, b in zip(other, value, strict=True)) for other in known):
        return True
    known.append(value)
    return False


def _extensions(
    problem: Problem, tables: PairTables, flows: _Flows, label: _Label, edge: Edges, k: int, ahead: list[Array],
    upper: float,
) -> list[tuple[_Label, float]]:  # fmt: skip
    """All labels one edge further, each with its bound, that can still be better than `upper`."""
    device, target, at = edge.devices[k], int(edge.target[k]), label.at
    stages = tables.plain.stages(device)
    rest = ahead[label.level + 1][target]
    if edge.empty:
        seconds = list(label.seconds)
        seconds[device] += stages.idle_seconds
        value = _bound(tables.busy, np.array(seconds)[:, None], rest[at : at + 1])[0]
        if value >= upper * (1 - 1e-12):
            return []
        return [(_Label(label.level + 1, target, at, label.starts, label.devices, tuple(seconds)), float(value))]
    if at == problem.size:
        return []
    columns = np.repeat(np.array(label.seconds)[:, None], problem.size - at, axis=1)
    columns[device] += stages.seconds[at, at + 1 :]
    for where, extra in _excess_at(problem, tables.plain, flows, label, device).items():
        columns[where] += extra.cumsum()[1:]
    values = _bound(tables.busy, columns, rest[at + 1 :])
    found = []
    for step in np.flatnonzero(values < upper * (1 - 1e-12)).tolist():
        stop = at + 1 + step
        starts, devices = (*label.starts, at), (*label.devices, device)
        following = _Label(label.level + 1, target, stop, starts, devices, tuple(columns[:, step].tolist()))
        found.append((following, float(values[step])))
    return found


def _bound(busy: bool, columns: Array, rest: Array) -> Array:
    return np.maximum(columns.max(axis=0), rest) if busy else columns.sum(axis=0) + rest


def _excess_at(problem: Problem, plain: StageTables, flows: _Flows, label: _Label, device: int) -> dict[int, Array]:
    """Excess that becomes known with a stage from `label.at` on `device`: per paying device, where it starts to count.

    Entry k of an array counts for stages of at least k units.
    """
    at, size = label.at, problem.size
    found: dict[int, Array] = {}

    def charge(x: int, source: int, target: int, position: int) -> None:
        cost = _excess_of(problem, plain, x, source, target)
        if cost:
            found.setdefault(target, np.zeros(size - at + 1))[position - at + 1] += cost

    for x, user in flows.live[at]:
        source = int(problem.source_device[x])
        source = label.where(int(problem.source[x])) if source < 0 else source
        if source != device and device not in flows.fed.get(x, ()):
            charge(x, source, device, user)
    for x, users in flows.awaited[at]:
        waiting = {label.where(u) for u in users} | set(flows.fed.get(x, ()))
        for target in sorted(waiting - {device}):
            charge(x, device, target, int(problem.source[x]))
    return found

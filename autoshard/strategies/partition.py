"""Partition: the best contiguous assignment of a chain, by one dynamic programme over stages and used-up devices.

    state      how many devices of each kind are used, how many units are placed
    step       one more device with a stage [i, j): state (used, i) -> (used + device, j)

Devices that can be swapped are one kind. A device may stay empty: it is never used. Exact by the model of `chain` where
copies into a device cost the same from everywhere; else each is priced as if it came over the fastest link, and the
answer by `cost_of`.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from autoshard.errors import PlanError
from autoshard.plan.choices import Objective
from autoshard.strategies.chain import Array, Cost, cost_of
from autoshard.strategies.stage_costs import StageCosts

_MOST_STEPS = 60_000
"""Steps of a grid of kinds: of twelve devices that all differ there are fewer."""
_MOST_TABLES = 64
_WORK, _FEWEST_UNITS, _MOST_UNITS = 1e8, 128, 1_000
"""Steps times cells of a table that are looked at quickly, and units that this comes to."""
_EVEN = 1e-7
"""Part of the model's seconds that a device full to the brim counts more: among equals memory is most even."""
_SAME = 1 + 1e-9
Stages = list[tuple[int, int, int]]
Node = tuple[int, ...]
"""How many devices are used of each kind."""


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """[D] what devices have, and what is taken of that beside what the chain counts (less than 0: it counts too much).

    The load of a device is (held + taken) / has.
    """

    has_bytes: Array
    taken_bytes: Array

    @staticmethod
    def of(capacity: Array) -> "Room":
        """Room for what the chain counts."""
        return Room(np.asarray(capacity, float), np.zeros(len(capacity)))

    @property
    def left_bytes(self) -> Array:
        """[D] what the chain may hold."""
        return self.has_bytes - self.taken_bytes

    def load(self, held: Array, device: int) -> Array:
        """The part of a device that is taken with so much of the chain, inf where it has no room for it."""
        part = (held + self.taken_bytes[device]) / max(float(self.has_bytes[device]), 1e-9)
        return np.where(held <= self.left_bytes[device], part, np.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment (device index per unit), its cost, and what the objective says of it."""

    assignment: tuple[int, ...]
    cost: Cost
    value: float


def balanced(
    costs: StageCosts, room: Room, objective: Objective = "latency", *, all_used: bool = False
) -> Solution | None:  # fmt: skip
    """Find the best assignment in devices of these capacities, on all of them if so asked; None if there is none.

    Among equals in latency the one with the most even memory; in the other objectives the one with the least latency.
    Where no speed is known the memory is evened out.
    """
    goal = objective if costs.chain.seconds.any() else "memory"
    return _search(costs, room, goal, replace(_network(costs, room), all_used=all_used))


def balanced_low_0(costs: StageCosts, room: Room, objective: Objective = "latency") -> Solution | None:
    """Like balanced, with as little on the first device as the others allow: nothing, where they can hold all."""
    least = _search(costs, room, "latency", _network(costs, room, apart=0), spare=0)
    if least is None:
        return None
    taken = room.taken_bytes.copy()
    taken[0] = room.has_bytes[0] - least.cost.memory_bytes[0]
    return balanced(costs, replace(room, taken_bytes=taken), objective)


def sequential(costs: StageCosts, room: Room, objective: Objective = "latency") -> Solution | None:
    """Fill the devices in the order given, each as far as it goes and leaves the rest a place.

    Where no way in the given order exists the devices are taken in another.
    """
    del objective
    devices, size = costs.chain.num_devices, costs.size
    able = np.zeros((devices + 1, size + 1), bool)  # able[d, i]: units i.. fit on devices d..
    able[devices, size] = True
    fits = [costs.valid & (costs.held(device) <= room.left_bytes[device]) for device in range(devices)]
    for device in reversed(range(devices)):
        able[device] = (fits[device] & able[device + 1]).any(axis=1)
        if device not in costs.pinned or costs.idle(device)[1] <= room.left_bytes[device]:
            able[device] |= able[device + 1]
    if not able[0, 0]:
        return balanced(costs, room)
    stages, at = [], 0
    for device in range(devices):
        ends = np.flatnonzero(fits[device][at] & able[device + 1])
        if len(ends):
            stages.append((at, int(ends[-1]), device))
            at = int(ends[-1])
    return _solution(costs, stages, "latency", room)


def most_even(costs: StageCosts, room: Room) -> Solution:
    """The assignment with the emptiest fullest device, whether it fits or not."""
    plenty = 1e9
    found = balanced(costs, Room(np.maximum(room.has_bytes, 1.0) * plenty, room.taken_bytes), "memory")
    assert found is not None
    return replace(found, value=found.value * plenty)


def most_units(costs: StageCosts, room: Room) -> int:
    """How many units are not too many for `balanced` on these devices."""
    return int(min(max((_WORK / _network(costs, room).steps) ** 0.5, _FEWEST_UNITS), _MOST_UNITS))


# ---- which devices may follow which


@dataclass(frozen=True, slots=True)
class SearchNodes:
    """Nodes and steps of the search: devices of some kinds, taken in any order."""

    kinds: list[list[int]]
    pinned: tuple[int, ...]
    all_used: bool = False

    @property
    def steps(self) -> float:
        """How many steps there are at most."""
        return prod(float(len(kind) + 1) for kind in self.kinds) * len(self.kinds)

    def following(self, node: Node) -> Iterator[tuple[Node, int, bool]]:
        """Yield the nodes after a node, the device that is passed on the way, and whether it gets a stage."""
        for number, kind in enumerate(self.kinds):
            if node[number] < len(kind):
                after, device = (*node[:number], node[number] + 1, *node[number + 1 :]), kind[node[number]]
                yield after, device, True
                if device in self.pinned:
                    yield after, device, False

    def ends(self, node: Node) -> bool:
        """Whether no device with pinned units is left, or none at all."""
        if self.all_used:
            return sum(node) == sum(map(len, self.kinds))
        return all(used or kind[0] not in self.pinned for used, kind in zip(node, self.kinds, strict=True))


def _network(costs: StageCosts, room: Room, apart: int = -1) -> SearchNodes:
    """All orders of the devices; `apart`: a device that is a kind by itself. Raises `PlanError` where they are many."""
    kinds = costs.kinds(room.has_bytes, room.taken_bytes)
    if apart >= 0:
        kinds = [[apart], *([d for d in kind if d != apart] for kind in kinds)]
    network = SearchNodes([kind for kind in kinds if kind], tuple(costs.pinned))
    if network.steps > _MOST_STEPS:
        raise PlanError(
            f"{costs.chain.num_devices} devices of {len(kinds)} kinds can be used in too many orders. Give fewer that "
            "differ in speed, memory or links: a dozen may."
        )
    return network


# ---- the dynamic programme


def _search(
    costs: StageCosts, room: Room, objective: Objective, network: SearchNodes, spare: int = -1
) -> Solution | None:
    """Find the best stages. `spare`: a device that is to hold as little as possible, whatever that costs."""
    total = float(costs.chain.seconds.sum(axis=1).min())
    costs_of = _DeviceCosts(costs, room, network)
    limit = np.inf

    def worst(device: int) -> tuple[Array, float]:
        seconds, load, idle = costs_of.of(device)
        at = 1 if objective == "memory" else 0
        return np.where(load < np.inf, (seconds, load)[at], np.inf), idle[at]

    def summed(device: int) -> tuple[Array, float]:
        seconds, load, idle = costs_of.of(device)
        weight = 1e3 * total + 1.0 if device == spare else 0.0
        fits, fine = load < np.inf, max(idle) < np.inf
        if objective != "latency":
            at = 1 if objective == "memory" else 0
            fits, fine = fits & ((seconds, load)[at] <= limit), fine and idle[at] <= limit
        full = np.where(fits, load, 0.0)
        dearer = seconds + _EVEN * (total or 1.0) * full * full + weight * full
        return np.where(fits, dearer, np.inf), idle[0] + weight * idle[1] if fine else np.inf

    if objective != "latency":
        found = _sweep(costs.size, network, costs_of.kept(worst), np.maximum)
        if found is None:
            return None
        limit = found[0] * _SAME
    found = _sweep(costs.size, network, costs_of.kept(summed), np.add)
    return None if found is None else _solution(costs, found[1], objective, room)


Priced = Callable[[int], tuple[Array, float]]
"""Device -> cost of every stage there, and of none."""


class _DeviceCosts:
    """Seconds and load of stages with given capacities; devices of a kind share them."""

    def __init__(self, costs: StageCosts, room: Room, network: SearchNodes) -> None:
        self.costs, self.room = costs, room
        self.of_kind = {device: kind[0] for kind in network.kinds for device in kind}
        self.loads: dict[int, Array] = {}

    def of(self, device: int) -> tuple[Array, Array, tuple[float, float]]:
        """[m+1, m+1] seconds and load of stages, inf where they do not fit; both of the device without a stage."""
        kind, idle = self.of_kind[device], (0.0, 0.0)
        if kind not in self.loads:
            self.loads[kind] = np.where(self.costs.valid, self.room.load(self.costs.held(device), device), np.inf)
        if device in self.costs.pinned:
            seconds, nbytes = self.costs.idle(device)
            load = float(self.room.load(np.array(nbytes), device))
            idle = (seconds if load < np.inf else np.inf, load)
        return self.costs.seconds(device), self.loads[kind], idle

    def kept(self, priced: Priced) -> Priced:
        """The same, each worked out once."""
        known: dict[int, tuple[Array, float]] = {}

        def find(device: int) -> tuple[Array, float]:
            key = self.of_kind[device]
            if key not in known:
                if len(known) >= _MOST_TABLES:
                    known.clear()
                known[key] = priced(device)
            return known[key]

        return find


def _sweep(size: int, network: SearchNodes, priced: Priced, combine: np.ufunc) -> tuple[float, Stages] | None:
    """Find the way through the network with the least sum, or the least worst, of its stages."""
    begun = np.full(size + 1, np.inf)
    begun[0] = 0.0
    start = (0,) * len(network.kinds)
    values: dict[Node, Array] = {start: begun}
    origins: dict[Node, list[tuple[Node, int, bool]]] = {start: []}
    waiting = deque([start])  # nodes with fewer devices come first
    while waiting:
        node = waiting.popleft()
        for after, device, staged in network.following(node):
            if staged:
                value = combine(values[node][:, None], priced(device)[0]).min(axis=0)
            else:
                value = combine(values[node], priced(device)[1])
            if after not in values:
                waiting.append(after)
            values[after] = np.minimum(values[after], value) if after in values else value
            origins.setdefault(after, []).append((node, device, staged))
    ends = [node for node in values if network.ends(node)]
    best = min(ends, key=lambda node: (values[node][size], sum(node)))
    if values[best][size] == np.inf:
        return None
    return float(values[best][size]), _trace(best, size, values, origins, priced, combine)


def _trace(
    node: Node, size: int, values: dict[Node, Array], origins: dict[Node, list[tuple[Node, int, bool]]],
    priced: Priced, combine: np.ufunc,
) -> Stages:  # fmt: skip
    """Walk back from the end of the best way: at each node the first step that gives its value."""
    stages, at = [], size
    while origins[node]:
        for before, device, staged in origins[node]:
            if staged:
                column = combine(values[before], priced(device)[0][:, at])
                begin = int(column.argmin())
            else:
                begin, column = at, combine(values[before], priced(device)[1])
            if column[begin] == values[node][at]:
                break
        if staged:
            stages.append((begin, at, device))
        node, at = before, begin
    return stages[::-1]


def _solution(costs: StageCosts, stages: Stages, objective: Objective, room: Room) -> Solution:
    place = costs.pinned_to.copy()
    for start, stop, device in stages:
        place[costs.free[start:stop]] = device
    assignment = tuple(place.tolist())
    cost = cost_of(costs.chain, assignment)
    value = cost.bottleneck if objective == "throughput" else cost.latency
    if objective == "memory":
        value = max(float(room.load(np.array(cost.memory_bytes[d]), d)) for d in set(assignment))
    return Solution(assignment=assignment, cost=cost, value=value)

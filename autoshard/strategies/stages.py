"""Where to cut layers in a row into the stages of a pipeline in one process: one dynamic programme.

    layers     [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]      cuts (0, 3, 5, 7)
    stages     └─ 0 ─────┘└─ 1 ──┘└─ 2 ──┘        stage i is on device i

The slowest stage (or the fullest device) is made as small as can be; among partitions whose slowest stage is not much
slower those with the least sum are looked at, too. What a stage keeps depends on its position; where it does not fit it
recomputes its activations, if that fits. Bytes are about right: the engine prices what comes out best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import comb
from typing import Any

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.profile.measure import first_saves, trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units, tensor_units
from autoshard.schedules.orders import make_order
from autoshard.schedules.simulate import Times, simulate
from autoshard.strategies.paths import cut_depths

Array = np.ndarray
Layers = Mapping[Any, Array]
"""Name -> figures per layer; seconds by ("forward", speed of a device)."""
_LIMITS = (1.0, 1.05, 1.2, 1.6)
"""Limits on the slowest stage, in parts of the least, under which the sum of stages is made least."""
_ALL = 64
"""Partitions up to which all are looked at."""
_CUTS_PER_STAGE, _ENOUGH = 2, 64
"""Cuts between whole modules are enough where there are so many per stage, or in all; else smaller modules are cut.

Few are, since tensors that meet inside a cut module are watched, which costs time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How stages run: one on each of these devices, all forwards before the backwards (the schedule "gpipe")."""

    devices: tuple[Device, ...]
    microbatches: int

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The smaller, the simpler."""
        return len(self.devices), self.microbatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Cutting:
    """A partition: `cuts` [stages + 1] in layers, which stages recompute, and what is minimised."""

    way: Way
    cuts: tuple[int, ...]
    recompute: tuple[bool, ...]
    value: float
    load: float


def layer_begins(units: Units, stages: int) -> Array:
    """[layers + 1] the first unit of every layer: modules as large as leave enough of them; all where few."""
    depths, count = cut_depths(units.paths), len(units.paths)
    enough = max(stages, min(_CUTS_PER_STAGE * stages, _ENOUGH))
    allowed = np.ones(count, bool)
    for depth in sorted({*depths[1:].tolist(), int(depths.max(initial=0))}):
        allowed = depths <= depth
        allowed[0] = True
        if allowed.sum() >= enough:
            break
    return np.append(np.flatnonzero(allowed), count)


def layer_figures(profile: Profile, part: Profile, begins: Array, devices: Sequence[Device]) -> Layers:
    """Seconds and bytes of layers for a micro-batch, whose profile is `part`."""
    graph, units = part.graph, find_units(part)
    op_unit, count, training = units.op_unit, len(units.paths), graph.backward_begin < len(graph.ops)
    trained = np.zeros(count)
    owner = tensor_units(graph, units)
    for name, nbytes in trained_sizes(graph) if profile.workload.training else ():
        trained[owner[name]] += nbytes

    def of_storages(places: Mapping[int, int]) -> Array:
        rows = list(places)
        sizes = [graph.storages[row].nbytes for row in rows]
        return np.bincount(op_unit[[places[row] for row in rows]], sizes, count) if rows else np.zeros(count)

    def together(values: Array) -> Array:
        return np.add.reduceat(values, begins[:-1], axis=-1)

    kept = of_storages(first_saves(graph)) * training
    ends = {graph.values[value].storage for value in (*graph.outputs, *graph.state)}
    made = {row: graph.storages[row].born for row in sorted(ends) if graph.storages[row].kind == "activation"}
    sends, returns = _crossing(graph, units)
    found: dict[Any, Array] = {
        "static": together(units.weight_bytes + trained), "kept": together(kept),
        "lasting": together(of_storages({row: min(at, len(op_unit) - 1) for row, at in made.items()})),
        "transient": np.maximum.reduceat(units.transient_bytes.astype(float), begins[:-1]),
        "sends": sends[:, begins], "returns": returns[:, begins],
    }  # fmt: skip
    is_forward = np.arange(len(graph.ops)) < graph.backward_begin
    masks = {"forward": is_forward, "backward": ~is_forward}
    for speed, device in {device.speed: device for device in devices}.items():
        each = op_seconds(part, device)
        for name, mask in masks.items():
            found[name, speed] = together(np.bincount(op_unit, np.where(mask, each, 0.0), count))
        found["after", speed] = together(trained * optimizer_seconds(1.0, profile.workload, device))
        found["launch", speed] = np.array([device.launch_seconds * np.count_nonzero(each)])
    return found


def _crossing(graph: ModelGraph, units: Units) -> tuple[Array, Array]:
    """[2, units + 1] tensors and bytes over every cut, forwards and back."""
    count, last = len(units.paths), np.full(len(units.value), -1)
    inner = units.edge_unit < count
    np.maximum.at(last, units.edge_value[inner], units.edge_unit[inner])
    made = np.array([graph.values[value].op >= 0 for value in units.value.tolist()], bool)
    crosses = made & (last > units.maker) & (units.maker >= 0)
    found = []
    for mask in (crosses, crosses & (units.copies == 2)):
        rows = np.ones(int(mask.sum())), units.nbytes[mask]
        begun, ended = (np.stack([np.bincount(at[mask] + 1, row, count + 2) for row in rows])
                        for at in (units.maker, last))  # fmt: skip
        found.append(np.cumsum(begun - ended, axis=1)[:, : count + 1])
    return found[0], found[1]


def between(few: Layers, many: Layers, part: float) -> Layers:
    """Figures of a micro-batch in between: they grow with its rows along straight lines, about."""
    return {name: few[name] + part * (many[name] - few[name]) for name in few}


class StageCuts:
    """Partitions of layers for one way to run them, on devices that have this part of their memory (`room`).

    `figure` is minimised: "seconds" of a pass, those of the "busiest" device with what it is sent, where passes
    overlap, or the "load" of the fullest.
    """

    def __init__(
        self, layers: Layers, way: Way, cluster: Cluster, figure: str, *, training: bool, room: float = 1.0
    ) -> None:
        self.layers, self.way, self.cluster, self.figure = layers, way, cluster, figure
        self.training, self.keep = training, way.microbatches * training
        self.capacity = [max(room * device.budget_bytes, 1e-9) for device in way.devices]
        self.sums = {name: np.concatenate([np.zeros((*row.shape[:-1], 1)), np.cumsum(row, axis=-1)], axis=-1)
                     for name, row in layers.items()}  # fmt: skip
        self._spans: dict[str, Array] = {}

    def _span(self, name: Any) -> Array:
        """[n + 1, n + 1] the sum of a figure from one cut to another."""
        if name not in self._spans:
            self._spans[name] = self.sums[name][None, :] - self.sums[name][:, None]
        return self._spans[name]

    def _most(self, name: str) -> Array:
        """[n + 1, n + 1] the largest of a figure from one cut to another."""
        row = self.layers[name]
        later = np.arange(len(row))[None, :] >= np.arange(len(row) + 1)[:, None]
        most = np.maximum.accumulate(np.where(later, row[None, :], 0.0), axis=1)
        return np.concatenate([np.zeros((len(row) + 1, 1)), most], axis=1)

    def _bytes(self) -> tuple[Array, Array]:
        """[n + 1, n + 1] bytes of a stage, as it is and with recomputing."""
        if "bytes" not in self._spans:
            came = np.where(np.arange(len(self.sums["static"])) > 0, self.layers["sends"][1], 0.0)[:, None]
            fixed = self._span("static") + self.way.microbatches * self._span("lasting") + self._most("transient")
            kept = self._span("kept") + came
            plain = fixed + self.keep * kept + came * (not self.training)
            # modules one by one, each from what came in
            inner = np.concatenate([[0.0], np.cumsum(self.layers["sends"][1][:-1])])
            again = fixed + self.keep * (came + inner[None, :] - inner[:, None]) + self._most("kept")
            self._spans["bytes"], self._spans["again"] = plain, again
        return self._spans["bytes"], self._spans["again"]

    def _over(self, what: str, stage: int) -> Array:
        """[n + 1] seconds of tensors over the link between a stage and the one before, for a cut anywhere."""
        here, before = self.way.devices[stage], self.way.devices[stage - 1]
        ends = (before.name, here.name) if what == "sends" else (here.name, before.name)
        link = self.cluster.link(*ends)
        count, nbytes = self.layers[what]
        return count * link.latency_seconds + nbytes / link.bytes_per_second

    def _tables(self, stage: int) -> tuple[Array, Array]:
        """[n + 1, n + 1] the figure of a stage from one cut to another, inf where it does not fit; and its whole way.

        The pace of a stage is that of its device, or of the link into it, whichever is slower.
        """
        plain, again = self._bytes()
        again = again if self.training else plain
        room, speed, size = self.capacity[stage], self.way.devices[stage].speed, len(plain)
        exists = np.arange(size)[:, None] < np.arange(size)[None, :]
        if self.figure == "load":
            load = np.where(exists, np.minimum(plain, again) / room, np.inf)
            load[load > 1] = np.inf
            return load, load
        forward = self._span(("forward", speed))
        seconds = forward + self._span(("backward", speed))
        seconds = np.where(plain <= room, seconds, np.where(again <= room, seconds + forward, np.inf))
        seconds = np.where(exists, seconds, np.inf)
        if not stage:
            return seconds, seconds
        come, gone = self._over("sends", stage)[:, None], self._over("returns", stage)[:, None]
        if self.figure == "busiest":
            return seconds + come, seconds
        return np.maximum(seconds, np.maximum(come, gone)), seconds + come + gone

    def cuttings(self) -> list[Cutting]:
        """The partitions that come out of the dynamic programme and fit; their value by a formula."""
        size, inner = len(self.layers["static"]), len(self.way.devices) - 1
        if inner >= size:
            return []
        if comb(size - 1, inner) <= _ALL:
            every = [self._cutting((0, *cuts, size)) for cuts in combinations(range(1, size), inner)]
            return [one for one in every if one.load <= 1]
        tables, ways = zip(*(self._tables(stage) for stage in range(inner + 1)), strict=True)
        least = _solve(tables, np.maximum)
        if least is None:
            return []
        found = {least[1]: None}
        for limit in _LIMITS if self.figure == "seconds" else ():
            within = least[0] * limit * (1 + 1e-9)
            even = _solve([np.where(one <= within, way, np.inf) for one, way in zip(tables, ways, strict=True)], np.add)
            if even is not None:
                found[even[1]] = None
        return [self._cutting(cuts) for cuts in found]

    def _cutting(self, cuts: tuple[int, ...]) -> Cutting:
        both = [tuple(table[ends] for table in self._bytes()) for ends in pairwise(cuts)]
        rooms = self.capacity
        again = [self.training and bool(plain > room or (self.figure == "load" and plain > less * 1.002))
                 for (plain, less), room in zip(both, rooms, strict=True)]  # fmt: skip
        load = max(pair[yes] / room for pair, yes, room in zip(both, again, rooms, strict=True))
        made = Cutting(way=self.way, cuts=cuts, recompute=tuple(again), value=0.0, load=float(load))
        return Cutting(way=self.way, cuts=cuts, recompute=made.recompute, load=made.load, value=self._value(made))

    def times(self, one: Cutting) -> Times:
        """Seconds of every stage and of the copies from each to the next."""

        def seconds(name: str) -> list[float]:
            return [float(self._span((name, device.speed))[ends])
                    for device, ends in zip(self.way.devices, pairwise(one.cuts), strict=True)]  # fmt: skip

        forward, backward = map(seconds, ("forward", "backward"))
        backward = [b + f * again for f, b, again in zip(forward, backward, one.recompute, strict=True)]
        sends, returns = ([float(self._over(what, stage)[cut]) for stage, cut in enumerate(one.cuts[1:-1], 1)]
                          for what in ("sends", "returns"))  # fmt: skip
        return Times(forward=forward, backward=backward, sends=sends, returns=returns)

    def _after(self, one: Cutting) -> list[float]:
        return [float(self._span(("after", device.speed))[ends])
                for device, ends in zip(self.way.devices, pairwise(one.cuts), strict=True)]  # fmt: skip

    def _launched(self) -> float:
        """Seconds in which one thread launches all ops."""
        least = min(float(self.layers["launch", device.speed][0]) for device in self.way.devices)
        return self.way.microbatches * least

    def _value(self, one: Cutting) -> float:
        """About what is minimised: what the slowest device does, and the way of one micro-batch past the others."""
        if self.figure == "load":
            return one.load
        times, m = self.times(one), self.way.microbatches
        if self.figure == "busiest":
            own = [f + (times.sends[stage - 1] if stage else 0.0) for stage, f in enumerate(times.forward)]
            return max(m * max(own), self._launched())

        def through(seconds: Sequence[float], links: Sequence[float]) -> float:
            slowest = max(*seconds, *links, 0.0)
            return m * slowest + max(sum(seconds) + sum(links) - slowest, 0.0)

        found = through(times.forward, times.sends) + through(times.backward, times.returns)
        return max(found + max(self._after(one)), self._launched())

    def simulated(self, one: Cutting) -> float:
        """Seconds of a pass by the clock, or the figure that is minimised where it is another one."""
        if self.figure != "seconds":
            return one.value
        order = make_order("gpipe", len(self.way.devices), self.way.microbatches, training=self.training)
        ran, own = simulate(order, self.times(one)).ran, self._after(one)
        ends = [max((row.end for row in ran if row.device == at), default=0.0) + own[at] for at in range(len(own))]
        return max(*ends, self._launched())


def _solve(tables: Sequence[Array], join: np.ufunc) -> tuple[float, tuple[int, ...]] | None:
    """The partition with the least sum, or maximum, of its stages; None if there is none."""
    best = np.full(len(tables[0]), np.inf)
    best[0] = 0.0
    came_from = []
    for table in tables:
        value = join(best[:, None], table)
        came_from.append(value.argmin(axis=0))
        best = value.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    cuts = [len(best) - 1]
    for previous in reversed(came_from):
        cuts.append(int(previous[cuts[-1]]))
    return float(best[-1]), tuple(reversed(cuts))

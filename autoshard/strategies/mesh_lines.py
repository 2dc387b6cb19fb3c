"""What every mesh of a request costs, as a `Line`: a position is as slow as the slowest of its ranks in any replica.

Devices that are alike, groups that lie alike in hosts, and cuts of the same groups are worked out once: a request for
a hundred devices asks for thousands of shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.batching import BatchAxis
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cost import op_seconds, optimizer_seconds
from autoshard.engine.cuts import Tracer
from autoshard.engine.links import all_reduce_seconds
from autoshard.engine.replicas import BUCKET_BYTES
from autoshard.module_paths import above
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.sharding import Cut, even_shares
from autoshard.strategies.cut_choice import Option, choose
from autoshard.strategies.cut_task import Shares, Task, assumed_cuts, make_task, options_on
from autoshard.strategies.layers import Layers
from autoshard.strategies.mesh_shapes import Shape
from autoshard.strategies.shares import divide
from autoshard.strategies.stage_cuts import Array, Line


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """A set of cuts over tensor-parallel ranks. `layers`: per rank."""

    options: tuple[Option, ...]
    layers: tuple[Layers, ...]


@dataclass(slots=True, kw_only=True)
class MeshLines:
    """Makes the line of every shape. `found`: what can be cut; None where nothing is (a pipeline).

    `banned`: (group, shares) that turned out not to be equal when cut -> why.
    """

    profile: Profile
    cluster: Cluster
    batch: BatchAxis
    tracer: Tracer | None = None
    found: AxisGroups | None = None
    objective: str = "latency"
    one_process: bool = False
    banned: dict[tuple[int, Shares], str] = field(default_factory=dict)
    units: Units = field(init=False)
    whole: Layers = field(init=False)
    groups: dict[int, AxisGroup] = field(init=False)
    seconds: list[float] = field(init=False)
    _task: Task | None = None
    _ranks: dict[tuple[int, bool, int], Ranks | None] = field(default_factory=dict)
    _known: dict[object, Array] = field(default_factory=dict)
    _bytes: dict[object, Line] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.units = find_units(self.profile)
        self.whole = Layers(self.profile, self.batch, self.units, one_process=self.one_process)
        self.groups = {} if self.found is None else {group.index: group for group in self.found.groups}
        kinds = {device.speed: device for device in self.cluster.devices}
        of_kind = {speed: float(op_seconds(self.profile, device).sum()) for speed, device in kinds.items()}
        self.seconds = [of_kind[device.speed] for device in self.cluster.devices]

    def devices(self, shape: Shape) -> list[Device]:
        """The devices of a shape, by rank."""
        return [self.cluster.devices[i] for i in shape.devices]

    # ---- what is cut over tensor-parallel ranks

    def ban(self, refused: dict[tuple[int, Shares], str]) -> None:
        """Choose without these."""
        self.banned |= refused
        self._ranks.clear()

    def options(self, shape: Shape) -> tuple[Option, ...]:
        """What is cut in a shape."""
        ranks = self.ranks(shape)
        return () if ranks is None else ranks.options

    def assumed(self, shape: Shape) -> tuple[Cut, ...]:
        """The cuts of a shape as they would be if all were proved."""
        return assumed_cuts(self.task, self.options(shape)) if shape.tensor > 1 else ()

    @property
    def task(self) -> Task:
        """What cutting over devices is decided on."""
        if self._task is None:
            assert self.found is not None
            self._task = make_task(self.profile, self.cluster, self.found, self.objective, tracer=self.tracer)
        return replace(self._task, banned=dict(self.banned))

    def ranks(self, shape: Shape) -> Ranks | None:
        """Cuts over the ranks of a shape: variant 0 is the fastest, 1 leaves least on each. None if nothing is cut.

        Shares follow the devices' speed where all groups have the same kinds in one order; else they are even.
        """
        if shape.tensor == 1:
            return None
        key = shape.tensor, shape.pipeline > 1, shape.variant
        if key not in self._ranks:
            devices = tuple(self.cluster.devices[: shape.tensor])
            kinds = [device.speed for device in self.cluster.devices]
            groups = {tuple(kinds[i : i + shape.tensor]) for i in range(0, len(kinds) - shape.tensor + 1, shape.tensor)}
            task = replace(self.task, even=len(groups) > 1)
            usual = [
                option for option in options_on(task, devices)
                if option.index not in task.fallback and ("" not in self.groups[option.index].blocks or not key[1])
            ]  # fmt: skip
            goal, whole = "memory" if shape.variant else "latency", task.whole_bytes
            seconds = [task.whole_seconds[device.name] for device in devices]
            picked = choose(usual, seconds, whole, [whole] * shape.tensor, goal) if usual else None
            other = self.ranks(replace(shape, variant=0)) if shape.variant else None
            same = other is not None and picked and {o.index for o in other.options} == {o.index for o in picked}
            self._ranks[key] = self._traced(picked, key[1]) if picked and not same else None
        return self._ranks[key]

    def _traced(self, picked: Sequence[Option], staged: bool) -> Ranks:
        assert self.tracer is not None
        traced = self.tracer.trace(assumed_cuts(self.task, picked))
        together, spans = np.zeros(self.whole.count + 1, bool), _spans(self.units)
        for option in picked if staged else ():
            for block in self.groups[option.index].blocks:
                low, high = spans[block]
                together[low + 1 : high + 1] = True
        shares = list(zip(*(option.shares for option in picked), strict=True))
        made = {own: self.whole.cut(traced, shares.index(own), together) for own in dict.fromkeys(shares)}
        return Ranks(options=tuple(picked), layers=tuple(made[own] for own in shares))

    # ---- what a mesh costs

    def rows(self, shape: Shape) -> tuple[int, ...] | None:
        """Rows of every replica, in whole micro-batches of equal size; None if there are none for somebody."""
        if shape.data == 1:
            return (self.batch.size,)
        each = self.batch.size // shape.microbatches
        if each * shape.microbatches != self.batch.size or each < shape.data:
            return None
        seconds = np.array([self.seconds[i] for i in shape.devices]).reshape(shape.data, -1).max(axis=1).tolist()
        shares = divide(each, seconds) if len(set(seconds)) > 1 else even_shares(each, shape.data)
        if shares is None or (shape.pipeline > 1 and len(set(shares)) > 1):  # replicas of pipelines count alike
            return None
        return tuple(share * shape.microbatches for share in shares)

    def line(self, shape: Shape) -> Line | None:
        """The layers of a shape with its positions; None where it makes no sense."""
        rows, ranks = self.rows(shape), self.ranks(shape)
        if rows is None or (shape.tensor > 1 and ranks is None):
            return None
        layers = (self.whole,) if ranks is None else ranks.layers
        parts = [-(-own // shape.microbatches) / self.batch.size for own in rows]
        heaviest = max(layers, key=lambda one: float(one.held.sum()))
        base = self._base(heaviest, max(parts), shape.stages)
        places = np.array(shape.devices).reshape(shape.data, shape.pipeline, shape.tensor)
        budgets = np.array([float(device.budget_bytes) for device in self.cluster.devices])[places].min(axis=(0, 2))
        found = [self._position(layers, parts, places[:, at], base.begins) for at in range(shape.pipeline)]
        forward, backward, weight = (np.stack([one[i] for one in found]) for i in range(3))
        latency, bandwidth = self._links(places)
        launch = self.whole.launch_seconds(self.cluster) if self.one_process else 0.0
        return replace(
            base, microbatches=shape.microbatches, forward=forward, backward=backward, weight=weight,
            after=np.stack([self._after(places[:, at, 0], base.trained) for at in range(shape.pipeline)]),
            capacity=budgets, latency=latency, bandwidth=bandwidth, launch_seconds=launch,
        )  # fmt: skip

    def _base(self, layers: Layers, part: float, stages: int) -> Line:
        begins = len(layers.begins(stages))
        key = id(layers), part, begins
        if key not in self._bytes:
            cards = any(not device.name.startswith("cpu") for device in self.cluster.devices)
            self._bytes[key] = layers.line(part, stages, on_accelerators=cards)
        return self._bytes[key]

    def _position(self, layers: Sequence[Layers], parts: Sequence[float], places: Array, begins: Array) -> Array:
        """[3, layers] forward, backward and weight seconds of the ranks at a position, `places`: [data, tensor]."""
        devices = self.cluster.devices
        looks = {(part, id(layers[t]), devices[places[d, t]].speed): (part, layers[t], devices[places[d, t]])
                 for d, part in enumerate(parts) for t in range(len(layers))}  # fmt: skip
        key = (frozenset(looks), len(begins), *(self._pattern(row) for row in places if len(layers) > 1))
        if key not in self._known:
            found = np.max([one.unit_seconds(device, part) for part, one, device in looks.values()], axis=0)
            sums = np.zeros((2, len(found[0])))
            for row, part in zip(places, parts, strict=True) if len(layers) > 1 else ():
                names = [devices[i].name for i in row.tolist()]
                sums = np.maximum(sums, layers[0].sum_seconds(self.cluster, names, part))
            sums[1] *= self.profile.workload.training
            found = found + np.stack([sums[0], sums[1], 0 * sums[0]])
            self._known[key] = np.add.reduceat(found, begins[:-1], axis=1)
        return self._known[key]

    def _pattern(self, numbers: Array) -> tuple[object, ...]:
        """What devices are and how they lie in hosts: the same for groups that take equally long for a sum."""
        hosts: dict[str, int] = {}
        devices = [self.cluster.devices[i] for i in numbers.tolist()]
        return tuple((device.speed, hosts.setdefault(device.host, len(hosts))) for device in devices)

    def _links(self, places: Array) -> tuple[Array, Array]:
        """[p, p] the slowest link between neighbouring positions in any replica; others are not used."""
        count = places.shape[1]
        latency, bandwidth = np.zeros((count, count)), np.full((count, count), np.inf)
        seconds, rates = self.cluster.link_tables
        numbers = places[:, :, 0]
        for one in range(count if count > 1 else 0):
            other = (one + 1) % count
            for a, b in ((one, other), (other, one)):
                latency[a, b] = seconds[numbers[:, a], numbers[:, b]].max()
                bandwidth[a, b] = rates[numbers[:, a], numbers[:, b]].min()
        return latency, bandwidth

    def _after(self, column: Array, trained: Array) -> Array:
        """[layers] seconds that parameters add at the end: their sum over replicas, and the optimizer."""
        if not self.profile.workload.training:
            return 0 * trained
        key = "after", self._pattern(column)
        if key not in self._known:
            devices = [self.cluster.devices[i] for i in column.tolist()]
            step = max(optimizer_seconds(1.0, self.profile.workload, device) for device in devices)
            reduce = all_reduce_seconds(self.cluster, [device.name for device in devices], BUCKET_BYTES)
            self._known[key] = np.array(step + reduce / BUCKET_BYTES)
        return trained * self._known[key]


def _spans(units: Units) -> dict[str, tuple[int, int]]:
    """Module path, or tensor name -> the first and last unit at or below it."""
    found: dict[str, tuple[int, int]] = {}
    for unit, paths in enumerate(units.paths):
        for path in {one for own in paths for one in (own, *above(own))}:
            low, _ = found.get(path, (unit, unit))
            found[path] = low, unit
    return found

"""What every mesh of a request costs, as arrays: its ranks' lines, links, and what is summed over replicas.

Devices that are alike, groups that lie alike in hosts, and cuts of the same groups are worked out once: a request for
a hundred devices asks for thousands of shapes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.batching import BatchAxis
from autoshard.cluster.cluster import Cluster, Device
from autoshard.collective_cost import all_reduce_seconds
from autoshard.cost import op_seconds, optimizer_seconds
from autoshard.cut_cost import Tracer
from autoshard.module_paths import above
from autoshard.plan import Mesh
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.replica_cost import BUCKET_BYTES
from autoshard.sharding import even_shares
from autoshard.strategies.cut_choice import Option, choose
from autoshard.strategies.cut_task import Task, assumed_cuts, make_task, options_on
from autoshard.strategies.mesh_lines import MeshLines, one_of_each_kind
from autoshard.strategies.mesh_search import Posed, Shape
from autoshard.strategies.shares import divide

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """A set of cuts over tensor-parallel ranks. `lines`: per rank."""

    options: tuple[Option, ...]
    lines: tuple[MeshLines, ...]


@dataclass(slots=True, kw_only=True)
class Poser:
    """Poses shapes. `order`: the devices in the order of the mesh; `numbers`: theirs in the cluster.

    `lacking`: (`Shape.ranks`) -> [positions] bytes that devices turned out to hold beyond what the search counts.
    `posed`: what was posed before.
    """

    profile: Profile
    cluster: Cluster
    batch: BatchAxis
    found: AxisGroups
    objective: str
    tracer: Tracer
    order: tuple[Device, ...] = ()
    lacking: dict[tuple[int, int, int, int], Array] = field(default_factory=dict)
    posed: dict[Shape, Posed | None] = field(default_factory=dict)
    units: Units = field(init=False)
    whole: MeshLines = field(init=False)
    task: Task = field(init=False)
    groups: dict[int, AxisGroup] = field(init=False)
    spans: dict[str, tuple[int, int]] = field(init=False)
    numbers: Array = field(init=False)
    kinds: Array = field(init=False)
    seconds: Array = field(init=False)
    known_ranks: dict[tuple[int, bool, int], Ranks | None] = field(default_factory=dict)
    _options: dict[int, list[Option]] = field(default_factory=dict)
    _sums: dict[object, Array] = field(default_factory=dict)
    _rates: dict[object, float] = field(default_factory=dict)
    _used: dict[int, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        profile, cluster = self.profile, self.cluster
        self.units = find_units(profile)
        self.whole = MeshLines(profile, one_of_each_kind(cluster), self.batch, self.units)
        self.task = make_task(profile, cluster, self.found, self.objective, tracer=self.tracer)
        self.groups = {group.index: group for group in self.found.groups}
        self.spans = _spans(self.units)
        self.arrange(cluster.devices)

    def arrange(self, devices: Sequence[Device]) -> None:
        """Take the devices in this order."""
        of_kind = np.array([float(op_seconds(self.profile, device).sum()) for device in self.whole.cluster.devices])
        self.order = tuple(devices)
        self.numbers = np.array([self.cluster.names.index(device.name) for device in devices])
        self.kinds = np.array([self.whole.kind(device) for device in devices])
        self.seconds = of_kind[self.kinds]

    def used(self, count: int) -> Array:
        """Numbers of the fastest devices, in order."""
        if count not in self._used:
            self._used[count] = np.sort(np.argsort(self.seconds, kind="stable")[:count])
        return self._used[count]

    def devices(self, shape: Shape) -> tuple[Device, ...]:
        """The devices of a shape, by rank."""
        return tuple(self.order[i] for i in self.used(shape.size).tolist())

    def rows(self, shape: Shape) -> tuple[int, ...] | None:
        """Rows of every replica, in whole micro-batches of equal size; None if there are none for somebody."""
        each = self.batch.size // shape.microbatches
        if each * shape.microbatches != self.batch.size or each < shape.data:
            return None
        seconds = self.seconds[self.used(shape.size)].reshape(shape.data, -1).max(axis=1).tolist()
        shares = divide(each, seconds) if len(set(seconds)) > 1 else even_shares(each, shape.data)
        if shares is not None and shape.pipeline > 1 and len(set(shares)) > 1:
            return None  # replicas of pipelines count alike
        return None if shares is None else tuple(share * shape.microbatches for share in shares)

    # ---- what is cut over tensor-parallel ranks

    def ranks(self, tensor: int, staged: bool, variant: int) -> Ranks | None:
        """Cuts over so many ranks: variant 0 is the fastest, 1 what leaves least on each. None where nothing is cut."""
        key = tensor, staged, variant
        if key not in self.known_ranks:
            devices = self.order[:tensor]
            if tensor not in self._options:
                self._options[tensor] = options_on(self._shared_task(tensor), devices)
            usual = [
                option for option in self._options[tensor]
                if option.index not in self.task.fallback and (not staged or self._in_one_stage(option))
            ]  # fmt: skip
            goal, whole = "memory" if variant else "latency", self.task.whole_bytes
            seconds = [self.task.whole_seconds[device.name] for device in devices]
            picked = choose(usual, seconds, whole, [whole] * tensor, goal) if usual else None
            other = self.known_ranks.get((tensor, staged, 0)) if variant else None
            same = other is not None and picked and {o.index for o in other.options} == {o.index for o in picked}
            self.known_ranks[key] = self._traced(picked, staged) if picked and not same else None
        return self.known_ranks[key]

    def _shared_task(self, tensor: int) -> Task:
        """Shares follow the devices' speed where all groups have the same kinds in one order; else they are even."""
        kinds = self.kinds.tolist()
        groups = {tuple(kinds[i : i + tensor]) for i in range(0, len(kinds) - tensor + 1, tensor)}
        return replace(self.task, even=len(groups) > 1)

    def _traced(self, picked: Sequence[Option], staged: bool) -> Ranks:
        traced = self.tracer.trace(assumed_cuts(self.task, picked))
        together = np.zeros(self.whole.count + 1, bool)
        for option in picked if staged else ():
            for block in self.groups[option.index].blocks:
                low, high = self.spans[block]
                together[low + 1 : high + 1] = True
        shares = list(zip(*(option.shares for option in picked), strict=True))
        made = {own: self.whole.cut(traced, shares.index(own), together) for own in dict.fromkeys(shares)}
        return Ranks(options=tuple(picked), lines=tuple(made[own] for own in shares))

    def _in_one_stage(self, option: Option) -> bool:
        """Whether what is cut together is a block: what lies outside of blocks may be in any stage."""
        return "" not in self.groups[option.index].blocks

    # ---- what a mesh costs

    def pose(self, shape: Shape) -> Posed | None:
        """The arrays of a shape: every position as slow as the slowest of its ranks in any replica."""
        if shape not in self.posed:
            self.posed[shape] = self._pose(shape)
        return self.posed[shape]

    def lacks(self, ranks: tuple[int, int, int, int], beyond: Array) -> None:
        """Take into account what devices turned out to hold beyond what the search counts, in shapes of these ranks."""
        self.lacking[ranks] = np.maximum(beyond, self.lacking.get(ranks, 0.0))
        for shape in [shape for shape in self.posed if shape.ranks == ranks]:
            del self.posed[shape]

    def forget(self) -> None:
        """Begin anew: something else can be cut."""
        self.lacking.clear()
        self.posed.clear()
        self.known_ranks.clear()
        self._options.clear()

    def _pose(self, shape: Shape) -> Posed | None:
        rows = self.rows(shape)
        if rows is None:
            return None
        count, size, numbers = shape.pipeline, self.batch.size, self.used(shape.size)
        ranks = self.known_ranks[shape.tensor, count > 1, shape.variant] if shape.tensor > 1 else None
        lines = ranks.lines if ranks is not None else (self.whole,)
        stages, parts = count * shape.per_device, [own // shape.microbatches for own in rows]
        base = max(lines, key=lambda line: float(line.held.sum())).of_kinds(max(parts), stages)
        places = numbers.reshape(shape.data, count, shape.tensor)
        kinds = self.kinds[places]
        tables = {name: np.zeros((count, base.size)) for name in ("forward", "backward", "weight")}
        sums = np.zeros((2, count, base.size))  # of forward, and of backward
        known: dict[object, dict[str, Array]] = {}
        for position in range(count):
            looks = {(part, id(lines[tensor]), int(kinds[data, position, tensor])): tensor
                     for data, part in enumerate(parts) for tensor in range(shape.tensor if ranks else 1)}  # fmt: skip
            key = frozenset(looks)
            if key not in known:
                every = [(lines[tensor].of_kinds(part, stages), kind) for (part, _, kind), tensor in looks.items()]
                known[key] = {
                    name: np.max([getattr(own, name)[kind] for own, kind in every], axis=0) for name in tables
                }
            for name, table in tables.items():
                table[position] = known[key][name]
            if ranks is not None:
                for data, part in enumerate(parts):
                    own = self._sum_seconds(ranks, places[data, position].tolist(), part / size, base.begins)
                    np.maximum(sums[:, position], own, out=sums[:, position])
        budgets = np.array([float(device.budget_bytes) for device in self.order])[places].min(axis=(0, 2))
        latency, bandwidth = self._links(places)
        capacity = np.maximum(budgets - self.lacking.get(shape.ranks, 0.0), 0.0)
        line = replace(
            base, microbatches=shape.microbatches, forward=tables["forward"] + sums[0],
            backward=tables["backward"] + sums[1] * self.profile.workload.training, weight=tables["weight"],
            capacity=capacity, latency=latency, bandwidth=bandwidth, after=None,
        )  # fmt: skip
        trained = max((one.trained for one in lines), key=lambda row: float(row.sum()))
        return Posed(line=line, after=self._after(places, np.add.reduceat(trained, base.begins[:-1])))

    def _pattern(self, numbers: Sequence[int]) -> tuple[object, ...]:
        """What devices are and how they lie in hosts: the same for groups that take equally long for a sum."""
        hosts: dict[str, int] = {}
        return tuple((int(self.kinds[i]), hosts.setdefault(self.order[i].host, len(hosts))) for i in numbers)

    def _sum_seconds(self, ranks: Ranks, numbers: Sequence[int], part: float, begins: Array) -> Array:
        key = id(ranks), self._pattern(numbers), part, len(begins)
        if key not in self._sums:
            names = [self.order[i].name for i in numbers]
            seconds = ranks.lines[0].sum_seconds(self.cluster, names, part)
            self._sums[key] = np.add.reduceat(seconds, begins[:-1], axis=1)
        return self._sums[key]

    def _links(self, places: Array) -> tuple[Array, Array]:
        """[p, p] the slowest link between neighbouring positions in any replica; others are not used."""
        count = places.shape[1]
        latency, bandwidth = np.zeros((count, count)), np.full((count, count), np.inf)
        seconds, rates = self.cluster.link_tables
        numbers = self.numbers[places[:, :, 0]]
        for one in range(count if count > 1 else 0):
            other = (one + 1) % count
            for a, b in ((one, other), (other, one)):
                latency[a, b] = seconds[numbers[:, a], numbers[:, b]].max()
                bandwidth[a, b] = rates[numbers[:, a], numbers[:, b]].min()
        return latency, bandwidth

    def _after(self, places: Array, trained: Array) -> Array:
        """[p, pieces] seconds that parameters add at the end: their sum over replicas, and the optimizer."""
        found = np.zeros((places.shape[1], len(trained)))
        for position in range(len(found) if self.profile.workload.training else 0):
            column = places[:, position, 0].tolist()
            key = self._pattern(column)
            if key not in self._rates:
                devices = [self.order[i] for i in column]
                step = max(optimizer_seconds(1.0, self.profile.workload, device) for device in devices)
                reduce = all_reduce_seconds(self.cluster, [device.name for device in devices], BUCKET_BYTES)
                self._rates[key] = step + reduce / BUCKET_BYTES
            found[position] = trained * self._rates[key]
        return found


def mesh_of(shape: Shape, rows: Sequence[int]) -> Mesh:
    """The mesh of a shape whose replicas have these rows."""
    even = len(set(rows)) == 1
    return Mesh(dp=shape.data, pp=shape.pipeline, tp=shape.tensor, shares=() if even else tuple(rows))


def _spans(units: Units) -> dict[str, tuple[int, int]]:
    """Module path, or tensor name -> the first and last unit at or below it."""
    found: dict[str, tuple[int, int]] = {}
    for unit, paths in enumerate(units.paths):
        for path in {one for own in paths for one in (own, *above(own))}:
            low, _ = found.get(path, (unit, unit))
            found[path] = low, unit
    return found

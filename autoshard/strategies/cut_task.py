"""What column_parallel decides on: the task, a choice with its cost, and the price of every group on some devices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.axes.unchecked import as_cut
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cost import op_seconds, optimizer_seconds
from autoshard.engine.cuts import Tracer
from autoshard.module_paths import join
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.sharding import Cut
from autoshard.strategies.cut_choice import Option, Picked
from autoshard.strategies.cut_savings import Saving, savings_of
from autoshard.strategies.shares import divide

Shares = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Devices, in rank order, and what is cut over them, with its predicted cost.

    Attributes:
        seconds: of one pass; `collective_seconds` of it for all-reduces and gathers.
        peak_bytes: per rank, of tensors.
    """

    devices: tuple[Device, ...]
    picked: tuple[Option, ...]
    seconds: float
    collective_seconds: float
    peak_bytes: tuple[int, ...]

    def value(self, objective: str) -> tuple[float, float]:
        """What is minimised: seconds, or for "memory" the part of the fullest device's memory in use."""
        pairs = zip(self.peak_bytes, self.devices, strict=True)
        fullest = max(peak / max(device.budget_bytes, 1) for peak, device in pairs)
        return (fullest, self.seconds) if objective == "memory" else (self.seconds, fullest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is asked, with what does not depend on the devices worked out.

    Attributes:
        even: every rank must keep as much (one process for all devices).
        savings: per group, what cutting it saves.
        conflicts: per group, the indices of those that can't be cut as well.
        fallback: indices of groups of single modules, with a gather behind each: for what no group of a block cuts.
        objective: what is minimised; `wanted` is what was asked for.
        whole_seconds, whole_bytes: a pass of the model on each device alone, and its peak there.
        too_few: names of devices -> sets of groups in shares that turned out to be not enough there: it did not fit.
        held: names of devices -> what each would hold if no parameter were cut, where it is known.
        bytes_per_parameter_byte: with gradients and optimizer state.
        cuttable_bytes: of all parameters that any group cuts, with these.
        banned: (group, shares) -> why not.
    """

    profile: Profile
    cluster: Cluster
    groups: tuple[AxisGroup, ...]
    savings: tuple[Saving, ...]
    objective: str
    even: bool
    conflicts: tuple[frozenset[int], ...]
    fallback: frozenset[int]
    whole_seconds: Mapping[str, float]
    whole_bytes: int
    bytes_per_parameter_byte: float
    cuttable_bytes: int
    wanted: str = "latency"
    too_few: Mapping[tuple[str, ...], tuple[frozenset[Picked], ...]] = field(default_factory=dict)
    held: Mapping[tuple[str, ...], int] = field(default_factory=dict)
    banned: Mapping[tuple[int, Shares], str] = field(default_factory=dict)

    @property
    def by_index(self) -> dict[int, AxisGroup]:
        """The groups by their indices."""
        return {group.index: group for group in self.groups}


def make_task(
    profile: Profile,
    cluster: Cluster,
    found: AxisGroups,
    objective: str = "latency",
    even: bool = False,
    tracer: Tracer | None = None,
) -> Task:
    """Work out what all sets of devices share. `tracer`: of the profile's graph, if there is one already."""
    blocks = {region.paths for region in found.regions}
    fallback = frozenset(group.index for group in found.groups if blocks and group.blocks not in blocks)
    state = profile.gradient_bytes + profile.optimizer_bytes
    factor = 1 + state / max(profile.parameter_bytes, 1)
    cut = {name for group in found.groups for name in full_names(group)}
    return Task(
        profile=profile,
        cluster=cluster,
        groups=found.groups,
        savings=savings_of(profile, found.groups, fallback, tracer),
        objective=objective,
        even=even,
        conflicts=_conflicts(found.groups),
        fallback=fallback,
        whole_seconds=seconds_alone(profile, cluster),
        whole_bytes=profile.peak_bytes,
        bytes_per_parameter_byte=factor,
        cuttable_bytes=ceil(factor * sum(tensor.nbytes for tensor in profile.graph.tensors if tensor.name in cut)),
        wanted=objective,
    )


def assumed_cuts(task: Task, options: Sequence[Option]) -> tuple[Cut, ...]:
    """The cuts of some options as they would be if all were proved."""
    groups = task.by_index
    return tuple(as_cut(groups[option.index], option.shares) for option in options)


def names_of(devices: Sequence[Device]) -> tuple[str, ...]:
    """The names of some devices, by which a task knows what has turned out about them."""
    return tuple(device.name for device in devices)


def held_bytes(task: Task, devices: tuple[Device, ...]) -> int:
    """Bytes that each of these devices holds if no parameter is cut: unless it is known, all else is shared."""
    known = task.held.get(names_of(devices))
    profile = task.profile
    parameters = profile.parameter_bytes + profile.gradient_bytes + profile.optimizer_bytes
    shared = max(profile.activation_peak_bytes, profile.peak_bytes - parameters) * (1 - 1 / len(devices))
    return task.whole_bytes - int(shared) if known is None else known


def options_on(
    task: Task, devices: tuple[Device, ...], *, most: Sequence[float] | None = None, by_memory: bool = False
) -> list[Option]:
    """Price every group that these devices can share. `most`: the part of a group that each may get at most."""
    if len(devices) < 2:
        return []
    names, speeds = names_of(devices), [device.speed for device in devices]
    options = []
    for group, saving, conflicts in zip(task.groups, task.savings, task.conflicts, strict=True):
        if by_memory:
            pace = [1 / max(device.budget_bytes, 1) for device in devices]
        else:
            parts = [0.5] * len(devices)  # what goes with the share alone
            pace = list(_saved_seconds(task, saving, devices, speeds, parts))
        shares = _shares(task, group, pace, most)
        if shares is None:
            continue
        blocks, nbytes = len(group.blocks), cut_bytes(task, group)
        parts = [share / group.size for share in shares]
        options.append(
            Option(
                index=group.index,
                shares=shares,
                saved_seconds=tuple(blocks * own for own in _saved_seconds(task, saving, devices, speeds, parts)),
                saved_bytes=tuple(int(nbytes * (1 - part)) for part in parts),
                collective_seconds=blocks * saving.collective_seconds(task.cluster, names),
                places=len(group.actions),
                conflicts=conflicts,
            )
        )
    return options


def _saved_seconds(
    task: Task, saving: Saving, devices: Sequence[Device], speeds: Sequence[object], parts: Sequence[float]
) -> Iterator[float]:
    """Per rank; devices that are as fast (`speeds`) and have as much are asked for once."""
    known: dict[object, float] = {}
    for device, speed, part in zip(devices, speeds, parts, strict=True):
        key = speed, part
        if key not in known:
            known[key] = saving.seconds(task.profile, device, part)
        yield known[key]


def _shares(task: Task, group: AxisGroup, seconds: Sequence[float], most: Sequence[float] | None) -> Shares | None:
    """The best shares of a group that are not banned; None if there are none."""
    count = len(seconds)
    candidates: list[Shares | None] = [(group.size // count,) * count] if group.size % count == 0 else []
    if not task.even:
        limits = None if most is None else [int(part * group.size) for part in most]
        candidates.insert(0, divide(group.size, seconds, limits))
    return next((shares for shares in candidates if shares and (group.index, shares) not in task.banned), None)


def allows(group: AxisGroup, degree: int, even: bool) -> bool:
    """Whether a group has slices enough for so many ranks."""
    return group.size % degree == 0 if even else group.size >= degree


def cut_bytes(task: Task, group: AxisGroup) -> int:
    """Bytes of a group in all blocks, with gradients and optimizer state."""
    return int(len(group.blocks) * group.nbytes * task.bytes_per_parameter_byte)


def _conflicts(groups: Sequence[AxisGroup]) -> tuple[frozenset[int], ...]:
    """The groups' own conflicts, and those with groups of other analyses that cut the same parameter."""
    cutters: dict[str, list[int]] = {}
    for group in groups:
        for name in full_names(group):
            cutters.setdefault(name, []).append(group.index)
    return tuple(
        frozenset({*group.conflicts, *(other for name in full_names(group) for other in cutters[name])} - {group.index})
        for group in groups
    )


def full_names(group: AxisGroup) -> list[str]:
    """The parameters and buffers that a group cuts, in all its blocks."""
    return [join(block, shard.name) for block in group.blocks for shard in group.shards]


def seconds_alone(profile: Profile, cluster: Cluster) -> dict[str, float]:
    """Seconds of a pass of the whole model on each device."""
    trained = sum(nbytes for _, nbytes in trained_sizes(profile.graph)) if profile.workload.training else 0
    of_kind = {
        speed: float(op_seconds(profile, device).sum()) + optimizer_seconds(trained, profile.workload, device)
        for speed, device in {device.speed: device for device in cluster.devices}.items()
    }
    return {device.name: of_kind[device.speed] for device in cluster.devices}

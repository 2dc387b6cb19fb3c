"""What column_parallel decides on: the task, a choice with its cost, and the price of every group on some devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.cluster.cluster import Cluster, Device
from autoshard.collective_cost import all_gather_seconds, all_reduce_seconds
from autoshard.cost import op_seconds, optimizer_seconds
from autoshard.module_paths import join
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.strategies.cut_choice import Option
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
        conflicts: per group, the indices of those that can't be cut as well.
        fallback: indices of groups of single modules, with a gather behind each: for what no group of a block cuts.
        objective: what is minimised; `wanted` is what was asked for.
        whole_seconds, whole_bytes: a pass of the model on each device alone, and its peak there.
        shrinking: how far activations are taken to shrink when the model is cut: 0 not at all, 1 as what is cut.
        bytes_per_parameter_byte: with gradients and optimizer state.
        cuttable_bytes: of all parameters that any group cuts, with these.
        banned: (group, shares) -> why not.
    """

    profile: Profile
    cluster: Cluster
    groups: tuple[AxisGroup, ...]
    objective: str
    even: bool
    conflicts: tuple[frozenset[int], ...]
    fallback: frozenset[int]
    whole_seconds: Mapping[str, float]
    whole_bytes: int
    bytes_per_parameter_byte: float
    cuttable_bytes: int
    wanted: str = "latency"
    shrinking: float = 0.0
    banned: Mapping[tuple[int, Shares], str] = field(default_factory=dict)


def make_task(
    profile: Profile, cluster: Cluster, found: AxisGroups, objective: str = "latency", even: bool = False
) -> Task:
    """Work out what all sets of devices share."""
    blocks = {region.paths for region in found.regions}
    of_kind = {device.speed: device for device in cluster.devices}
    seconds = {kind: _whole_seconds(profile, device) for kind, device in of_kind.items()}
    state = profile.gradient_bytes + profile.optimizer_bytes
    factor = 1 + state / max(profile.parameter_bytes, 1)
    cut = {name for group in found.groups for name in full_names(group)}
    return Task(
        profile=profile,
        cluster=cluster,
        groups=found.groups,
        objective=objective,
        even=even,
        conflicts=_conflicts(found.groups),
        fallback=frozenset(group.index for group in found.groups if blocks and group.blocks not in blocks),
        whole_seconds={device.name: seconds[device.speed] for device in cluster.devices},
        whole_bytes=profile.peak_bytes,
        bytes_per_parameter_byte=factor,
        cuttable_bytes=ceil(factor * sum(tensor.nbytes for tensor in profile.graph.tensors if tensor.name in cut)),
        wanted=objective,
    )


def held_bytes(task: Task, count: int) -> int:
    """Bytes that each of so many devices holds if no parameter is cut."""
    activations = task.profile.activation_peak_bytes
    return task.whole_bytes - int(task.shrinking * activations * (1 - 1 / count))


def options_on(
    task: Task, devices: tuple[Device, ...], *, most: Sequence[float] | None = None, by_memory: bool = False
) -> list[Option]:
    """Price every group that these devices can share. `most`: the part of a group that each may get at most."""
    count = len(devices)
    if count < 2:
        return []
    names = [device.name for device in devices]
    kinds = {device.speed: device for device in devices}
    options = []
    for group, conflicts in zip(task.groups, task.conflicts, strict=True):
        of_kind = {kind: group_seconds(task.profile, group, device) for kind, device in kinds.items()}
        seconds = [of_kind[device.speed] for device in devices]
        pace = [1 / max(device.budget_bytes, 1) for device in devices] if by_memory else seconds
        shares = _shares(task, group, pace, most)
        if shares is None:
            continue
        cut = cut_bytes(task, group)
        parts = [share / group.size for share in shares]
        options.append(
            Option(
                index=group.index,
                shares=shares,
                whole_seconds=tuple(seconds),
                share_seconds=max(part * own for part, own in zip(parts, seconds, strict=True)),
                collective_seconds=collective_seconds(task, group, names),
                saved_bytes=tuple(int(cut * (1 - part)) for part in parts),
                places=len(group.actions),
                conflicts=conflicts,
            )
        )
    return options


def _shares(task: Task, group: AxisGroup, seconds: Sequence[float], most: Sequence[float] | None) -> Shares | None:
    """The best shares of a group that are not banned; None if there are none."""
    count = len(seconds)
    candidates: list[Shares | None] = [(group.size // count,) * count] if group.size % count == 0 else []
    if not task.even:
        limits = None if most is None else [int(part * group.size) for part in most]
        candidates.insert(0, divide(group.size, seconds, limits))
    return next((shares for shares in candidates if shares and (group.index, shares) not in task.banned), None)


def group_seconds(profile: Profile, group: AxisGroup, device: Device) -> float:
    """Seconds that sharing takes off one device: the roofline over the FLOPs and the parameters of all its blocks.

    Backward computes twice as much, and reads and writes as much again for gradients.
    """
    passes = 3 if profile.workload.training else 1
    flops, nbytes = passes * group.flops, passes * group.read_bytes
    forward = max(flops / device.flops(profile.dtype), nbytes / device.bytes_per_second)
    return len(group.blocks) * (forward + optimizer_seconds(group.nbytes, profile.workload, device))


def collective_seconds(task: Task, group: AxisGroup, names: Sequence[str]) -> float:
    """Seconds of all-reduces and gathers of one pass; backward has one for each of forward."""
    passes = 2 if task.profile.workload.training else 1
    reduces, added = group.reductions, sum(action.gathered for action in group.actions)
    gathers = group.gathers - added
    reduce = all_reduce_seconds(task.cluster, names, group.reduced_bytes / max(reduces, 1))
    gather = all_gather_seconds(task.cluster, names, group.gathered_bytes / max(gathers, 1))
    add = all_gather_seconds(task.cluster, names, group.added_bytes * len(names) / max(added, 1))
    return passes * len(group.blocks) * (reduces * reduce + gathers * gather + added * add)


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


def _whole_seconds(profile: Profile, device: Device) -> float:
    """Seconds of a pass of the whole model on one device."""
    trained = sum(nbytes for _, nbytes in trained_sizes(profile.graph)) if profile.workload.training else 0
    return float(op_seconds(profile, device).sum()) + optimizer_seconds(trained, profile.workload, device)

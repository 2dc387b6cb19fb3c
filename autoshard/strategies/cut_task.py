"""What column_parallel decides on: the task, and what is cut over some devices with what the engine says of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoshard.axes.groups import AxisGroup
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.module_paths import join
from autoshard.engine.estimate import Estimate
from autoshard.engine.pricer import Pricer
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut, even_shares
from autoshard.profile.profile import Profile

NEARLY = 0.98
"""Part of the bytes that can be cut at most: sets of groups that cut so much count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Devices, in rank order, the groups that are cut over them, and what the engine says of it."""

    devices: tuple[Device, ...]
    groups: tuple[AxisGroup, ...]
    estimate: Estimate

    @property
    def seconds(self) -> float:
        """Of a pass, or of a whole answer."""
        return self.estimate.latency_seconds

    @property
    def peaks(self) -> tuple[int, ...]:
        """Per rank, bytes of tensors at the peak."""
        by_name = {row.name: row for row in self.estimate.devices}
        return tuple(by_name[one.name].peak_bytes - by_name[one.name].overhead_bytes for one in self.devices)

    @property
    def lacking_bytes(self) -> int:
        """What the device lacks that lacks most; less than 0 where all have room."""
        return max(peak - one.budget_bytes for peak, one in zip(self.peaks, self.devices, strict=True))

    def value(self, objective: str) -> float:
        """What is minimised: seconds, or for "memory" the part of the fullest device's memory in use."""
        if objective != "memory":
            return self.seconds
        return max(peak / max(one.budget_bytes, 1) for peak, one in zip(self.peaks, self.devices, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTask:
    """What is asked, with what does not depend on the devices worked out.

    Attributes:
        conflicts: index of a group -> those that can't be cut as well.
        even: every rank must keep as much (one process for all devices).
        fallback: indices of groups of single modules, with a gather behind each: for what no group of a block cuts.
        objective: what was asked for.
        banned: (index of a group, degree) -> why it is not cut.
    """

    profile: Profile
    cluster: Cluster
    groups: tuple[AxisGroup, ...]
    conflicts: dict[int, frozenset[int]]
    objective: str
    even: bool
    fallback: frozenset[int]
    price: Pricer
    banned: dict[tuple[int, int], str] = field(default_factory=dict)

    def most(self, degree: int) -> tuple[AxisGroup, ...]:
        """Groups that can be cut together: of sets that save nearly as much as any, the one that sends least.

        Those that are looked at begin with the groups that save most, and with those that save most for what they send.
        """
        able = [one for one in self.groups if allows(one, degree, self.even) and (one.index, degree) not in self.banned]
        orders = (lambda one: -one.nbytes), (lambda one: -one.nbytes / (1 + one.sent_bytes))
        sets = [self._together(sorted(able, key=order)) for order in orders]
        least = NEARLY * max(map(_cut_bytes, sets))
        return min((some for some in sets if _cut_bytes(some) >= least), key=_sent_bytes)

    def _together(self, groups: Sequence[AxisGroup]) -> tuple[AxisGroup, ...]:
        """The first of some groups, and those that go with them; of single modules only what is left."""
        found: list[AxisGroup] = []
        for group in sorted(groups, key=lambda one: one.index in self.fallback):
            if not any(other.index in self.conflicts[group.index] for other in found):
                found.append(group)
        return tuple(found)

    def priced(self, devices: tuple[Device, ...], groups: Sequence[AxisGroup]) -> Choice:
        """These groups cut over these devices, unchecked."""
        cuts = tuple(group.as_cut(even_shares(group.size, len(devices))) for group in groups)
        return Choice(devices=devices, groups=tuple(groups), estimate=self.price(self.draft(devices, cuts)))

    def with_cuts(self, choice: Choice, cuts: tuple[Cut, ...]) -> Choice:
        """The choice priced with the cuts that were checked."""
        return replace(choice, estimate=self.price(self.draft(choice.devices, cuts)))

    def draft(self, devices: tuple[Device, ...], cuts: tuple[Cut, ...]) -> Plan:
        """The decisions as a plan."""
        return Plan(
            strategy="column-parallel", objective=self.objective, workload=self.profile.workload,
            devices=tuple(map(plan_device, devices)), placements={"": devices[0].name},
            fingerprint=self.profile.graph.fingerprint, cuts=cuts,
        )  # fmt: skip


def _sent_bytes(groups: Sequence[AxisGroup]) -> int:
    return sum(group.sent_bytes * len(group.blocks) for group in groups)


def _cut_bytes(groups: Sequence[AxisGroup]) -> int:
    return sum(group.nbytes * len(group.blocks) for group in groups)


def allows(group: AxisGroup, degree: int, even: bool) -> bool:
    """Whether a group has slices enough for so many ranks."""
    return group.size % degree == 0 if even else group.size >= degree


def full_names(group: AxisGroup) -> list[str]:
    """The parameters and buffers that a group cuts, in all its blocks."""
    return [join(block, shard.name) for block in group.blocks for shard in group.shards]

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
        """Groups to cut together: those first that save most for what they send; of single modules what is left."""
        able = [one for one in self.groups if allows(one, degree, self.even) and (one.index, degree) not in self.banned]
        found: list[AxisGroup] = []
        for group in sorted(able, key=lambda one: (one.index in self.fallback, -one.nbytes / (1 + one.sent_bytes))):
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


def allows(group: AxisGroup, degree: int, even: bool) -> bool:
    """Whether a group has slices enough for so many ranks."""
    return group.size % degree == 0 if even else group.size >= degree


def full_names(group: AxisGroup) -> list[str]:
    """The parameters and buffers that a group cuts, in all its blocks."""
    return [join(block, shard.name) for block in group.blocks for shard in group.shards]

"""What column_parallel decides on: the task, and a choice with its cost."""

from dataclasses import dataclass, field

from autoshard.axes.groups import AxisGroup
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.common.module_paths import join
from autoshard.engine.estimate import Estimate
from autoshard.engine.pricer import Pricer
from autoshard.engine.timing import op_seconds
from autoshard.profile.profile import Profile
from autoshard.strategies.cut_choice import Option
from autoshard.strategies.cut_savings import Saving


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Devices, in rank order, what is cut over them, and what the engine says of it.

    `seconds` of a pass, as chosen; by the engine where there are `figures`.
    """

    devices: tuple[Device, ...]
    picked: tuple[Option, ...]
    seconds: float
    figures: Estimate | None = None

    @property
    def collective_seconds(self) -> float:
        """Of a pass, for all-reduces and gathers."""
        if self.figures is not None:
            return self.figures.collective_seconds
        return sum(option.collective_seconds for option in self.picked)

    @property
    def peaks(self) -> tuple[int, ...]:
        """Per rank, bytes of tensors at the peak."""
        assert self.figures is not None
        by_name = {row.name: row for row in self.figures.devices}
        return tuple(by_name[one.name].peak_bytes - by_name[one.name].overhead_bytes for one in self.devices)

    def value(self, objective: str) -> float:
        """What is minimised: seconds, or for "memory" the part of the fullest device's memory in use."""
        if objective != "memory":
            return self.seconds
        return max(peak / max(one.budget_bytes, 1) for peak, one in zip(self.peaks, self.devices, strict=True))


@dataclass(slots=True, kw_only=True)
class CutTask:
    """What is asked, with what does not depend on the devices worked out.

    Attributes:
        even: every rank must keep as much (one process for all devices).
        fallback: indices of groups of single modules, with a gather behind each: for what no group of a block cuts.
        objective: what is minimised; wanted: what was asked for.
        state: bytes for every byte of a parameter, with gradients and optimizer state.
        banned: (group, shares) -> why not.
    """

    profile: Profile
    cluster: Cluster
    groups: tuple[AxisGroup, ...]
    savings: tuple[Saving, ...]
    conflicts: tuple[frozenset[int], ...]
    objective: str
    wanted: str
    even: bool
    fallback: frozenset[int]
    price: Pricer
    state: float
    banned: dict[tuple[int, tuple[int, ...]], str] = field(default_factory=dict)

    def seconds_alone(self, device: Device) -> float:
        """Seconds of the ops of the model on one device."""
        return float(op_seconds(self.profile, device).sum())


def allows(group: AxisGroup, degree: int, even: bool) -> bool:
    """Whether a group has slices enough for so many ranks."""
    return group.size % degree == 0 if even else group.size >= degree


def full_names(group: AxisGroup) -> list[str]:
    """The parameters and buffers that a group cuts, in all its blocks."""
    return [join(block, shard.name) for block in group.blocks for shard in group.shards]

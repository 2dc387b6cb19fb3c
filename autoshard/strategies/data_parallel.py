"""data-parallel: a replica of the model on every device, each with its part of the batch.

    cuda:0  (fast)   rows 0 1 2 3 4        a share is what a device can do until a common time, as far as its memory
    cuda:1  (slow)   rows 5 6 7            goes; devices that would make a pass longer are left out

Devices are tried from those on that would do most of the batch in a time: less work on more devices is compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate
from autoshard.engine.replicas import ReplicaPass, ReplicaPricer, RowSizes
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import even_shares
from autoshard.profile.profile import Profile
from autoshard.strategies.shares import divide

_MOVES = 32
"""Rows that go from one device to another, one after the other, from shares by speed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSet:
    """Replicas on some devices, with their rows and a pass of them."""

    devices: tuple[Device, ...]
    rows: tuple[int, ...]
    run: ReplicaPass

    @property
    def lacking(self) -> DeviceEstimate:
        """The device that lacks most."""
        return min(self.run.replicas, key=lambda one: one.free_bytes)

    @property
    def fits(self) -> bool:
        """Whether every replica fits."""
        return self.lacking.free_bytes >= 0


def data_parallel(profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput") -> Plan:
    """Plan replicas in one process and their shares of the batch. Raises `PlanError` if the model does not fit."""
    devices = [device for device in cluster.devices if device.name != "disk"]
    task = ReplicaTask(profile, cluster, batch, objective)
    able = [device for device in devices if task.holds_replica(device)] or devices
    tried = [task.candidate(used) for used in task.sets(able)]
    fitting = [one for one in tried if one.fits]
    if not fitting:
        raise PlanError(_refusal(tried))

    def value(one: ReplicaSet) -> tuple[float, float, int]:
        first = max(map(fullness, one.run.replicas)) if objective == "memory" else one.run.seconds
        return first, one.run.seconds, len(one.devices)

    # Who asks for replicas by name gets some where they fit; `auto` knows of one device by itself.
    best = min([one for one in fitting if len(one.devices) > 1] or fitting, key=value)
    even = best.rows == even_shares(batch.size, len(best.rows))
    return Plan(
        strategy="data-parallel",
        objective=objective,
        workload=profile.workload,
        devices=tuple(plan_device(d) for d in best.devices),
        placements={"": best.devices[0].name},
        mesh=Mesh(dp=len(best.devices), shares=() if even else best.rows),
        batch=batch,
        reasons=_reasons(task, best, tried, devices, objective),
        fingerprint=profile.graph.fingerprint,
    )


class ReplicaTask:
    """What candidates are priced with: the run by rows."""

    def __init__(self, profile: Profile, cluster: Cluster, batch: BatchAxis, objective: str = "latency") -> None:
        self.profile, self.cluster, self.batch, self.objective = profile, cluster, batch, objective
        self.rows = RowSizes(profile, batch)
        self.priced: dict[int, ReplicaPricer] = {}

    def sets(self, able: Sequence[Device]) -> list[Sequence[Device]]:
        """Devices to try, of every number: first those that would do most of the batch in a time."""
        most = min(len(able), self.batch.size)
        first = sorted(able, key=self._pace)
        return [[device for device in able if device in first[:count]] for count in range(1, most + 1)]

    def holds_replica(self, device: Device) -> bool:
        """Whether a device has room for the model with one row of the batch."""
        return self.figures(2).of(device, 1).free_bytes >= 0

    def figures(self, count: int) -> ReplicaPricer:
        """What prices `count` replicas; what was computed for one count serves the others."""
        key = min(count, 2)
        if key not in self.priced:
            self.priced[key] = ReplicaPricer(self.rows, count=count)
        return self.priced[key]

    def candidate(self, devices: Sequence[Device]) -> ReplicaSet:
        """Divide the batch over these devices, as fast as their memory allows."""
        figures = self.figures(len(devices))
        rows = self._shares(figures, devices) or even_shares(self.batch.size, len(devices))
        return ReplicaSet(devices=tuple(devices), rows=rows, run=figures.run(self.cluster, devices, rows))

    def _shares(self, figures: ReplicaPricer, devices: Sequence[Device]) -> tuple[int, ...] | None:
        """Rows of each: the slowest is done as early as can be, or the fullest is as empty; None if none fit."""
        most = [max(self._most_rows(figures, device, first=not i), 1) for i, device in enumerate(devices)]
        full = self.objective == "memory"
        pace = [1 / limit if full else self.rows.seconds(device, self.batch.size)
                for device, limit in zip(devices, most, strict=True)]  # fmt: skip
        best = divide(self.batch.size, pace, most)
        if best is None:
            return None

        def cost(rows: tuple[int, ...]) -> float:
            run = figures.run(self.cluster, devices, rows)
            return max(map(fullness, run.replicas)) if full else run.seconds

        for _ in range(_MOVES):
            moved = [
                tuple(own + (at == to) - (at == away) for at, own in enumerate(best))
                for away, to in permutations(range(len(best)), 2)
                if best[away] > 1 and best[to] < most[to]
            ]
            least = min(moved, key=cost, default=best)
            if cost(least) >= cost(best) * (1 - 1e-9):
                break
            best = least
        return best

    def _pace(self, device: Device) -> float:
        """Seconds of the whole batch on a device, as if it could do it as often as its memory asks for."""
        return self.rows.seconds(device, self.batch.size) / max(self._most_rows(self.figures(2), device), 1)

    def _most_rows(self, figures: ReplicaPricer, device: Device, *, first: bool = False) -> int:
        """The most rows with which a replica fits on a device; bytes grow with rows."""
        low, high = 0, self.batch.size
        while low < high:
            middle = (low + high + 1) // 2
            fits = figures.of(device, middle, first=first).free_bytes >= 0
            low, high = (middle, high) if fits else (low, middle - 1)
        return low


def fullness(one: DeviceEstimate) -> float:
    """The part of its memory that a device uses."""
    return one.peak_bytes / max(one.memory_bytes, 1)


def _reasons(
    task: ReplicaTask, best: ReplicaSet, tried: Sequence[ReplicaSet], devices: Sequence[Device], objective: str
) -> tuple[str, ...]:
    count, size = len(best.devices), task.batch.size
    names = ", ".join(device.name for device in best.devices)
    if count == 1:
        reasons = [f"one replica, on {names}: more don't fit" if len(devices) > 1 else
                   f"one replica, on {names}, the only device"]  # fmt: skip
    else:
        rows = ", ".join(map(str, best.rows)) if len(set(best.rows)) > 1 else f"{best.rows[0]} each"
        reasons = [f"{count} replicas, on {names}, with {rows} of the {size} rows of the batch"]
    alone = min((one for one in tried if len(one.devices) == 1), key=lambda one: one.run.seconds, default=None)
    if count > 1 and alone is not None:
        if not alone.fits:
            reasons.append(f"on {alone.devices[0].name} alone the whole batch does not fit")
        elif objective != "memory":
            faster = (
                ": one device would be faster, replicas were asked for" if alone.run.seconds < best.run.seconds else ""
            )
            reasons.append(
                f"{format_seconds(best.run.seconds)} a pass; {alone.devices[0].name} alone would take "
                f"{format_seconds(alone.run.seconds)}{faster}"
            )
    left = [device for device in devices if device not in best.devices]
    small = [device.name for device in left if not task.holds_replica(device)]
    if small:
        reasons.append(f"left out: {', '.join(small)}, where the model does not fit with one row")
    slow = [device.name for device in left if device.name not in small]
    if slow and count > 1:
        reasons.append(f"left out: {', '.join(slow)}, with which a pass takes no less")
    if best.run.sum_seconds:
        reasons.append(f"summing gradients takes {format_seconds(best.run.sum_seconds)}")
    if task.batch.proof and not task.batch.assumed:
        reasons.append(f"rows of the batch don't mix: {task.batch.proof}")
    return tuple(reasons)


def _refusal(tried: Sequence[ReplicaSet]) -> str:
    """Say which device lacks how much, and what divides more than the batch."""
    worst = max(tried, key=lambda one: one.lacking.free_bytes).lacking
    return (
        f"the model does not fit: a replica of it with its rows needs {format_bytes(worst.peak_bytes)} on "
        f"{worst.name}, {format_bytes(-worst.free_bytes)} more than there is. Processes of their own can keep a part "
        'of the parameters each (strategy="fsdp"), and strategy="auto" or "balanced" divide the model.'
    )

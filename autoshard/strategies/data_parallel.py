"""data-parallel: a replica of the model on every device, each with its part of the batch.

    cuda:0  (fast)   rows 0 1 2 3 4        rows go from one device to another as long as the pass gets shorter by it,
    cuda:1  (slow)   rows 5 6 7            or fits; devices that would make it longer are left out

The fastest devices are tried, and those with the most memory, of every number: less work on more devices is compared.
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

_WORTH = 1e-3
"""Part of a pass, or of memory, that other shares must save."""


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

    def value(self, objective: str) -> float:
        """Seconds of a pass, or for "memory" the part of its memory that the fullest device uses."""
        if objective != "memory":
            return self.run.seconds
        return max(one.peak_bytes / max(one.memory_bytes, 1) for one in self.run.replicas)


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
        return one.value(objective), one.run.seconds, len(one.devices)

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
        self.cluster, self.batch, self.objective = cluster, batch, objective
        self.rows = RowSizes(profile, batch)
        self.alone, self.several = ReplicaPricer(self.rows, count=1), ReplicaPricer(self.rows, count=2)

    def sets(self, able: Sequence[Device]) -> list[tuple[Device, ...]]:
        """Devices to try, of every number: the fastest, and those with the most memory."""
        most = min(len(able), self.batch.size)
        fast = sorted(able, key=lambda device: self.rows.seconds(device, self.batch.size))
        large = sorted(fast, key=lambda device: -device.budget_bytes)
        found = (tuple(device for device in able if device in order[:count])
                 for count in range(1, most + 1) for order in (fast, large))  # fmt: skip
        return list({tuple(device.name for device in some): some for some in found}.values())

    def holds_replica(self, device: Device) -> bool:
        """Whether a device has room for the model with one row of the batch."""
        return self.several.of(device, 1).free_bytes >= 0

    def candidate(self, devices: tuple[Device, ...]) -> ReplicaSet:
        """Divide the batch over these devices: evenly, then by moving rows, ever fewer, as long as that is better."""
        best = self._priced(devices, even_shares(self.batch.size, len(devices)))
        if best.fits and len({(device.speed, device.memory_bytes) for device in devices}) == 1:
            return best
        step = max(1, self.batch.size // (2 * len(devices)))
        while step:
            moved = (
                tuple(own + step * ((at == to) - (at == away)) for at, own in enumerate(best.rows))
                for away, to in permutations(range(len(devices)), 2) if best.rows[away] > step
            )  # fmt: skip
            least = min((self._priced(devices, rows) for rows in moved), key=self._cost, default=best)
            lack, value = self._cost(best)
            if self._cost(least) < (lack, value * (1 - _WORTH)):
                best = least
            else:
                step //= 2
        return best

    def _priced(self, devices: tuple[Device, ...], rows: tuple[int, ...]) -> ReplicaSet:
        pricer = self.several if len(devices) > 1 else self.alone
        return ReplicaSet(devices=devices, rows=rows, run=pricer.run(self.cluster, devices, rows))

    def _cost(self, one: ReplicaSet) -> tuple[float, float]:
        """What is lacking, then what is minimised."""
        return max(0, -one.lacking.free_bytes), one.value(self.objective)


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

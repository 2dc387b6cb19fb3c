"""data-parallel: a replica of the model on every device, each with its part of the batch.

    cuda:0  (fast)   rows 0 1 2 3 4        rows are divided as devices are fast, or have room, and moved from one
    cuda:1  (slow)   rows 5 6 7            to another as long as it is better; devices that make it longer are left out

The fastest devices are tried, and those with the most memory, of every number: less work on more devices is compared.
"""

from collections.abc import Sequence
from itertools import permutations

from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.replicas import ReplicaPass, Replicas
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import even_shares, proportional_shares
from autoshard.profile.profile import Profile

_WORTH = 1e-3
"""Part of a pass, or of memory, that other shares must save."""


def data_parallel(profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput") -> Plan:
    """Plan replicas in one process and their shares of the batch. Raises `PlanError` if the model does not fit."""
    devices = [device for device in cluster.devices if device.name != "disk"]
    replicas = Replicas(profile, batch)
    able = [device for device in devices if _holds_replica(replicas, device)] or devices
    tried = [_divided(replicas, cluster, used, objective) for used in _device_sets(replicas, able)]
    fitting = [one for one in tried if one.lacking.free_bytes >= 0]
    if not fitting:
        raise PlanError(_refusal(tried))

    def value(one: ReplicaPass) -> tuple[float, float, int]:
        return one.value(objective), one.seconds, len(one.replicas)

    # Who asks for replicas by name gets some where they fit; `auto` knows of one device by itself.
    best = min([one for one in fitting if len(one.replicas) > 1] or fitting, key=value)
    even = best.rows == even_shares(batch.size, len(best.rows))
    return Plan(
        strategy="data-parallel",
        objective=objective,
        workload=profile.workload,
        devices=tuple(plan_device(cluster.device(one.name)) for one in best.replicas),
        placements={"": best.replicas[0].name},
        mesh=Mesh(dp=len(best.replicas), shares=() if even else best.rows),
        batch=batch,
        reasons=_reasons(replicas, best, tried, devices, objective),
        fingerprint=profile.graph.fingerprint,
    )


def _holds_replica(replicas: Replicas, device: Device) -> bool:
    """Whether a device has room for a copy of the model with one row of the batch."""
    return replicas.of(device, 1, first=False).free_bytes >= 0


def _device_sets(replicas: Replicas, able: Sequence[Device]) -> list[tuple[Device, ...]]:
    """Devices to try, of every number: the fastest, and those with the most memory."""
    size = replicas.batch.size
    fast = sorted(able, key=lambda device: replicas.seconds(device, size))
    large = sorted(fast, key=lambda device: -device.budget_bytes)
    found = (tuple(device for device in able if device in order[:count])
             for count in range(1, min(len(able), size) + 1) for order in (fast, large))  # fmt: skip
    return list({tuple(device.name for device in some): some for some in found}.values())


def _divided(replicas: Replicas, cluster: Cluster, devices: tuple[Device, ...], objective: str) -> ReplicaPass:
    """Divide the batch over these devices: evenly, as they are fast or have room; then move rows, ever fewer."""

    def cost(one: ReplicaPass) -> tuple[float, float]:
        """What is lacking, then what is minimised."""
        return max(0, -one.lacking.free_bytes), one.value(objective)

    size = replicas.batch.size
    fast = [1 / max(replicas.seconds(device, size), 1e-30) for device in devices]
    free = [max(replicas.of(device, 1, first=not at).free_bytes, 1) for at, device in enumerate(devices)]
    shares = [even_shares(size, len(devices))]
    for parts in (fast, free):
        shares.append(proportional_shares(size, [max(1, round(1e6 * part / sum(parts))) for part in parts]))
    best = min((replicas.run(cluster, devices, rows) for rows in dict.fromkeys(shares)), key=cost)
    equal = len({(device.speed, device.memory_bytes) for device in devices}) == 1
    step = 0 if equal and best.lacking.free_bytes >= 0 else max(1, size // (2 * len(devices)))
    while step:
        moved = (
            tuple(own + step * ((at == to) - (at == away)) for at, own in enumerate(best.rows))
            for away, to in permutations(range(len(devices)), 2) if best.rows[away] > step
        )  # fmt: skip
        least = min((replicas.run(cluster, devices, rows) for rows in moved), key=cost, default=best)
        lack, value = cost(best)
        if cost(least) < (lack, value * (1 - _WORTH)):
            best = least
        else:
            step //= 2
    return best


def _reasons(
    replicas: Replicas, best: ReplicaPass, tried: Sequence[ReplicaPass], devices: Sequence[Device], objective: str
) -> tuple[str, ...]:
    count, size = len(best.replicas), replicas.batch.size
    names = ", ".join(one.name for one in best.replicas)
    if count == 1:
        reasons = [f"one replica, on {names}: more don't fit" if len(devices) > 1 else
                   f"one replica, on {names}, the only device of the process"]  # fmt: skip
    else:
        rows = ", ".join(map(str, best.rows)) if len(set(best.rows)) > 1 else f"{best.rows[0]} each"
        reasons = [f"{count} replicas, on {names}, with {rows} of the {size} rows of the batch"]
    alone = min((one for one in tried if len(one.replicas) == 1), key=lambda one: one.seconds, default=None)
    if count > 1 and alone is not None:
        if alone.lacking.free_bytes < 0:
            reasons.append(f"on {alone.replicas[0].name} alone the whole batch does not fit")
        elif objective != "memory":
            faster = ": one device would be faster, replicas were asked for" if alone.seconds < best.seconds else ""
            reasons.append(
                f"{format_seconds(best.seconds)} a pass; {alone.replicas[0].name} alone would take "
                f"{format_seconds(alone.seconds)}{faster}"
            )
    used = {one.name for one in best.replicas}
    left = [device for device in devices if device.name not in used]
    small = [device.name for device in left if not _holds_replica(replicas, device)]
    if small:
        reasons.append(f"left out: {', '.join(small)}, where the model does not fit with one row")
    slow = [device.name for device in left if device.name not in small]
    if slow and count > 1:
        reasons.append(f"left out: {', '.join(slow)}, with which a pass takes no less")
    if best.sum_seconds:
        reasons.append(f"summing gradients takes {format_seconds(best.sum_seconds)}")
    if replicas.batch.proof and not replicas.batch.assumed:
        reasons.append(f"rows of the batch don't mix: {replicas.batch.proof}")
    return tuple(reasons)


def _refusal(tried: Sequence[ReplicaPass]) -> str:
    """Say which device lacks how much, and what divides more than the batch."""
    worst = max(tried, key=lambda one: one.lacking.free_bytes).lacking
    return (
        f"the model does not fit: a replica of it with its rows needs {format_bytes(worst.peak_bytes)} on "
        f"{worst.name}, {format_bytes(-worst.free_bytes)} more than there is. In training processes can keep a part "
        'of the parameters each (strategy="fsdp"), and strategy="auto" or "balanced" divide the model.'
    )

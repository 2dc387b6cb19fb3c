"""What a plan that places modules costs: bytes and seconds per device, transfers, and a bound on all such plans.

* Seconds of ops and of the optimizer step: the roofline of `timing`, ops one after another.
* Seconds of a copy: the link's latency + bytes / its bandwidth (alpha-beta). Copies kept from pass to pass are free.
* Peak: the flow's buffers, replayed at the device's allocation granularity, with optimizer state beneath; in training
  also the moment of the optimizer step.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.common.module_paths import above, is_below
from autoshard.engine.estimate import DeviceEstimate, Estimate, Transfer
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.flow import HOST_NAME, Copy, Flow
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS
from autoshard.profile.answer import op_counts
from autoshard.profile.experts import routed_modules
from autoshard.profile.measure import optimizer_step_bytes, trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, tensor_units


def check_devices(needed: Iterable[str], cluster: Cluster, use: str) -> None:
    """Raise `PlanError` for devices that a plan needs and the cluster lacks; `use` says what for."""
    lacking = sorted(set(needed) - set(cluster.names))
    if lacking:
        raise PlanError(
            f"the plan {use} {', '.join(lacking)}, but the devices are {', '.join(cluster.names)}. "
            "Give these devices, or plan again for the ones there are."
        )


def estimate_placed(profile: Profile, cluster: Cluster, moves: Flow, objective: str) -> Estimate:
    """Price the run as it was recorded, with modules where `moves` has them; no bound is worked out."""
    compute = _compute_seconds(profile, cluster, moves)
    transfers = tuple(transfer_of(copy, cluster) for copy in moved_copies(moves, hosts=True))
    incoming = dict.fromkeys(cluster.names, 0.0)
    for transfer in transfers:
        if transfer.destination in incoming:
            incoming[transfer.destination] += transfer.seconds
    devices = tuple(
        replace(
            of_moments(device, moments(profile, moves, device) if device.name in moves.devices else [Counter[str]()]),
            compute_seconds=compute[device.name], transfer_seconds=incoming[device.name],
        )
        for device in cluster.devices
    )  # fmt: skip
    return Estimate(
        devices=devices,
        transfers=transfers,
        objective=objective,
        latency_seconds=sum(row.compute_seconds for row in devices) + sum(one.seconds for one in transfers),
        bottleneck_seconds=max(row.compute_seconds + row.transfer_seconds for row in devices),
        mixed_device=moves.mixed_device,
        written_back=moves.written_back,
        notes=profile.graph.notes,
    )


def moved_copies(moves: Flow, *, hosts: bool = False) -> list[Copy]:
    """The copies of every pass; `hosts`: those from and to the host too, which take no time."""
    every = (copy for copy in moves.copies if not copy.kept and moves.counts(copy))
    return [copy for copy in every if hosts or HOST_NAME not in (copy.source, copy.destination)]


def of_every_device(found: Mapping[str, DeviceEstimate], cluster: Cluster) -> tuple[DeviceEstimate, ...]:
    """Figures of all devices of a cluster in its order; those that have none in `found` are left alone by the plan."""
    return tuple(found.get(d.name) or DeviceEstimate(name=d.name, memory_bytes=d.memory_bytes) for d in cluster.devices)


def _compute_seconds(profile: Profile, cluster: Cluster, moves: Flow) -> dict[str, float]:
    """Seconds per device: its ops, and its share of the optimizer step. Ops on the host are free."""
    placed = np.array(moves.op_device, np.int64)
    trained = trained_sizes(profile.graph) if profile.workload.training else []
    seconds = {}
    for device in cluster.devices:
        total = 0.0
        if device.name in moves.devices:
            mine = placed == moves.devices.index(device.name)
            total = float(op_seconds(profile, device)[mine].sum()) + _routed_seconds(profile, device, moves, mine)
        own = sum(nbytes for name, nbytes in trained if moves.tensor_device[name] == device.name)
        seconds[device.name] = total + optimizer_seconds(own, profile.workload, device)
    return seconds


def _routed_seconds(profile: Profile, device: Device, moves: Flow, mine: np.ndarray) -> float:
    """Seconds to add to those of the ops on a device, where tokens go to some modules of many (experts in a list).

    A run calls the ones that its tokens were sent to; others go elsewhere. A device gets as much of that work as it has
    of the modules.
    """
    more = 0.0
    for routed in routed_modules(profile.graph):
        seconds = op_seconds(profile, device)[routed.ops]
        devices = (next((at for name, at in moves.tensor_device.items() if is_below(name, path)), "")
                   for path in routed.members)  # fmt: skip
        here = sum(at == device.name for at in devices)
        more += float(seconds.sum()) * here / len(routed.members) - float(seconds[mine[routed.ops]].sum())
    return more


def transfer_of(copy: Copy, cluster: Cluster) -> Transfer:
    between_devices = HOST_NAME not in (copy.source, copy.destination)
    return Transfer(
        source=copy.source,
        destination=copy.destination,
        nbytes=copy.nbytes,
        seconds=cluster.link(copy.source, copy.destination).seconds(copy.nbytes) if between_devices else 0.0,
        producer=copy.producer,
        consumer=copy.consumer,
        backward=copy.reason == "backward",
    )


def moments(profile: Profile, moves: Flow, device: Device) -> list[Counter[str]]:
    """Bytes by kind on a device when a pass takes most of it, and in training at the optimizer's step ("step")."""
    graph, workload = profile.graph, profile.workload
    found = [bytes_at(moves.peak(device.name, device.block_bytes)[1], device, graph, moves)]
    if workload.training:
        sizes = trained_sizes(graph)
        own = [_rounded(nbytes, device) for name, nbytes in sizes if moves.tensor_device[name] == device.name]
        found.append(bytes_at(moves.steps, device, graph, moves))
        found[1]["gradient"] = sum(own)
        mine = [nbytes if moves.tensor_device[name] == device.name else 0 for name, nbytes in sizes]
        # Accelerators get torch's multi-tensor step, which holds all denominators of a device at once.
        on_cpu = device.name.startswith("cpu")
        found[1]["step"] = optimizer_step_bytes(mine, workload.optimizer, fused_list=not on_cpu)
        for row in found:
            row["optimizer"] = sum(own) * OPTIMIZER_STATE_TENSORS[workload.optimizer]
    return found


def of_moments(device: Device, found: Sequence[Mapping[str, int]]) -> DeviceEstimate:
    """A device at the fullest of some moments, without seconds: the parts add up to the peak."""
    fullest = max(found, key=lambda parts: sum(parts.values()))
    used = sum(fullest.values())
    overhead = device.overhead_bytes if used else 0
    return DeviceEstimate(
        name=device.name, memory_bytes=device.memory_bytes,
        parameter_bytes=fullest.get("parameter", 0), buffer_bytes=fullest.get("buffer", 0),
        gradient_bytes=fullest.get("gradient", 0), optimizer_bytes=fullest.get("optimizer", 0),
        activation_bytes=fullest.get("activation", 0) + fullest.get("step", 0),
        cache_bytes=fullest.get("cache", 0), transfer_bytes=fullest.get("transfer", 0),
        overhead_bytes=overhead, peak_bytes=used + overhead,
    )  # fmt: skip


def _rounded(nbytes: int, device: Device) -> int:
    return -(-nbytes // device.block_bytes) * device.block_bytes


def bytes_at(time: float, device: Device, graph: ModelGraph, moves: Flow) -> Counter[str]:
    """Bytes live on a device at one op time, by what they are."""
    rows = moves.buffers
    live = (rows.device == moves.devices.index(device.name)) & (rows.born <= time) & (time <= rows.died - 1)
    state = {graph.values[value].storage for value in graph.state}
    gradients = {graph.values[value].storage for _, value in graph.gradients}
    parts = Counter[str]()
    for row in np.flatnonzero(live).tolist():
        storage = graph.storages[int(rows.storage[row])]
        if rows.copied[row]:
            kind = "transfer"
        elif storage.kind in ("parameter", "buffer"):
            kind = storage.kind
        elif storage.index in state:
            kind = "cache"
        elif storage.index in gradients:
            kind = "gradient"
        else:
            kind = "activation"
        parts[kind] += _rounded(int(rows.nbytes[row]), device)
    return parts


def lower_bound(profile: Profile, cluster: Cluster, *, divided: bool) -> float:
    """Return seconds of a pass that nothing on these devices goes below, whatever they have of memory.

    Every op runs on the device that is fastest for it, without copies; `divided`: ops are divided over devices, without
    launches, or passes overlap. For weights w of the devices that add up to 1 no device is done before

        sum over ops i of min over devices d of w[d] t[d, i]

    and with w ~ 1 / seconds of all ops that is the best there is where devices differ by a factor.
    """
    devices = [device for device in cluster.devices if device.name != "disk"]
    if divided:
        devices = [replace(device, launch_seconds=0.0) for device in devices]
    trained = sum(nbytes for _, nbytes in trained_sizes(profile.graph)) if profile.workload.training else 0
    known: dict[object, np.ndarray] = {}
    for device in devices:
        if device.speed not in known:
            step = optimizer_seconds(trained, profile.workload, device)
            counts = op_counts(profile) if profile.further is not None else 1.0
            known[device.speed] = np.append(op_seconds(profile, device) * counts, step)
    table = np.array([known[device.speed] for device in devices])
    if not divided:
        return float(table.min(axis=0).sum())
    weights = 1 / np.maximum(table.sum(axis=1, keepdims=True), 1e-30)
    return float((table * weights / weights.sum()).min(axis=0).sum())


def unit_seconds(profile: Profile, cluster: Cluster, units: Units) -> np.ndarray:
    """Return [devices, units] seconds of one pass or of a whole answer, the optimizer step included."""
    table = np.zeros((len(cluster.devices), len(units.paths)))
    trained = np.zeros(len(units.paths))
    if profile.workload.training:
        owner = tensor_units(profile.graph, units)
        for name, nbytes in trained_sizes(profile.graph):
            trained[owner[name]] += nbytes
    known: dict[object, np.ndarray] = {}
    for row, device in enumerate(cluster.devices):
        if device.speed not in known:
            of_op = op_seconds(profile, device) * op_counts(profile)
            per_op = np.bincount(units.op_unit, weights=of_op, minlength=len(units.paths))
            per_op = per_op + _routed_surplus(profile, units, of_op)  # without ops there are no floats to add to
            known[device.speed] = per_op + optimizer_seconds(1.0, profile.workload, device) * trained
        table[row] = known[device.speed]
    return table


def _routed_surplus(profile: Profile, units: Units, of_op: np.ndarray) -> np.ndarray:
    """[units] seconds to add so that modules of which tokens call some share that work by their bytes."""
    surplus, held = np.zeros(len(units.paths)), units.weight_bytes
    routed = routed_modules(profile.graph)
    if not routed:
        return surplus
    for one in routed:
        tops = set(one.members)
        mine = np.array([any(p in tops for path in paths for p in (path, *above(path))) for paths in units.paths])
        np.subtract.at(surplus, units.op_unit[one.ops], of_op[one.ops])
        surplus += float(of_op[one.ops].sum()) * np.where(mine, held, 0.0) / max(float(held[mine].sum()), 1.0)
    return surplus

"""What a plan costs that keeps some modules away from their device between calls: what is brought, when, and where.

An offloaded module is brought to its device for each of its calls, into one of two slots there. While one computes in
its slot the next one is brought into the other, across the end of a pass too:

    compute   | a |.| b |   c   |.. | a |            "." waits for a fetch: a stall
    slot 1    [ a ][  fetch c   ][ c ][ fetch b …
    slot 2    [fetch b][ b ][fetch a      ][ a ]

* Bytes of a device: the flow's buffers without the parameters of offloaded modules, and two slots, as large as its two
  largest offloaded modules. Bytes of "cpu" and "disk": the parameters kept there. What an accelerator reads from the
  disk goes through `STAGING_BYTES` of "cpu".
* Seconds of bringing a module: latency of the link for each of its parameters + bytes / bandwidth, once per call. Each
  device has one link; all fetches from the disk share it, first come, first served.
* Seconds of a pass: passes are played one after another (`programs`). Copies of activations between devices count as
  computing; that they share a link with what is brought does not.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.links import make_links
from autoshard.engine.estimate import DeviceEstimate, Estimate, Streaming, StreamLink
from autoshard.engine.placed import estimate_placed, lower_bound, moved_copies
from autoshard.engine.programs import PREFETCH, Task, play
from autoshard.engine.timing import op_seconds
from autoshard.errors import PlanError
from autoshard.flow import Flow
from autoshard.plan import Plan
from autoshard.plan.placement import covering_entry
from autoshard.profile.profile import Profile
from autoshard.profile.units import find_units

STORES = ("cpu", "disk")
SLOTS = PREFETCH
"""StreamedPass modules that are on a device at a time."""
STAGING_BYTES = 64 * 2**20
"""Pinned memory of the host through which an accelerator reads from the disk, two parts in turn."""
PASSES = 8
"""Passes that are played: what is true of the second half of them is taken to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadedPass:
    """A offloaded module: its device, where its parameters are between calls, their storages, and its calls as ops."""

    path: str
    device: str
    store: str
    storages: tuple[int, ...]
    calls: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """What is brought for one call: to which device, and whether from the disk."""

    device: str
    seconds: float
    on_disk: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Something that is computed or copied: it waits for a fetch, or is the last of a call and frees its slot."""

    seconds: float
    waits: int = -1
    frees: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Steady:
    """One pass in the long run: its seconds, and those in which each stream is busy."""

    seconds: float
    busy: Mapping[str, float]


def offloaded_program(pieces: Sequence[Piece], fetches: Sequence[Fetch], passes: int) -> tuple[list[Task], list[int]]:
    """The tasks of some passes, and the number of the last one of each; fetches are named by their numbers.

    The fetch for the call after next on a device begins when a call ends.
    """
    numbers: dict[str, list[int]] = {}
    for number, fetch in enumerate(fetches):
        numbers.setdefault(fetch.device, []).append(number)
    following = [0] * len(fetches)
    for own in numbers.values():
        for place, number in enumerate(own):
            following[number] = own[(place + SLOTS) % len(own)]
    ready: dict[str, deque[tuple[int, ...]]] = {device: deque([()] * SLOTS) for device in numbers}
    program: list[Task] = []
    ends: list[int] = []
    for _ in range(passes):
        last = len(program)
        for piece in pieces:
            after = ready[fetches[piece.waits].device].popleft() if piece.waits >= 0 else ()
            last = len(program)
            program.append(Task(name="", stream="compute", seconds=piece.seconds, after=after))
            if piece.frees >= 0:
                number = following[piece.frees]
                fetch = fetches[number]
                ready[fetch.device].append((len(program),))
                program.append(
                    Task(
                        name=str(number), stream=f"to {fetch.device}", seconds=fetch.seconds, after=(last,),
                        shared="disk" if fetch.on_disk else "",
                    )
                )  # fmt: skip
        ends.append(last)
    return program, ends


def steady_pass(pieces: Sequence[Piece], fetches: Sequence[Fetch]) -> Steady:
    """Play passes of these pieces, which end with one that frees no slot."""
    program, ends = offloaded_program(pieces, fetches, PASSES)
    played = play(program)
    half, busy = PASSES // 2, {name: seconds / PASSES for name, seconds in played.busy.items()}
    seconds = (played.ends[ends[-1]] - played.ends[ends[half - 1]]) / half
    return Steady(seconds=max(seconds, *busy.values()), busy=busy)  # what is there at first may hide some of it


def estimate_offloaded(plan: Plan, profile: Profile, cluster: Cluster, moves: Flow) -> Estimate:
    """Price the run as it was recorded, again and again; no bound is worked out.

    `moves`: the flow of the plan's placements. Raises `PlanError` if the plan streams a module that is not there.
    """
    graph = profile.graph
    modules = offloaded_modules(plan, graph)
    kept = without_storages(moves, (storage for module in modules for storage in module.storages))
    bare = estimate_placed(profile, cluster, kept, plan.objective)
    timed = [module for module in modules if module.store != module.device]
    steady = steady_pass(pass_pieces(profile, cluster, moves, timed), fetches_of(timed, graph, cluster))
    devices = tuple(_with_offloaded(device, modules, graph, cluster) for device in bare.devices)
    links = [seconds for stream, seconds in steady.busy.items() if stream != "compute"]
    return replace(
        bare,
        devices=devices,
        latency_seconds=steady.seconds,
        bottleneck_seconds=max([device.compute_seconds + device.transfer_seconds for device in devices] + links),
        streaming=Streaming(
            links=_links(timed, graph, cluster),
            compute_seconds=steady.busy["compute"],
            bound_seconds=max(steady.busy.values()),
            stall_seconds=max(0.0, steady.seconds - steady.busy["compute"]),
        ),
    )


def compute_devices(cluster: Cluster) -> tuple[str, ...]:
    """Devices that compute: all but the disk, and "cpu" only where it is not the store beside simulated devices.

    A simulated device (cpu:0) stands for an accelerator, and is as fast as the CPU by the table.
    """
    others = [name for name in cluster.names if name not in STORES]
    simulated = any(name.startswith("cpu:") for name in others)
    if "cpu" in cluster.names and not simulated:
        return tuple(name for name in cluster.names if name != "disk")
    return tuple(others)


def with_stores(cluster: Cluster, stores: Iterable[str]) -> Cluster:
    """Return the cluster with the stores it lacks, of any size: for what a plan takes on its other devices."""
    lacking = [name for name in dict.fromkeys(stores) if name not in cluster.names]
    devices = (*cluster.devices, *(Device(name=name, kind=name, memory_bytes=2**62) for name in lacking))
    return replace(cluster, devices=devices, links=make_links(devices)) if lacking else cluster


def fetch_seconds(storages: Sequence[int], graph: ModelGraph, cluster: Cluster, store: str, device: str) -> float:
    """Return the seconds of bringing some parameters from a store to a device, one copy each."""
    link = cluster.link(store, device)
    return sum(link.seconds(graph.storages[storage].nbytes) for storage in storages)


def without_storages(moves: Flow, storages: Iterable[int]) -> Flow:
    """Return the same flow without the memory of some storages; copies of them stay."""
    rows = moves.buffers
    keep = rows.copied | ~np.isin(rows.storage, np.fromiter(storages, np.int64, -1))
    columns = {name: getattr(rows, name)[keep] for name in ("storage", "device", "nbytes", "born", "died", "copied")}
    return replace(moves, buffers=replace(rows, **columns))


def pass_pieces(profile: Profile, cluster: Cluster, moves: Flow, modules: Sequence[OffloadedPass]) -> list[Piece]:
    """Return what is done between and in the calls of some modules, in order, and after the last."""
    seconds = np.zeros(moves.steps + 1)
    placed = np.array(moves.op_device, np.int64)
    for index, name in enumerate(moves.devices):
        if name in cluster.names:
            mine = placed == index
            seconds[:-1][mine] = op_seconds(profile, cluster.device(name))[mine]
    for copy in moved_copies(moves):
        seconds[int(copy.born)] += cluster.link(copy.source, copy.destination).seconds(copy.nbytes)
    total = np.concatenate([[0.0], np.cumsum(seconds)])
    pieces, at = [], 0
    for number, (begin, end, _) in enumerate(calls_in_order(modules, profile.graph)):
        pieces.append(Piece(seconds=float(total[begin] - total[at])))
        pieces.append(Piece(seconds=float(total[end] - total[begin]), waits=number, frees=number))
        at = end
    return [*pieces, Piece(seconds=float(total[-1] - total[at]))]


def fetches_of(modules: Sequence[OffloadedPass], graph: ModelGraph, cluster: Cluster) -> list[Fetch]:
    """Return what is brought for every call of some modules, in order."""
    each = [
        Fetch(
            device=module.device, on_disk=module.store == "disk",
            seconds=fetch_seconds(module.storages, graph, cluster, module.store, module.device),
        )
        for module in modules
    ]  # fmt: skip
    return [each[index] for _, _, index in calls_in_order(modules, graph)]


def calls_in_order(modules: Sequence[OffloadedPass], graph: ModelGraph) -> list[tuple[int, int, int]]:
    """(first op, op after the last, module) of every call of some modules."""
    every = ((begin, end, index) for index, module in enumerate(modules) for begin, end in module.calls)
    return sorted(call for call in every if call[0] not in graph.uncounted)


def offloaded_modules(plan: Plan, graph: ModelGraph) -> list[OffloadedPass]:
    """Return the offloaded modules of a plan with what the graph knows of them. Raises `PlanError` for unknown ones."""
    known = {module.path for module in graph.modules}
    unknown = [path for path in plan.offloaded if path not in known]
    if unknown:
        raise PlanError(f"the plan streams {', '.join(unknown[:3])}, but the model has no such module. Plan again.")
    device_of: dict[str, str] = {}
    storages: dict[str, dict[int, None]] = {path: {} for path in plan.offloaded}
    for tensor in graph.tensors:
        path = covering_entry(storages, tensor.module)
        if path is not None and tensor.kind == "parameter" and tensor.nbytes:
            storages[path][tensor.storage] = None
            entry = covering_entry(plan.placements, tensor.name)
            if entry is not None:
                device_of.setdefault(path, plan.placements[entry])
    calls: dict[str, list[tuple[int, int]]] = {path: [] for path in plan.offloaded}
    for call in graph.calls:
        if call.path in calls and call.begin not in graph.uncounted:
            calls[call.path].append((call.begin, call.end))
    return [
        OffloadedPass(
            path=path, device=device_of[path], store=store, storages=tuple(storages[path]),
            calls=tuple(sorted(calls[path])),
        )
        for path, store in plan.offloaded.items()
        if path in device_of
    ]  # fmt: skip


def live_bytes(storages: Sequence[int], graph: ModelGraph, block_bytes: int) -> int:
    """Return the bytes that storages take on a device that allocates in blocks."""
    return sum(-(-graph.storages[storage].nbytes // block_bytes) * block_bytes for storage in storages)


def _with_offloaded(
    device: DeviceEstimate, modules: Sequence[OffloadedPass], graph: ModelGraph, cluster: Cluster
) -> DeviceEstimate:
    """Add the slots of a device, which hold its two largest offloaded modules, and what is kept there for others."""
    block = cluster.device(device.name).block_bytes
    own = (live_bytes(module.storages, graph, block) for module in modules if module.device == device.name)
    slots = sum(sorted(own)[-SLOTS:])
    stored = sum(live_bytes(module.storages, graph, 1) for module in modules if module.store == device.name)
    if device.name == "cpu":
        stored += staging_bytes({module.device for module in modules if module.store == "disk"})
    peak = device.peak_bytes + slots + stored
    return replace(device, slot_bytes=slots, stored_bytes=stored, peak_bytes=peak)


def staging_bytes(devices: Iterable[str]) -> int:
    """Return the host memory through which these devices read from the disk; the CPU and simulated ones need none."""
    return sum(STAGING_BYTES for name in devices if not name.startswith("cpu"))


def _links(modules: Sequence[OffloadedPass], graph: ModelGraph, cluster: Cluster) -> tuple[StreamLink, ...]:
    """What comes over each link in one pass."""
    rows: dict[tuple[str, str], list[float]] = {}
    for module in modules:
        row = rows.setdefault((module.store, module.device), [0, 0, 0, 0.0])
        times, nbytes = len(module.calls), live_bytes(module.storages, graph, 1)
        seconds = fetch_seconds(module.storages, graph, cluster, module.store, module.device)
        for i, more in enumerate((1, times, times * nbytes, times * seconds)):
            row[i] += more
    return tuple(
        StreamLink(source=source, destination=device, modules=int(n), fetches=int(k), nbytes=int(b), seconds=s)
        for (source, device), (n, k, b, s) in rows.items()
    )


def streaming_bound(profile: Profile, cluster: Cluster, objective: str, computing: Sequence[str]) -> float:
    """Return seconds that no placement with any modules offloaded can go below on this cluster.

    All that computes, or what the devices have no room for over all of their links.
    """
    devices = tuple(cluster.device(name) for name in computing)
    bound = lower_bound(profile, replace(cluster, devices=devices), divided=objective == "throughput")
    units = find_units(profile)
    read = np.bincount(units.op_unit, minlength=len(units.paths)) > 0
    missing = float(units.weight_bytes[read].sum()) - sum(max(device.budget_bytes, 0) for device in devices)
    rate = sum(fetch_rate(cluster, name) for name in computing)
    return max(bound, missing / rate) if rate and missing > 0 else bound


def fetch_rate(cluster: Cluster, device: str) -> float:
    """Bytes per second from the fastest store to a device; 0 where there is none."""
    stores = [store for store in STORES if store in cluster.names and store != device]
    return max((cluster.link(store, device).bytes_per_second for store in stores), default=0.0)

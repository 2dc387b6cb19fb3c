"""data-parallel: a replica of the model on every device, each with its part of the batch.

    cuda:0  (fast)   rows 0 1 2 3 4        a share is what a device can do until a common time, as far as its memory
    cuda:1  (slow)   rows 5 6 7            goes; devices that would make a pass longer are left out

Devices are tried from those on that would do most of the batch in a time: less work on more devices is compared. Where
a replica does not fit, or memory is the objective, processes may keep a part of all parameters each (`sharded`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np

from autoshard.axes.regions import element_of, repeated_elements
from autoshard.capture.columns import columns_of
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.module_paths import is_below, parent
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate
from autoshard.engine.replicas import ReplicaBlock, ReplicaPass, ReplicaPricer, RowSizes, blocks_of
from autoshard.errors import PlanError
from autoshard.plan import Mesh, Plan, Stage
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
    sharded: bool
    run: ReplicaPass

    @property
    def lacking(self) -> DeviceEstimate:
        """The device that lacks most."""
        return min(self.run.replicas, key=lambda one: one.free_bytes)

    @property
    def fits(self) -> bool:
        """Whether every replica fits."""
        return self.lacking.free_bytes >= 0


def data_parallel(
    profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput", processes: int = 0
) -> Plan:
    """Plan replicas and their shares of the batch.

    `processes`: how many run, 0 if all devices are used from one; as many processes as devices all take part, since
    each has one. Raises `PlanError` if the model does not fit, or there are more processes than rows.
    """
    devices = [device for device in cluster.devices if device.name != "disk"]
    if processes > 1 and batch.size < processes:
        raise PlanError(
            f"a batch of {batch.size} rows can't be divided over {processes} processes. Give at least {processes} rows."
        )
    task = ReplicaTask(profile, cluster, batch, processes, objective)
    everyone = 1 < processes == len(devices)
    able = [device for device in devices if everyone or task.holds_replica(device)] or devices
    sets = [devices] if everyone else task.sets(able)
    tried = [task.candidate(used, sharded=False) for used in sets]
    if everyone and (objective == "memory" or not tried[0].fits):
        tried.append(task.candidate(devices, sharded=True))
    fitting = [one for one in tried if one.fits]
    if not fitting:
        raise PlanError(_refusal(task, tried, devices, processes))

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
        mesh=Mesh(
            dp=1 if best.sharded else len(best.devices),
            fsdp=len(best.devices) if best.sharded else 1,
            shares=() if even else best.rows,
        ),
        batch=batch,
        stages=tuple(Stage(paths=(block.path,)) for block in task.blocks[:-1]) if best.sharded else (),
        layers=() if best.sharded or not processes else tuple(block.path for block in task.blocks[:-1]),
        reasons=_reasons(task, best, tried, devices, objective),
        fingerprint=profile.graph.fingerprint,
    )


class ReplicaTask:
    """What candidates are priced with: the run by rows, and the blocks that would be gathered as one."""

    def __init__(
        self, profile: Profile, cluster: Cluster, batch: BatchAxis, processes: int, objective: str = "latency"
    ) -> None:
        self.profile, self.cluster, self.batch, self.objective = profile, cluster, batch, objective
        self.processes = processes > 0
        self.rows = RowSizes(profile, batch)
        self.blocks: tuple[ReplicaBlock, ...] = blocks_of(profile.graph, gathered_blocks(profile.graph))
        self.priced: dict[tuple[int, bool], ReplicaPricer] = {}

    def sets(self, able: Sequence[Device]) -> list[Sequence[Device]]:
        """Devices to try, of every number: first those that would do most of the batch in a time."""
        most = min(len(able), self.batch.size)
        first = sorted(able, key=self._pace)
        return [[device for device in able if device in first[:count]] for count in range(1, most + 1)]

    def holds_replica(self, device: Device) -> bool:
        """Whether a device has room for the model with one row of the batch."""
        return self.figures(2, False).of(device, 1).free_bytes >= 0

    def figures(self, count: int, sharded: bool) -> ReplicaPricer:
        """What prices `count` replicas; what was computed for one count serves the others."""
        key = (count if sharded else min(count, 2), sharded)
        if key not in self.priced:
            self.priced[key] = ReplicaPricer(
                self.rows, blocks=self.blocks if sharded else (), count=count, processes=self.processes or sharded
            )
        return self.priced[key]

    def candidate(self, devices: Sequence[Device], *, sharded: bool) -> ReplicaSet:
        """Divide the batch over these devices, as fast as their memory allows."""
        figures = self.figures(len(devices), sharded)
        size = self.batch.size
        if sharded:
            rows: tuple[int, ...] = even_shares(size, len(devices))  # every rank's gradients count alike there
        else:
            rows = self._shares(figures, devices) or even_shares(size, len(devices))
        run = figures.run(self.cluster, devices, rows)
        return ReplicaSet(devices=tuple(devices), rows=rows, sharded=sharded, run=run)

    def _shares(self, figures: ReplicaPricer, devices: Sequence[Device]) -> tuple[int, ...] | None:
        """Rows of each: the slowest is done as early as can be, or the fullest is as empty; None if none fit."""
        most = [max(self._most_rows(figures, device, first=not i), 1) for i, device in enumerate(devices)]
        full = self.objective == "memory"
        pace = [1 / limit if full else self.rows.seconds(device, self.batch.size)
                for device, limit in zip(devices, most, strict=True)]  # fmt: skip
        best = divide(self.batch.size, pace, most)
        if best is None or (self.processes and len({(one.speed, one.memory_bytes) for one in devices}) == 1):
            return best

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
        return self.rows.seconds(device, self.batch.size) / max(self._most_rows(self.figures(2, False), device), 1)

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


def gathered_blocks(graph: ModelGraph) -> list[str]:
    """Modules that are gathered as one: the outermost repeated ones whose parameters nobody else reads.

    Each must need what the one before it made: all ranks gather together, so none may run a block that others skip, as
    experts side by side may.
    """
    values = {tensor.value: tensor.name for tensor in graph.tensors if tensor.kind == "parameter"}
    storages = {tensor.storage: values[tensor.value] for tensor in graph.tensors if tensor.value in values}
    callable_paths = {module.path for module in graph.modules if module.callable and not module.aliases}
    called = {call.path for call in graph.calls}
    paths = [path for path in repeated_elements(graph) if path in callable_paths and path in called]
    elements = frozenset(paths)
    block_of = {name: element_of(name, elements) for name in values.values()}
    foreign: set[str] = set()
    columns = columns_of(graph)
    reads = columns.inputs
    for at in np.flatnonzero(np.isin(columns.storage[reads.value], list(storages))).tolist():
        op, block = graph.ops[reads.op[at]], block_of[storages[columns.storage[reads.value[at]]]]
        if block and not op.backward and not is_below(graph.calls[op.call].path, block):
            foreign.add(block)
    for names in graph.tied():  # one that is registered in two places belongs to both
        homes = {block_of.get(name, "") for name in names}
        foreign |= homes if len(homes) > 1 else set()
    foreign |= _beside_one_another(graph, paths)
    return [path for path in paths if path not in foreign]


def _beside_one_another(graph: ModelGraph, paths: Sequence[str]) -> set[str]:
    """Repeated modules of lists in which one does not need what the one before it made."""
    place = {path: at for at, path in enumerate(paths)}
    of_call = [place.get(element_of(call.path, place), -1) for call in graph.calls]
    needs: dict[int, int] = {}  # value -> the modules it was made with, one bit each
    seen = dict.fromkeys(range(len(paths)), 0)
    for op in graph.ops:
        if op.backward:
            continue
        mask = 0
        for value in op.inputs:
            mask |= needs.get(value, 0)
        at = of_call[op.call]
        if at >= 0:
            seen[at] |= mask
            mask |= 1 << at
        for value in op.outputs:
            needs[value] = needs.get(value, 0) | mask
    apart: set[str] = set()
    for at in range(1, len(paths)):
        if parent(paths[at]) == parent(paths[at - 1]) and not seen[at] >> (at - 1) & 1:
            apart.add(parent(paths[at]))
    return {path for path in paths if parent(path) in apart}


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
    if best.sharded:
        replica = tried[0]
        why = (
            "since memory is the objective"
            if replica.fits
            else f"since a whole replica does not fit on {replica.lacking.name}"
        )
        reasons.append(f"each process keeps 1/{count} of parameters, gradients and optimizer state, {why}")
    if best.run.exchange.seconds:
        what = "gathering parameters and scattering gradients" if best.sharded else "summing gradients"
        reasons.append(
            f"{what} takes {format_seconds(best.run.exchange.seconds)}, of which "
            f"{format_seconds(best.run.exchange.exposed_seconds)} don't hide behind computing"
        )
    if task.processes and count > 1:
        means = "; gradients become the mean over processes" if task.profile.workload.training else ""
        reasons.append(f"each process is given its own rows of the batch{means}")
    if task.batch.proof and not task.batch.assumed:
        reasons.append(f"rows of the batch don't mix: {task.batch.proof}")
    return tuple(reasons)


def _refusal(task: ReplicaTask, tried: Sequence[ReplicaSet], devices: Sequence[Device], processes: int) -> str:
    """Say which device lacks how much, and one change that was tried and works."""
    closest = max(tried, key=lambda one: one.lacking.free_bytes)
    worst = closest.lacking
    kind = "a part" if closest.sharded else "a replica"
    said = (
        f"the model does not fit: {kind} of it with its rows needs {format_bytes(worst.peak_bytes)} on {worst.name}, "
        f"{format_bytes(-worst.free_bytes)} more than there is."
    )
    if not closest.sharded and not task.processes and len(devices) > 1:
        sharded = task.candidate(devices, sharded=True)
        if sharded.fits:
            return (
                f"{said} It was checked that it fits if {len(devices)} processes keep a part of the parameters each: "
                f"plan in them, started with torchrun --nproc-per-node {len(devices)}."
            )
    return f'{said} Plan with strategy="auto" or "balanced", which divide the model instead.'

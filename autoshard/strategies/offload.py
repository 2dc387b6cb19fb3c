"""Plans for models that are larger than the devices that compute: which modules stay, which are offloaded, from where.

1. Divide the model into modules that may be offloaded (`offloadable`), from whole blocks to ever smaller parts.
2. Give every device with a link its share: in T seconds it reads its memory + T * bandwidth of the link; T is what the
   whole model takes. In turns, so that all links work at a time, and in contiguous parts; what the CPU computes sooner
   than it is brought stays there.
3. Choose per device which modules stay, and where the others are kept (`offload_choice`).
4. Check memory and seconds with the exact estimate. The best division wins, among equals the coarsest.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.common.module_paths import is_below
from autoshard.engine.estimate import Estimate
from autoshard.engine.offloaded import (
    SLOTS,
    STORES,
    fetch_rate,
    fetch_seconds,
    live_bytes,
    staging_bytes,
    streaming_bound,
    without_storages,
)
from autoshard.engine.pricer import price
from autoshard.flow import Flow, flow
from autoshard.plan import Plan
from autoshard.plan.choices import Objective
from autoshard.plan.placement import covering_entry
from autoshard.profile.answer import prompt_and_token, times_computed
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, tensor_units
from autoshard.strategies.chain import chain_from_profile, join
from autoshard.strategies.cold import hops
from autoshard.strategies.offload_choice import CPU, RESIDENT, Movable, Offload, choose, offloaded
from autoshard.strategies.offloadable import Offloadable, divisions
from autoshard.strategies.partition import Room, balanced, most_even
from autoshard.strategies.paths import collapse
from autoshard.strategies.stage_costs import StageCosts

INF = float("inf")
_PATIENCE = 2
"""Finer divisions without gain after which none is tried any more."""
_MORE = 1.25
"""Factor on what devices bring where the fastest takes what it can: slots take room that the chain does not know of."""
_TRIES = 4
"""Choices of one assignment that are checked, each with less room where the last one was too full."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """A plan with offloaded modules and its exact consequences."""

    placements: Mapping[str, str]
    offloaded: Mapping[str, str]
    flow: Flow
    estimate: Estimate
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Why nothing fits: bytes that something needs on a device, or has to be stored there, and those that there are."""

    where: str
    what: str
    need_bytes: int
    has_bytes: int


def offload(
    profile: Profile, cluster: Cluster, units: Units, pins: Mapping[int, int], *,
    computing: Sequence[str], objective: Objective, in_memory: Collection[str] = (),
) -> "Offloaded | Lack | None":  # fmt: skip
    """Find the best plan with offloaded modules, or say what lacks least; None if no module may be offloaded.

    `computing`: names of devices that compute. `in_memory`: tensors that can't be kept on disk.
    """
    not_on_disk = {tensor.storage for tensor in profile.graph.tensors if tensor.name in set(in_memory)}
    task = _OffloadTask(profile, cluster, units, pins, computing, objective, not_on_disk)
    best: Offloaded | None = None
    lacks: list[Lack] = []
    without_gain = 0
    for division in divisions(profile.graph):
        without_gain += 1
        for assignment in dict.fromkeys(task.assignments(division)):
            found = task.plan(division, assignment)
            if isinstance(found, Lack):
                lacks.append(found)
            elif best is None or found.value < best.value * (1 - 1e-9):
                best, without_gain = found, 0
        if best is not None and (without_gain == _PATIENCE or best.value <= task.bound * (1 + 1e-9)):
            break
    least = min(lacks, key=lambda lack: lack.need_bytes - lack.has_bytes, default=None)
    return best or least


class _OffloadTask:
    """What all divisions of one request share."""

    def __init__(
        self, profile: Profile, cluster: Cluster, units: Units, pins: Mapping[int, int], computing: Sequence[str],
        objective: Objective, not_on_disk: set[int],
    ) -> None:  # fmt: skip
        self.profile, self.cluster, self.units, self.not_on_disk = profile, cluster, units, not_on_disk
        self.graph: ModelGraph = profile.graph
        self.objective: Objective = "latency" if objective == "memory" else objective
        self.computing = tuple(computing)
        limited = replace(cluster, devices=tuple(cluster.device(name) for name in computing))
        self.chain = chain_from_profile(profile, limited, pins=pins, units=units)
        self.of_tensor = tensor_units(self.graph, units)
        self.stores = {
            name: cluster.device(name).memory_bytes
            for name in STORES
            if name in cluster.names and self.computing != (name,)
        }
        self.bound = streaming_bound(profile, cluster, objective, computing)
        self._flows: dict[tuple[int, ...], Flow] = {}

    # ---- who computes what

    def assignments(self, division: Sequence[Offloadable]) -> Iterator[tuple[int, ...]]:
        """Yield device indices per unit, modules of the division whole on one device."""
        chain = self.chain
        if chain.num_devices == 1:
            yield (0,) * chain.num_units
            return
        tops = {module.path for module in division}
        owner = [(covering_entry(tops, paths[0]) or "") if paths else "" for paths in self.units.paths]
        pin = [chain.pins.get(unit, -1) for unit in range(chain.num_units)]
        starts = [i == 0 or not top or (top, pin[i]) != (owner[i - 1], pin[i - 1]) for i, top in enumerate(owner)]
        group = np.cumsum(starts) - 1
        joined = join(chain, group)
        assert joined is not None
        costs = StageCosts(joined)
        share = self._share()
        whole = balanced(costs, Room.of(share * _MORE), self.objective) or most_even(costs, Room.of(share))
        found = [tuple(np.array(whole.assignment)[group].tolist())]
        if not chain.pins and (share > 0).sum() > 1:
            found.append(_in_turns(owner, {module.path: module.nbytes for module in division}, share))
        yield from found
        cheaper = self._computed_sooner()
        for assignment in found if cheaper.any() else ():
            yield tuple(np.where(cheaper, self.computing.index("cpu"), np.array(assignment)).tolist())

    def _share(self) -> np.ndarray:
        """The bytes of the model for each device: its memory, and of what has no room as its link is fast."""
        chain = self.chain
        rates = np.array([self._rate(name) for name in self.computing])
        room = np.where(rates > 0, np.maximum(chain.capacity_bytes, 0), 0).astype(float)
        missing = max(float(chain.resident_bytes.sum()) - room.sum(), 0.0)
        return room + missing / max(rates.sum(), 1e-30) * rates

    def _computed_sooner(self) -> np.ndarray:
        """[n] whether the CPU computes a unit in less time than it takes to bring it: tables, experts."""
        chain, rates = self.chain, [self._rate(name) for name in self.computing]
        cpu = self.computing.index("cpu") if "cpu" in self.computing else -1
        if cpu < 0 or rates[cpu] or not max(rates) or chain.pins:
            return np.zeros(chain.num_units, bool)
        bringing = times_computed(self.profile) * chain.resident_bytes / max(rates)
        return chain.seconds[cpu] + hops(chain, cpu, rates.index(max(rates))) < bringing

    def _rate(self, device: str) -> float:
        """Bytes per second that a device can stream; what computes on the CPU beside accelerators stays there."""
        if device == "cpu" and len(self.computing) > 1:
            return 0.0
        return fetch_rate(self.cluster, device)

    # ---- what stays and what is offloaded

    def plan(self, division: Sequence[Offloadable], assignment: tuple[int, ...]) -> "Offloaded | Lack":
        """Choose what stays of a division, and check it; with less room where a device comes out too full."""
        graph = self.graph
        device_of = {name: self.computing[assignment[unit]] for name, unit in self.of_tensor.items()}
        tops = {module.path for module in division}
        under: dict[str, set[str]] = {}
        for name, device in device_of.items():
            under.setdefault(covering_entry(tops, name) or "", set()).add(device)
        one_device = {path: next(iter(devices)) for path, devices in under.items() if len(devices) == 1}
        whole = [m for m in division if m.path in one_device and self._rate(one_device[m.path]) > 0]
        if "cpu" not in self.stores:
            whole = [m for m in whole if not self.not_on_disk.intersection(m.storages)]
        if assignment not in self._flows:
            self._flows[assignment] = flow(graph, placed(device_of, set(), graph))
        moves = self._flows[assignment]
        copied = {graph.values[copy.value].storage for copy in moves.copies}
        whole = [module for module in whole if not copied.intersection(module.storages)]
        whole.sort(key=lambda module: module.calls[0][0] if module.calls else len(graph.ops))
        task = self._pose(whole, one_device, moves)
        if isinstance(task, Lack):
            return task
        found: Offloaded | Lack | None = None
        for _ in range(_TRIES):
            places = choose(task)
            if places is None:
                return found or _lack(task, whole, moves.devices)
            found = self._checked(whole, places, device_of, moves)
            if isinstance(found, Offloaded) or found.where not in moves.devices:
                return found
            room = list(task.room_bytes)
            room[moves.devices.index(found.where)] -= found.need_bytes - found.has_bytes
            task = replace(task, room_bytes=tuple(room))
        assert found is not None
        return found

    def _pose(self, whole: Sequence[Offloadable], device_of: Mapping[str, str], moves: Flow) -> "Offload | Lack":
        """The choice as arrays: room is what is left of a device beside all that can't be offloaded."""
        graph, cluster = self.graph, self.cluster
        bare = without_storages(moves, (storage for module in whole for storage in module.storages))
        room = {}
        for name in moves.devices:
            device = cluster.device(name)
            fixed = bare.peak(name, device.block_bytes)[0]
            room[name] = device.budget_bytes - fixed
            if room[name] < 0:
                here = [m for m in whole if device_of[m.path] == name]
                slots = sum(sorted(live_bytes(m.storages, graph, device.block_bytes) for m in here)[-SLOTS:])
                what = "what must be there, with two modules at a time,"
                return Lack(where=name, what=what, need_bytes=fixed + slots, has_bytes=device.budget_bytes)
        halves = prompt_and_token(self.profile)
        # What is done most often.
        usual_step = self.profile if halves is None else halves[1 if self.profile.further else 0]

        def movable(module: Offloadable) -> Movable:
            device, storages = device_of[module.path], module.storages
            seconds = {store: fetch_seconds(storages, graph, cluster, store, device) for store in self.stores}
            if self.not_on_disk.intersection(storages):
                seconds.pop("disk", None)
            return Movable(
                device=moves.devices.index(device),
                calls=sum(begin not in usual_step.graph.uncounted for begin, _ in module.calls),
                nbytes=live_bytes(storages, graph, cluster.device(device).block_bytes),
                stored_bytes=module.nbytes,
                cpu_seconds=seconds.get("cpu", INF),
                disk_seconds=seconds.get("disk", INF),
            )

        cpu = room.get("cpu", self.stores.get("cpu", 0)) if "cpu" in self.stores else 0
        if "disk" in self.stores:
            cpu -= staging_bytes({device_of[module.path] for module in whole})
        return Offload(
            modules=tuple(map(movable, whole)),
            room_bytes=tuple(room[name] for name in moves.devices),
            cpu_bytes=max(cpu, 0),
            disk_bytes=self.stores.get("disk", 0),
        )

    def _checked(
        self, whole: Sequence[Offloadable], places: Sequence[int], device_of: Mapping[str, str], moves: Flow
    ) -> "Offloaded | Lack":
        """The plan of a choice with its exact estimate; the copies do not depend on what is offloaded."""
        chosen = ((module, place) for module, place in zip(whole, places, strict=True) if place != RESIDENT)
        away = {module.path: "cpu" if place == CPU else "disk" for module, place in chosen}
        placements = placed(device_of, set(away), self.graph)
        draft = Plan(
            strategy="draft", objective=self.objective, workload=self.profile.workload, devices=(),
            placements=placements, offloaded=away,
        )  # fmt: skip
        estimate = price(draft, self.profile, self.cluster, flow_of_plan=moves, lower_bound_seconds=self.bound)
        for device in estimate.devices:
            if device.free_bytes < 0:
                needs = {"need_bytes": device.peak_bytes, "has_bytes": device.memory_bytes}
                return Lack(where=device.name, what="a pass", **needs)
        value = estimate.bottleneck_seconds if self.objective == "throughput" else estimate.latency_seconds
        return Offloaded(placements=placements, offloaded=away, flow=moves, estimate=estimate, value=value)


def _lack(task: Offload, whole: Sequence[Offloadable], devices: Sequence[str]) -> Lack:
    """Which room is too small: that of two slots on a device, or that of the stores."""
    for number, room in enumerate(task.room_bytes):
        mine = [(one.nbytes, module.path) for one, module in zip(task.modules, whole, strict=True)
                if one.device == number]  # fmt: skip
        slots = sorted(mine, key=lambda row: -row[0])[:SLOTS]
        need = sum(nbytes for nbytes, _ in slots)
        if need > room:
            what = f"one module after the other, with room for two, {' and '.join(path for _, path in slots)},"
            return Lack(where=devices[number], what=what, need_bytes=need, has_bytes=room)
    away = [task.modules[number] for number in offloaded(task) or range(len(whole))]
    stored, has = sum(one.stored_bytes for one in away), task.cpu_bytes + task.disk_bytes
    if stored <= has:  # in all: what can't be kept on disk has to be on the CPU
        stored, has = sum(one.stored_bytes for one in away if one.disk_seconds == INF), task.cpu_bytes
    return Lack(where="cpu", what="what is stored", need_bytes=stored, has_bytes=has)


def _in_turns(owner: Sequence[str], nbytes: Mapping[str, int], share: np.ndarray) -> tuple[int, ...]:
    """Device per unit: each module goes where, with it, the least part of a device's share has been given."""
    given = np.zeros(len(share))
    device_of: dict[str, int] = {}
    for top in dict.fromkeys(owner):
        if top:
            after = np.where(share > 0, (given + nbytes[top]) / np.maximum(share, 1e-30), np.inf)
            device_of[top] = int(after.argmin())
            given[device_of[top]] += nbytes[top]
    device, assignment = int(share.argmax()), []
    for top in owner:
        device = device_of.get(top, device)
        assignment.append(device)
    return tuple(assignment)


def placed(device_of: Mapping[str, str], offloaded: set[str], graph: ModelGraph) -> dict[str, str]:
    """Turn tensor name -> device into the fewest entries in which every offloaded module has one of its own."""
    marked = {}
    for name, device in device_of.items():
        top = covering_entry(offloaded, name)
        marked[name] = f"{device}\0{top}" if top else device
    placements = {}
    for path, marked_device in collapse(marked, graph).items():
        device, _, top = marked_device.partition("\0")
        placements[top if top and is_below(top, path) else path] = device
    return placements or {"": next(iter(device_of.values()), "")}

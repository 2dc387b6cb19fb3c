"""Plans for models that are larger than the devices that compute: which modules stay, which are streamed, from where.

1. Divide the model into modules that may be streamed (`streamable`), from whole blocks to ever smaller parts.
2. Give every device that computes its part of the model with the ordinary solvers. A device that streams for T seconds
   reads its memory + T * bandwidth of its link, so it is posed with that much memory, for the least T that the pass of
   the solution does not exceed. An answer of n tokens is n passes: what is brought in T seconds is n times less.
3. Choose per device which modules stay, and where the others are kept (`offload_choice`).
4. Check memory and seconds with the exact estimate. The best division wins, among equals the coarsest.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.choices import Objective
from autoshard.cluster.cluster import Cluster
from autoshard.cost import tensor_units
from autoshard.estimate import Estimate
from autoshard.flow import Flow, flow
from autoshard.module_paths import is_below
from autoshard.plan import Plan
from autoshard.profile.answer import prompt_and_token, times_computed
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units
from autoshard.strategies.balanced import balanced
from autoshard.strategies.chain import Chain
from autoshard.strategies.cold import hops
from autoshard.strategies.levels import coarsen
from autoshard.strategies.offload_choice import CPU, RESIDENT, Choice, Offload, choose, least_stored_bytes
from autoshard.strategies.paths import collapse
from autoshard.strategies.sequential import sequential
from autoshard.strategies.solve import Solution
from autoshard.strategies.streamable import Streamable, divisions
from autoshard.strategies.units import chain_from_profile
from autoshard.stream_cost import (
    Streamed,
    estimate_streamed,
    fetch_seconds,
    held_bytes,
    pass_calls,
    staging_bytes,
    streaming_bound,
    without_storages,
)
from autoshard.stream_schedule import SLOTS

INF = float("inf")
_CLOSE = 1e-9
"""A finer division must make the pass faster by more than this part of it. No more is asked: what is called close with
little memory may be lost with more."""
_PATIENCE = 2
"""Finer divisions without gain after which none is tried any more."""
_BISECTIONS = 10
_MORE = 1.25
"""Factor on the seconds of streaming: the slots take room that the chain does not know of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloaded:
    """A plan with streamed modules and its exact consequences."""

    placements: Mapping[str, str]
    streamed: Mapping[str, str]
    flow: Flow
    estimate: Estimate
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lack:
    """Why nothing fits: what a device, or all places together, would need and have."""

    where: str
    need_bytes: int
    has_bytes: int
    largest: str = ""


def offload(
    profile: Profile, cluster: Cluster, units: Units, pins: Mapping[int, int], *,
    computing: Sequence[str], strategy: str, objective: Objective, in_memory: Collection[str] = (),
    better_than: float = INF,
) -> "Offloaded | Lack":  # fmt: skip
    """Find the best plan with streamed modules, or say what lacks least.

    `computing`: names of devices that compute. `in_memory`: tensors that can't be kept on disk. `better_than`: seconds
    of a plan that is known; what can't be faster is not looked at.
    """
    task = _Task(profile, cluster, units, pins, computing, strategy, objective)
    task.better_than = better_than
    task.not_on_disk = {tensor.storage for tensor in profile.graph.tensors if tensor.name in set(in_memory)}
    bound = streaming_bound(profile, cluster, objective, computing)
    best: Offloaded | None = None
    lack: Lack | None = None
    without_gain = 0
    for division in divisions(profile.graph):
        found = task.plan(division, bound)
        if isinstance(found, Lack):
            if lack is None or found.need_bytes - found.has_bytes < lack.need_bytes - lack.has_bytes:
                lack = found
            continue
        if best is None or found.value < best.value * (1 - _CLOSE):
            best, without_gain = found, 0
            task.better_than = min(better_than, found.value)
        else:
            without_gain += 1
        if without_gain == _PATIENCE or best.value <= bound * (1 + _CLOSE):
            break
    return best or lack or Lack(where="", need_bytes=0, has_bytes=0)


class _Task:
    """What all divisions of one request share."""

    def __init__(
        self, profile: Profile, cluster: Cluster, units: Units, pins: Mapping[int, int], computing: Sequence[str],
        strategy: str, objective: Objective,
    ) -> None:  # fmt: skip
        self.profile, self.cluster, self.units = profile, cluster, units
        self.graph: ModelGraph = profile.graph
        self.objective: Objective = "latency" if objective == "memory" else objective
        self.solve = sequential if strategy == "sequential" else balanced
        self.computing = tuple(computing)
        limited = replace(cluster, devices=tuple(cluster.device(name) for name in computing))
        self.chain = chain_from_profile(profile, limited, pins=pins, units=units)
        self.of_tensor = tensor_units(self.graph, units)
        self.stores = {
            name: cluster.device(name).memory_bytes
            for name in ("cpu", "disk")
            if name in cluster.names and self.computing != (name,)
        }
        self.not_on_disk: set[int] = set()
        self.better_than = INF
        self.assignments: tuple[tuple[int, ...], ...] = ()
        self._flows: dict[tuple[int, ...], Flow] = {}

    def plan(self, division: Sequence[Streamable], bound: float) -> "Offloaded | Lack":
        """The best plan in which modules of one division are streamed.

        Who computes what is found for every division; finer ones try what was found for the coarser, too.
        """
        best: Offloaded | None = None
        lack: Lack | None = None
        self.assignments = tuple(dict.fromkeys([*self.assignments, *self._assignments(division)]))
        for assignment in self.assignments:
            if self._least_seconds(assignment) >= self.better_than:
                continue
            found = self._fill(division, assignment, bound)
            if isinstance(found, Lack):
                lack = lack or found
            elif best is None or found.value < best.value * (1 - 1e-9):
                best = found
        return best or lack or Lack(where="", need_bytes=0, has_bytes=0)

    def _least_seconds(self, assignment: Sequence[int]) -> float:
        """What a plan with these devices per unit can't be faster than: each brings what it has no room for."""
        chain, place = self.chain, np.array(assignment)
        used = chain.seconds.max(axis=0) > 0
        passes = times_computed(self.profile)
        computing = [float(chain.seconds[d, place == d].sum()) for d in range(chain.num_devices)]
        least = max(computing) if self.objective == "throughput" else sum(computing)
        for d, name in enumerate(self.computing):
            rate = self._rate(name)
            over = float(chain.resident_bytes[used & (place == d)].sum()) - float(chain.capacity_bytes[d])
            if rate and over > 0:
                least = max(least, passes * over / rate)
        return least

    # ---- who computes what

    def _assignments(self, division: Sequence[Streamable]) -> Iterator[tuple[int, ...]]:
        """Device indices per unit, modules of the division whole on one device."""
        chain = self.chain
        if chain.num_devices == 1:
            yield (0,) * chain.num_units
            return
        joined, group = coarsen(chain, self._cuts(division))
        found = [solution.assignment for solution in self._solutions(joined) if solution is not None]
        unit_level = [tuple(np.array(assignment)[group].tolist()) for assignment in found]
        dealt = list(self._dealt(division))
        yield from dict.fromkeys([*unit_level, *dealt, *self._with_tables_on_cpu(dealt)])

    def _with_tables_on_cpu(self, dealt: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """The same with units on the CPU that it computes in less time than it takes to bring them: tables, experts."""
        if "cpu" not in self.computing or not dealt:
            return
        cpu = self.computing.index("cpu")
        rates = [self._rate(name) for name in self.computing]
        link = max(rates)
        if rates[cpu] or not link:
            return
        chain = self.chain
        bringing = times_computed(self.profile) * chain.resident_bytes / link
        cheaper = chain.seconds[cpu] + hops(chain, cpu, rates.index(link)) < bringing
        for assignment in dealt if cheaper.any() else ():
            yield tuple(np.where(cheaper, cpu, np.array(assignment)).tolist())

    def _dealt(self, division: Sequence[Streamable]) -> Iterator[tuple[int, ...]]:
        """Modules dealt to the devices in turns, without and with the CPU as one of them: all links work at a time.

        In contiguous parts the links of all devices but the one that computes wait with their two slots full. In T
        seconds a device reads its memory + T * rate, the CPU what it computes; T is what the whole model takes.
        """
        rates = np.array([self._rate(name) for name in self.computing]) / times_computed(self.profile)
        if self.chain.pins or not rates.any():
            return
        owner, nbytes = self._owners(division), {module.path: module.nbytes for module in division}
        total = float(self.chain.resident_bytes.sum())
        room = np.where(rates > 0, np.maximum(self.chain.capacity_bytes, 0), 0)
        on_cpu = np.array([name == "cpu" and not rate for name, rate in zip(self.computing, rates, strict=True)])
        computed = total / np.maximum(self.chain.seconds.sum(axis=1), 1e-30)
        for rate in (rates, rates + on_cpu * computed):
            share = room + max(total - room.sum(), 0.0) / rate.sum() * rate
            if (share > 0).sum() > 1:
                yield _in_turns(owner, nbytes, share)

    def _owners(self, division: Sequence[Streamable]) -> list[str]:
        """Per unit the module of the division that it is part of, or ""."""
        tops = {module.path for module in division}
        return [_top_of(paths[0], tops) if paths else "" for paths in self.units.paths]

    def _cuts(self, division: Sequence[Streamable]) -> np.ndarray:
        """Cuts before every unit that does not go on with the module of the unit before."""
        owner = self._owners(division)
        return np.array([i == 0 or not top or top != owner[i - 1] for i, top in enumerate(owner)])

    def _solutions(self, chain: Chain) -> Iterator[Solution | None]:
        """Solutions for streaming at the rate of each store, and one that fills all memory evenly."""
        room = np.maximum(np.array(chain.capacity_bytes, float), 0.0)
        for store in self.stores:
            rates = np.array([self._rate(name, store) for name in chain.devices]) / times_computed(self.profile)
            if rates.any():
                yield from self._streaming(chain, room, rates)
        streaming = np.array([self._rate(name) > 0 for name in chain.devices])
        for share in (0.0, 1.0):
            yield balanced(replace(chain, capacity_bytes=np.where(streaming, room * 1e6, room * share)), "memory")

    def _streaming(self, chain: Chain, room: np.ndarray, rates: np.ndarray) -> Iterator[Solution | None]:
        """Solutions for the least seconds of streaming that their own pass does not exceed, and for more."""

        def solved(seconds: float) -> Solution | None:
            return self.solve(replace(chain, capacity_bytes=room + seconds * rates), self.objective)

        high = float(chain.resident_bytes.sum() + chain.transient_bytes.sum()) / float(rates.max())
        for _ in range(40):
            found = solved(high)
            if found is not None and found.value <= high:
                break
            high *= 2
        low = 0.0
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            found = solved(middle)
            if found is not None and found.value <= middle:
                high = middle
            else:
                low = middle
        for factor in (1.0, _MORE, 1e6):
            yield solved(high * factor)

    def _rate(self, device: str, only: str = "") -> float:
        """Bytes per second that a device can stream; what computes on the CPU beside accelerators stays there."""
        if device == "cpu" and len(self.computing) > 1:
            return 0.0
        stores = [only] if only else [store for store in self.stores if store != device]
        return max((self.cluster.link(store, device).bytes_per_second for store in stores), default=0.0)

    # ---- what stays and what is streamed

    def _fill(self, division: Sequence[Streamable], assignment: tuple[int, ...], bound: float) -> "Offloaded | Lack":
        graph = self.graph
        device_of = {name: self.computing[assignment[unit]] for name, unit in self.of_tensor.items()}
        tops = {module.path for module in division}
        under: dict[str, set[str]] = {}
        for name, device in device_of.items():
            under.setdefault(_top_of(name, tops), set()).add(device)
        homes = {path: next(iter(devices)) for path, devices in under.items() if len(devices) == 1}
        whole = [m for m in division if m.path in homes and self._rate(homes[m.path]) > 0]
        if "cpu" not in self.stores:
            whole = [m for m in whole if not self.not_on_disk.intersection(m.storages)]
        moves = self._flows.get(assignment)
        if moves is None:
            moves = self._flows[assignment] = flow(graph, placed(device_of, set(), graph))
        copied = {graph.values[copy.value].storage for copy in moves.copies}
        whole = [module for module in whole if not copied.intersection(module.storages)]
        task = self._pose(whole, homes, moves)
        if isinstance(task, Lack):
            return task
        choice = choose(task)
        if choice is None:
            return _lack(task, whole, moves.devices)
        return self._checked(whole, choice, device_of, moves, bound)

    def _pose(self, whole: Sequence[Streamable], homes: Mapping[str, str], moves: Flow) -> "Offload | Lack":
        """The choice as arrays: room is what is left of a device beside all that can't be streamed."""
        graph, cluster = self.graph, self.cluster
        bare = without_storages(moves, (storage for module in whole for storage in module.storages))
        room = {}
        for name in moves.devices:
            device = cluster.device(name)
            fixed = bare.peak(name, device.block_bytes)[0]
            room[name] = device.budget_bytes - fixed
            if room[name] < 0:
                here = [m for m in whole if homes[m.path] == name]
                slots = sum(sorted(held_bytes(m.storages, graph, device.block_bytes) for m in here)[-SLOTS:])
                return Lack(where=name, need_bytes=fixed + slots, has_bytes=device.budget_bytes)
        streamed = [
            Streamed(path=m.path, device=homes[m.path], store="", storages=m.storages, calls=m.calls) for m in whole
        ]
        halves = prompt_and_token(self.profile)
        pace = self.profile if halves is None else halves[1 if self.profile.further else 0]  # what is done most often
        pace_moves = replace(moves, uncounted=pace.graph.uncounted)
        calls, after = pass_calls(pace, cluster, pace_moves, streamed)

        def seconds(store: str) -> tuple[float, ...]:
            if store not in self.stores:
                return (INF,) * len(streamed)
            barred = self.not_on_disk if store == "disk" else set[int]()
            return tuple(
                INF if barred.intersection(m.storages) else fetch_seconds(m.storages, graph, cluster, store, m.device)
                for m in streamed
            )

        cpu = room.get("cpu", self.stores.get("cpu", 0)) if "cpu" in self.stores else 0
        if "disk" in self.stores:
            cpu -= staging_bytes({m.device for m in streamed})
        return Offload(
            calls=calls,
            after_seconds=after,
            device=tuple(moves.devices.index(m.device) for m in streamed),
            nbytes=tuple(held_bytes(m.storages, graph, cluster.device(m.device).block_bytes) for m in streamed),
            stored_bytes=tuple(m.nbytes for m in whole),
            cpu_seconds=seconds("cpu"),
            disk_seconds=seconds("disk"),
            room_bytes=tuple(room[name] for name in moves.devices),
            cpu_bytes=max(cpu, 0),
            disk_bytes=self.stores.get("disk", 0),
        )

    def _checked(
        self, whole: Sequence[Streamable], choice: Choice, device_of: Mapping[str, str], moves: Flow, bound: float
    ) -> "Offloaded | Lack":
        """The plan of a choice with its exact estimate; the copies do not depend on what is streamed."""
        first = {module.path: module.calls[0][0] if module.calls else len(self.graph.ops) for module in whole}
        chosen = [(m, place) for m, place in zip(whole, choice.places, strict=True) if place != RESIDENT]
        chosen.sort(key=lambda pair: first[pair[0].path])
        streamed = {module.path: "cpu" if place == CPU else "disk" for module, place in chosen}
        placements = placed(device_of, set(streamed), self.graph)
        draft = Plan(
            strategy="draft", objective=self.objective, workload=self.profile.workload, devices=(),
            placements=placements, streamed=streamed,
        )  # fmt: skip
        figures = estimate_streamed(draft, self.profile, self.cluster, flow_of_plan=moves, lower_bound_seconds=bound)
        for device in figures.devices:
            if device.free_bytes < 0:
                return Lack(where=device.name, need_bytes=device.peak_bytes, has_bytes=device.memory_bytes)
        value = figures.bottleneck_seconds if self.objective == "throughput" else figures.latency_seconds
        return Offloaded(placements=placements, streamed=streamed, flow=moves, estimate=figures, value=value)


def _lack(task: Offload, whole: Sequence[Streamable], devices: Sequence[str]) -> Lack:
    """Which room is too small: that of two slots on a device, or that of the stores."""
    beside = 0  # what can stay beside the slots
    for number, room in enumerate(task.room_bytes):
        slots = sorted(_on(task, number), key=lambda module: -task.nbytes[module])[:SLOTS]
        need = sum(task.nbytes[module] for module in slots)
        if need > room:
            names = " and ".join(whole[module].path for module in slots)
            return Lack(where=devices[number], need_bytes=need, has_bytes=room, largest=names)
        beside += room - need
    stored, has = least_stored_bytes(task) or 0, task.cpu_bytes + task.disk_bytes
    if stored > has:
        return Lack(where="", need_bytes=stored, has_bytes=has)
    in_memory = sum(n for n, s in zip(task.stored_bytes, task.disk_seconds, strict=True) if s == INF)
    least = in_memory - beside if in_memory - beside > task.cpu_bytes else in_memory
    return Lack(where="cpu", need_bytes=least, has_bytes=task.cpu_bytes)


def _on(task: Offload, device: int) -> list[int]:
    return [module for module in range(task.size) if task.device[module] == device]


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


def placed(device_of: Mapping[str, str], streamed: set[str], graph: ModelGraph) -> dict[str, str]:
    """Turn tensor name -> device into the fewest entries in which every streamed module has one of its own."""
    marked = {}
    for name, device in device_of.items():
        top = _top_of(name, streamed)
        marked[name] = f"{device}\0{top}" if top else device
    placements = {}
    for path, marked_device in collapse(marked, graph).items():
        device, _, top = marked_device.partition("\0")
        placements[top if top and is_below(top, path) else path] = device
    return placements or {"": next(iter(device_of.values()), "")}


def _top_of(path: str, tops: set[str]) -> str:
    """Return the one of `tops` that a path is or lies below, or ""."""
    while path and path not in tops:
        path = path.rpartition(".")[0]
    return path

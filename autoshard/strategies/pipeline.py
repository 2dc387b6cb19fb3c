"""Stages of a pipeline in one process: devices, micro-batches and boundaries are searched, the best few are priced.

devices, micro-batches ──▶ stages by the dynamic programme of `partition` ──formula──▶ a dozen ──the engine──▶ one

A process per device is planned by `search`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import combinations

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.module_paths import above, parent
from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Estimate
from autoshard.engine.placed import unit_seconds
from autoshard.engine.pricer import Pricer
from autoshard.engine.timing import op_seconds
from autoshard.errors import PlanError, SpecError
from autoshard.flow import flow
from autoshard.plan import Mesh, Plan, Stage
from autoshard.plan.batching import BatchAxis
from autoshard.plan.choices import check_choices
from autoshard.profile.measure import first_saves
from autoshard.profile.part import part_of_batch
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units, tensor_units
from autoshard.strategies.chain import Chain, chain_from_profile, cost_of, join
from autoshard.strategies.compare import value_of
from autoshard.strategies.partition import Room, balanced
from autoshard.strategies.paths import collapse, cut_depths
from autoshard.strategies.stage_costs import StageCosts

_MOST_PARTS = 8
"""Micro-batches per device above which there is nothing to win: the bubble is below an eighth of a device's time."""
_FEW, _EVERY = 8, 4
"""Devices up to which every number of them is tried, and every set of them."""
_DOZEN, _PRICED_OPS = 12, 12_000
"""Stages that are priced, and ops of the run, times those; three are in any case."""
_CLOSE, _AS_GOOD = 1.5, 1.002
"""How much worse than the best, by the formula, what is priced may be; what counts as equal."""
_ROOMS = (1.0, 1.25, 0.85, 0.7, 0.5)
"""Parts of the memory that are searched with: what a stage holds is known roughly before it is priced.

More than all of it only where something is recomputed; less as long as something does not fit.
"""
_AGAIN = 4 / 3
"""Seconds of a stage that recomputes, over those of one that does not: backward takes twice as long as forward."""
_CUTS_PER_STAGE, _ENOUGH = 2, 64
"""Cuts between whole modules are enough where there are so many per stage, or in all; else smaller modules are cut.

Few are, since tensors that meet inside a cut module are watched, which costs time.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """One stage on each of these devices: their first units and the end of the last, and which compute again.

    `value`: about what is minimised.
    """

    devices: tuple[Device, ...]
    begins: tuple[int, ...]
    recompute: tuple[bool, ...]
    microbatches: int
    value: float

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The smaller, the simpler."""
        return len(self.devices), self.microbatches


def pipeline(
    profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput",
    num_microbatches: int | None = None, schedule: str | None = None, pricer: Pricer | None = None,
    compared: bool = False,
) -> Plan:  # fmt: skip
    """Plan a pipeline in one process; `pricer` is told what it costs.

    For "throughput" the seconds of one batch count, so that its micro-batches overlap. Where the plan is `compared`
    with other strategies, batches may overlap too: then those of the busiest device do.

    Raises `SpecError` for numbers and names that make no sense, `PlanError` if nothing fits.
    """
    _check(cluster, batch, objective, num_microbatches, schedule)
    devices = [device for device in cluster.devices if device.name != "disk"]
    units = find_units(profile)
    if len(units.paths) < 2:
        raise PlanError(
            "a pipeline needs at least two modules with parameters, one per stage: this model has "
            f'{len(units.paths)}. Use strategy="balanced".'
        )
    goal = "latency" if objective == "throughput" and not compared else objective
    price = pricer or Pricer(profile, cluster)
    used = replace(cluster, devices=tuple(devices))

    @cache
    def part(m: int) -> Profile:
        """The run of one micro-batch, without the optimizer's step."""
        few = part_of_batch(profile, batch, -(-batch.size // m))
        return replace(few, workload=replace(few.workload, optimizer="none"))

    def searched(room: float) -> list[Stages]:
        sets = _device_sets(profile, devices, len(units.paths))
        wanted = [num_microbatches] if num_microbatches else None
        every = ((some, m) for some in sets for m in wanted or _parts(batch.size, len(some)))
        found = (one for some, m in every for one in _stages(profile, part(m), used, some, m, goal, room))
        different = {(*(device.name for device in one.devices), one.begins, one.recompute, one.microbatches): one
                     for one in found}  # fmt: skip
        return sorted(different.values(), key=lambda one: (float(f"{one.value:.3g}"), one.simplicity))

    best, closest = _best(searched, partial(_write, profile, batch, objective), price, goal, len(profile.graph.ops))
    if best is None:
        raise PlanError(_refusal(closest, devices))
    plan, estimate = best
    plan = replace(plan, reasons=tuple(_reasons(profile, plan, estimate, devices)))
    moves = flow(profile.graph, {path: str(i) for i, stage in enumerate(plan.stages) for path in stage.paths})
    return replace(plan, mixed_device=moves.mixed_device, written_back=moves.written_back)


# ---- the search


def _device_sets(profile: Profile, devices: Sequence[Device], units: int) -> list[tuple[Device, ...]]:
    """Devices for the stages, of any number: all sets of few; of many the first, the fastest and the largest."""
    most = min(len(devices), units)
    powers = [count for count in (2, 4, 8, 16, 32, 64, 128) if count < most]
    numbers = range(2, most + 1) if len(devices) <= _FEW else [*powers, most]
    seconds = {device.name: float(op_seconds(profile, device).sum()) for device in devices}
    several = [
        devices,
        sorted(devices, key=lambda device: seconds[device.name]),
        sorted(devices, key=lambda device: (-device.budget_bytes, seconds[device.name])),
    ]
    found: dict[object, tuple[Device, ...]] = {}
    for count in numbers:
        for some in combinations(devices, count) if len(devices) <= _EVERY else (one[:count] for one in several):
            kinds = sorted((one.speed, one.memory_bytes, one.overhead_bytes, one.host) for one in some)
            found.setdefault(str(kinds), tuple(some))
    return list(found.values())


def _parts(size: int, pp_ranks: int) -> list[int]:
    """Numbers of micro-batches, up to where there is nothing to win.

    Those that divide the batch, and those that the positions divide: the last ones may be smaller.
    """
    found = {m for m in range(1, size + 1) if size % m == 0 and m <= _MOST_PARTS * pp_ranks}
    return sorted(found | {m for m in (pp_ranks, 2 * pp_ranks, 4 * pp_ranks) if m <= size})[-8:]


def _stages(
    profile: Profile, part: Profile, cluster: Cluster, devices: tuple[Device, ...], m: int, goal: str, room: float
) -> Iterator[Stages]:  # fmt: skip
    """Stages whose slowest is as fast as can be, or whose fullest is as empty, with m micro-batches.

    In training a device holds the activations of all of them, or with recomputation what came into each layer. Devices
    compute while they are sent something: stages are found with and without what copies take. `part`: the run of one
    micro-batch.
    """
    units, training = find_units(profile), profile.graph.backward_begin < len(profile.graph.ops)
    begins = _layer_begins(units, len(devices))
    layer = np.searchsorted(begins, np.arange(len(units.paths)), side="right") - 1
    whole = join(_of_microbatches(profile, part, replace(cluster, devices=devices), m), layer)
    assert whole is not None
    inner = (whole.edge_unit < whole.num_units) & (whole.tensor_unit[whole.edge_tensor] >= 0)
    plain = replace(whole, edge_tensor=whole.edge_tensor[inner], edge_unit=whole.edge_unit[inner])
    again = _recomputing(profile, plain, layer, m) if training else None
    runs = np.bincount(layer[units.op_unit], op_seconds(profile, devices[0]) > 0, whole.num_units)
    capacity = Room.of(room * whole.capacity_bytes)
    for chain in (plain, _copied_at_once(whole), *((again, _copied_at_once(again)) if again is not None else ())):
        found = balanced(StageCosts(chain), capacity, "memory" if goal == "memory" else "throughput", all_used=True)
        if found is None:
            continue
        order, place = list(dict.fromkeys(found.assignment)), np.array(found.assignment)
        cost = cost_of(plain, found.assignment)
        recompute = tuple(training and cost.memory_bytes[at] > float(capacity.has_bytes[at]) for at in order)
        launches = np.array([m * runs[place == at].sum() * devices[at].launch_seconds for at in order])
        seconds = np.array(cost.seconds)[order] * np.where(recompute, _AGAIN, 1.0)
        yield Stages(
            devices=tuple(devices[at] for at in order), recompute=recompute, microbatches=m,
            begins=(*(int(begins[found.assignment.index(at)]) for at in order), len(units.paths)),
            value=cost.load if goal == "memory" else _about(seconds, launches, m, goal != "latency" and not training),
        )  # fmt: skip


def _copied_at_once(chain: Chain) -> Chain:
    none = np.zeros_like(chain.link_seconds)
    return replace(chain, link_seconds=none, link_bytes_per_second=none + np.inf)


def _of_microbatches(profile: Profile, part: Profile, cluster: Cluster, m: int) -> Chain:
    """The chain of m micro-batches, of which in inference one after the other is there."""
    units = find_units(profile)
    chain = chain_from_profile(profile, cluster, units=units)
    there = 1 if profile.graph.backward_begin < len(profile.graph.ops) else m
    return replace(
        chain, seconds=m * unit_seconds(part, cluster, units), transient_bytes=chain.transient_bytes / m, ties=(),
        tensor_bytes=chain.tensor_bytes / there, link_seconds=m * chain.link_seconds,
        link_bytes_per_second=chain.link_bytes_per_second / there,
    )  # fmt: skip


def _layer_begins(units: Units, stages: int) -> np.ndarray:
    """The first unit of every layer: modules as large as leave enough of them; all where few."""
    depths = cut_depths(units.paths)
    enough = max(stages, min(_CUTS_PER_STAGE * stages, _ENOUGH))
    for depth in sorted({*depths[1:].tolist(), int(depths.max(initial=0))}):
        allowed = depths <= depth
        if allowed.sum() >= enough:
            break
    return np.flatnonzero(allowed)


def _recomputing(profile: Profile, plain: Chain, layer: np.ndarray, m: int) -> Chain:
    """The chain of layers that keep what came in, and compute their activations again, one micro-batch at a time."""
    graph, units = profile.graph, find_units(profile)
    kept = np.zeros(len(units.paths))
    for storage, op in first_saves(graph).items():
        kept[units.op_unit[op]] += graph.storages[storage].nbytes
    saved, weights = np.bincount(layer, kept), np.bincount(layer, units.weight_bytes)
    came = np.zeros(plain.num_units)
    inner = plain.edge_unit < plain.num_units
    source, user = plain.ends
    crossing = inner & (source != user) & (plain.tensor_copies[plain.edge_tensor] > 0)
    np.add.at(came, user[crossing], plain.tensor_bytes[plain.edge_tensor[crossing]])
    return replace(
        plain, resident_bytes=np.maximum(plain.resident_bytes - saved, weights) + came,
        transient_bytes=plain.transient_bytes + saved / m,
    )  # fmt: skip


def _about(seconds: np.ndarray, launches: np.ndarray, m: int, busiest: bool) -> float:
    """About the seconds of a pass: one micro-batch through all stages, the others past the slowest of them.

    `seconds`: per stage, of all micro-batches; `launches`: the part of them in which one thread launches their ops.
    `busiest`: those of the busiest device alone count.
    """
    passed = seconds.max() if busiest else seconds.sum() / m + (1 - 1 / m) * seconds.max()
    return float(max(passed, launches.sum()))


def _best(
    searched: Callable[[float], list[Stages]], write: Callable[[Stages], Plan], price: Callable[[Plan], Estimate],
    goal: str, ops: int,
) -> tuple[tuple[Plan, Estimate] | None, Estimate | None]:  # fmt: skip
    """The best plan that fits, and what lacks least of those that don't; between equals the simplest."""
    best: tuple[float, Stages, Plan, Estimate] | None = None
    closest: Estimate | None = None
    too_full = False
    for room in _ROOMS:
        if best is not None and not (too_full if room < 1 else any(best[1].recompute)):
            continue
        found, too_full = searched(room), False
        for one in found[: max(3, min(_DOZEN, _PRICED_OPS // max(ops, 1)))]:
            if best is not None and one.value > found[0].value * _CLOSE:
                break
            plan = write(one)
            try:
                estimate = price(plan)
            except PlanError:  # stages that can't be cut there
                continue
            exact = value_of(estimate, goal, plan.workload.training)
            if not estimate.fits:
                too_full = True
                closest = estimate if closest is None or _lacking(estimate) < _lacking(closest) else closest
            elif best is None or exact < best[0] / _AS_GOOD or (
                exact <= best[0] * _AS_GOOD and one.simplicity < best[1].simplicity
            ):  # fmt: skip
                best = exact, one, plan, estimate
    return None if best is None else best[2:], closest


def _lacking(estimate: Estimate) -> int:
    return max(-device.free_bytes for device in estimate.devices)


# ---- the plan


def _write(profile: Profile, batch: BatchAxis, objective: str, one: Stages) -> Plan:
    """Write down what was decided."""
    units, graph, names = find_units(profile), profile.graph, [device.name for device in one.devices]
    stage_of_unit = np.searchsorted(one.begins[1:], np.arange(len(units.paths)), side="right")
    stage_of = {name: str(stage_of_unit[unit]) for name, unit in tensor_units(graph, units).items()}
    paths: list[list[str]] = [[] for _ in one.recompute]
    for path, stage in (collapse(stage_of, graph) if stage_of else {"": "0"}).items():
        paths[int(stage)] += opened(path, graph) if one.recompute[int(stage)] else [path]
    stages = zip(paths, one.recompute, strict=True)
    return Plan(
        strategy="pipeline", objective=objective, workload=profile.workload,
        devices=tuple(map(plan_device, one.devices)),
        placements={path: name for name, own in zip(names, paths, strict=True) for path in own},
        num_microbatches=one.microbatches, schedule="gpipe", fingerprint=graph.fingerprint,
        mesh=Mesh(pp=len(names)), batch=batch, stages=tuple(Stage(paths=tuple(own), recompute=yes)
                                                            for own, yes in stages),
    )  # fmt: skip


def opened(path: str, graph: ModelGraph) -> list[str]:
    """The largest modules at or below a path that have no list of modules in them, except inside its elements.

    "decoder"   ->   "decoder.embed", "decoder.layers.0", "decoder.layers.1", "decoder.norm"
    """
    numbered = {module.path for module in graph.modules if module.numbered}
    if path in numbered or any(one in numbered for one in above(path)):
        return [path]
    prefix = f"{path}." if path else ""
    if not any(one.startswith(prefix) for one in numbered):
        return [path]
    names = [tensor.name for tensor in graph.tensors if tensor.name.startswith(prefix)]
    own = [name for name in names if parent(name) == path]
    below = dict.fromkeys(prefix + name[len(prefix) :].partition(".")[0] for name in names if name not in own)
    return [*own, *(one for child in below for one in opened(child, graph))]


# ---- words


def _reasons(profile: Profile, plan: Plan, estimate: Estimate, devices: Sequence[Device]) -> Iterator[str]:
    """Say how a pipeline runs, what is recomputed, and which devices are not used."""
    run, batch = estimate.pipelining, plan.batch
    assert batch is not None
    names = {device.name for device in plan.devices}
    if run is None:  # an answer: it is priced in one piece
        yield f"{len(plan.stages)} stages on {len(names)} devices in turns: generate() does not divide a batch"
        return
    yield (
        f"{len(plan.stages)} stages on {len(names)} devices, the batch of {batch.size} in {plan.num_microbatches} "
        f"micro-batches, schedule {plan.schedule}: devices wait {run.bubble:.0%} of the time"
    )
    again = [i for i, stage in enumerate(plan.stages) if stage.recompute]
    if again:
        several = f"stage{'s' * (len(again) > 1)} {', '.join(map(str, again))}"
        yield (
            f"{'all stages' if len(again) == len(plan.stages) else several} compute activations again in backward "
            f"instead of keeping them: else the activations of {max(s.in_flight for s in run.stages)} micro-batches "
            "don't fit"
        )
    unused = [device.name for device in devices if device.name not in names]
    if unused:
        yield f"{', '.join(unused)} not used: more stages would wait for each other longer"
    alone = min(float(op_seconds(profile, device).sum()) for device in devices)
    fits = profile.peak_bytes <= max(device.budget_bytes for device in devices)
    if plan.objective != "memory" and fits and alone < estimate.latency_seconds:
        yield (
            f"one device alone would be faster ({alone / estimate.latency_seconds:.0%} of the time): a pipeline was "
            "asked for"
        )


def _refusal(estimate: Estimate | None, devices: Sequence[Device]) -> str:
    """Say what is lacking, and what may help."""
    there = sum(device.budget_bytes for device in devices)
    short = f"no stages were found that go into the {format_bytes(there)} of {len(devices)} devices"
    if estimate is not None:
        lacking = [f"{one.name} {format_bytes(-one.free_bytes)}" for one in estimate.devices if one.free_bytes < 0]
        short = f"in the closest one there is too little on {', '.join(lacking)}"
    return f'no pipeline fits: {short}. Use more micro-batches, more devices, a smaller batch, or strategy="balanced".'


def _check(
    cluster: Cluster, batch: BatchAxis, objective: str, num_microbatches: int | None, schedule: str | None
) -> None:
    check_choices(objective=objective, schedule=schedule)
    devices = sum(device.name != "disk" for device in cluster.devices)
    if devices < 2:
        raise SpecError('a pipeline needs at least two devices that compute. Give more devices, or use "balanced".')
    if schedule not in (None, "gpipe"):
        raise SpecError(
            f'the schedule "{schedule}" needs a process per device: plan with launch="processes", or use "gpipe".'
        )
    if num_microbatches is None:
        return
    if num_microbatches < 1:
        raise SpecError(f"num_microbatches must be at least 1, got {num_microbatches}.")
    if num_microbatches > batch.size:
        raise SpecError(
            f"a batch of {batch.size} can't be divided into {num_microbatches} micro-batches: use at most "
            f"{batch.size}, or a larger batch."
        )

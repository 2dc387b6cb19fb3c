"""Stages of a pipeline in one process: devices, micro-batches and cuts are searched, the best few priced by the engine.

ways to run ──▶ partitions of each (`stages`) ──formula──▶ a dozen ──`simulate`──▶ a few ──the engine──▶ one

A process per device is planned by `search`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import permutations

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cluster.device import Device
from autoshard.common.module_paths import above, parent
from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Estimate
from autoshard.engine.pricer import Pricer
from autoshard.engine.timing import op_seconds
from autoshard.errors import PlanError, SpecError
from autoshard.flow import flow
from autoshard.plan import Mesh, Plan, Stage
from autoshard.plan.batching import BatchAxis
from autoshard.plan.choices import check_choices
from autoshard.profile.part import part_of_batch
from autoshard.profile.profile import Profile
from autoshard.profile.units import find_units, tensor_units
from autoshard.strategies.compare import value_of
from autoshard.strategies.paths import collapse
from autoshard.strategies.stages import Array, Cutting, StageCuts, Way, between, layer_begins, layer_figures

_MOST_PARTS = 8
"""Micro-batches per device above which there is nothing to win: the bubble is below an eighth of a device's time."""
_FEW = 8
"""Devices up to which every number of them is tried."""
_MOST_ORDERS = 24
_DOZEN, _SIMULATED_ACTIONS, _PRICED_OPS = 12, 10_000, 8_000
"""Partitions that are looked at; actions of schedules that are simulated, but a dozen partitions in any case; and ops
of the run, times partitions that are priced."""
_CLOSE, _AS_GOOD = 1.15, 1.002
"""How much worse than the best, by the formula, what is looked at may be; what counts as equal."""
_TIGHT, _ROOMS = 0.6, (1.0, 1.25, 0.85, 0.7, 0.5)
"""Parts of the memory that are searched with: what a stage holds is known roughly before it is priced.

More than all of it only where memory may have decided, so that the fullest device is used by so much; less only where
nothing fitted.
"""


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
    ways = list(_ways(profile, batch, devices, num_microbatches))
    training = profile.graph.backward_begin < len(profile.graph.ops)
    goal = "latency" if objective == "throughput" and not compared else objective
    figure = "load" if goal == "memory" else "busiest" if goal == "throughput" and not training else "seconds"
    searches = partial(_searches, profile, cluster, batch, ways, figure)
    price = pricer or Pricer(profile, cluster)
    best, closest = _best(searches, partial(_write, profile, batch, objective), price, goal, len(profile.graph.ops))
    if best is None:
        raise PlanError(_refusal(closest, devices))
    plan, figures = best
    plan = replace(plan, reasons=tuple(_reasons(profile, plan, figures, devices)))
    moves = flow(profile.graph, {path: str(i) for i, stage in enumerate(plan.stages) for path in stage.paths})
    return replace(plan, aligned=moves.aligned, written_back=moves.written_back)


# ---- ways to run stages


def _ways(profile: Profile, batch: BatchAxis, devices: Sequence[Device], num_microbatches: int | None) -> Iterator[Way]:
    """Yield stages on any number of devices, the simplest first."""
    count = len(devices)
    most = min(count, len(find_units(profile).paths))
    numbers = range(2, most + 1) if count <= _FEW else [*(p for p in (2, 4, 8, 16, 32, 64, 128) if p < count), count]
    for number in (one for one in numbers if one <= most):
        for micro in [num_microbatches] if num_microbatches else _parts(batch.size, number):
            for used in _orders(profile, devices, number):
                yield Way(devices=used, microbatches=micro)


def _parts(size: int, positions: int) -> list[int]:
    """Numbers of micro-batches, up to where there is nothing to win.

    Those that divide the batch, and those that the positions divide: the last ones may be smaller.
    """
    found = {m for m in range(1, size + 1) if size % m == 0 and m <= _MOST_PARTS * positions}
    return sorted(found | {m for m in (positions, 2 * positions, 4 * positions) if m <= size})[-8:]


def _orders(profile: Profile, devices: Sequence[Device], count: int) -> list[tuple[Device, ...]]:
    """Orders of so many devices for the stages, those that differ; the given one first."""
    kinds = {device.name: (device.speed, device.memory_bytes, device.overhead_bytes, device.host) for device in devices}
    if len(set(kinds.values())) == 1:
        return [tuple(devices[:count])]
    seconds = {device.name: float(op_seconds(profile, device).sum()) for device in devices}
    several = [
        devices,
        *(sorted(devices, key=lambda device: way * seconds[device.name]) for way in (1, -1)),
        sorted(devices, key=lambda device: (-device.budget_bytes, seconds[device.name])),
        *(permutations(devices, count) if len(devices) <= 4 else ()),
    ]
    found: dict[object, tuple[Device, ...]] = {}
    for order in several:
        picked = tuple(order[:count])
        found.setdefault(tuple(kinds[device.name] for device in picked), picked)
    return list(found.values())[:_MOST_ORDERS]


# ---- the search


def _searches(
    profile: Profile, cluster: Cluster, batch: BatchAxis, ways: Sequence[Way], figure: str, room: float
) -> Iterator[tuple[StageCuts, Array]]:
    """The cuts of every way, and where its layers begin."""
    units, graph = find_units(profile), profile.graph
    devices = [device for device in cluster.devices if device.name != "disk"]
    most = max(way.microbatches for way in ways)
    few = part_of_batch(profile, batch, -(-batch.size // most))
    ends: dict[bytes, tuple[object, object]] = {}
    for way in ways:
        begins = layer_begins(units, len(way.devices))
        key = begins.tobytes()
        if key not in ends:
            ends[key] = tuple(layer_figures(profile, one, begins, devices) for one in (few, profile))  # type: ignore
        least, rows = -(-batch.size // most), -(-batch.size // way.microbatches)
        part = (rows - least) / max(batch.size - least, 1)
        yield StageCuts(
            between(*ends[key], part), way, cluster, figure,  # type: ignore[arg-type]
            training=graph.backward_begin < len(graph.ops), room=room,
        ), begins  # fmt: skip


def _best(
    searches: Callable[[float], Iterator[tuple[StageCuts, Array]]], write: Callable[[Cutting, Array], Plan],
    price: Callable[[Plan], Estimate], goal: str, ops: int,
) -> tuple[tuple[Plan, Estimate] | None, Estimate | None]:  # fmt: skip
    """The best plan that fits, and what lacks least of those that don't; between equals the simplest."""
    best: tuple[float, Cutting, Plan, Estimate] | None = None
    closest: Estimate | None = None
    for room in _ROOMS:
        if best is not None and (room < 1 or (best[1].load <= _TIGHT and not any(best[1].recompute))):
            break
        found = [(one, search, begins) for search, begins in searches(room) for one in search.cuttings()]
        found.sort(key=lambda row: (float(f"{row[0].value:.3g}"), row[0].way.simplicity))
        timed, actions = list[tuple[float, Cutting, Array]](), 0
        for one, search, begins in found:
            actions += 2 * len(one.way.devices) * one.way.microbatches
            if actions > _SIMULATED_ACTIONS and len(timed) >= _DOZEN:
                break
            timed.append((search.simulated(one), one, begins))
        timed.sort(key=lambda row: (float(f"{row[0]:.3g}"), row[1].way.simplicity))
        for value, one, begins in timed[: max(2, min(_DOZEN, _PRICED_OPS // max(ops, 1)))]:
            if best is not None and (value > timed[0][0] * _CLOSE or (room > 1 and value > best[0] / _AS_GOOD)):
                break
            plan = write(one, begins)
            try:
                figures = price(plan)
            except PlanError:  # stages that can't be cut there
                continue
            exact = value_of(figures, goal, plan.workload.training)
            if not figures.fits:
                closest = figures if closest is None or _lacking(figures) < _lacking(closest) else closest
            elif best is None or exact < best[0] / _AS_GOOD or (
                exact <= best[0] * _AS_GOOD and one.way.simplicity < best[1].way.simplicity
            ):  # fmt: skip
                best = exact, one, plan, figures
    return None if best is None else best[2:], closest


def _lacking(figures: Estimate) -> int:
    return max(-device.free_bytes for device in figures.devices)


# ---- the plan


def _write(profile: Profile, batch: BatchAxis, objective: str, one: Cutting, begins: Array) -> Plan:
    """Write down what was decided."""
    units, graph, names = find_units(profile), profile.graph, [device.name for device in one.way.devices]
    boundaries = begins[list(one.cuts[1:-1])]
    stage_of_unit = np.searchsorted(boundaries, np.arange(len(units.paths)), side="right")
    stage_of = {name: str(stage_of_unit[unit]) for name, unit in tensor_units(graph, units).items()}
    paths: list[list[str]] = [[] for _ in one.recompute]
    for path, stage in (collapse(stage_of, graph) if stage_of else {"": "0"}).items():
        paths[int(stage)] += opened(path, graph) if one.recompute[int(stage)] else [path]
    stages = zip(paths, one.recompute, strict=True)
    return Plan(
        strategy="pipeline", objective=objective, workload=profile.workload,
        devices=tuple(map(plan_device, one.way.devices)),
        placements={path: name for name, own in zip(names, paths, strict=True) for path in own},
        num_microbatches=one.way.microbatches, schedule="gpipe", fingerprint=graph.fingerprint,
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


def _reasons(profile: Profile, plan: Plan, figures: Estimate, devices: Sequence[Device]) -> Iterator[str]:
    """Say how a pipeline runs, what is recomputed, which device is fullest, and which are not used."""
    run, batch = figures.pipelining, plan.batch
    assert batch is not None
    names = {device.name for device in plan.devices}
    if run is None:  # an answer: it is priced in one piece
        yield f"{len(plan.stages)} stages on {len(names)} devices in turns: generate() does not divide a batch"
        yield _fullest(figures)
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
    yield _fullest(figures)
    unused = [device.name for device in devices if device.name not in names]
    if unused:
        yield f"{', '.join(unused)} not used: more stages would wait for each other longer"
    alone = min(float(op_seconds(profile, device).sum()) for device in devices)
    fits = profile.peak_bytes <= max(device.budget_bytes for device in devices)
    if plan.objective != "memory" and fits and alone < figures.latency_seconds:
        yield (
            f"one device alone would be faster ({alone / figures.latency_seconds:.0%} of the time): a pipeline was "
            "asked for"
        )


def _refusal(figures: Estimate | None, devices: Sequence[Device]) -> str:
    """Say what is lacking, and what may help."""
    there = sum(device.budget_bytes for device in devices)
    short = f"no stages were found that go into the {format_bytes(there)} of {len(devices)} devices"
    if figures is not None:
        lacking = [f"{one.name} {format_bytes(-one.free_bytes)}" for one in figures.devices if one.free_bytes < 0]
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


def _fullest(figures: Estimate) -> str:
    full = figures.fullest
    return f"{full.name} is fullest: {format_bytes(full.peak_bytes)} of {format_bytes(full.memory_bytes)}"

"""Pipeline: stages, micro-batches, schedule and recomputing chosen together, then checked by the exact estimate."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.capture.graph import ModelGraph
from autoshard.choices import check_choices
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cost import tensor_units
from autoshard.errors import PlanError, SpecError
from autoshard.estimate import Estimate
from autoshard.mesh_cost import Pricer
from autoshard.module_paths import above, parent
from autoshard.pipeline_cost import Run, price, run_plan
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.sizes import format_bytes
from autoshard.strategies.compare import value_of
from autoshard.strategies.lines import Lines
from autoshard.strategies.paths import collapse
from autoshard.strategies.pipeline_choice import Best, Choice, choices_for, choose, is_better

_TRIES = 5
"""Rounds of searching and checking exactly; a device that came out too full has less to hold in the next."""
_PRICED_OPS = 8_000
"""Ops of the run, times partitions, that are priced exactly to pick the best of those that come close."""
_MOST_PRICED = 200
"""Partitions of small models that are priced exactly."""
_CLOSE = 1.1
"""How much worse than the best, by the figures of the search, what is priced exactly may be."""
_FEW_STAGES = 4
"""Stages up to which every set of them is tried to compute again, where memory is the objective."""
_ROOMS = (1.0, 1.3, 0.75)
"""Parts of the memory that are searched with for it: what a stage keeps is known roughly before it is priced."""


def pipeline(
    profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput",
    num_microbatches: int | None = None, schedule: str | None = None, processes: int = 0,
    pricer: Pricer | None = None, compared: bool = False,
) -> Plan:  # fmt: skip
    """Plan a pipeline; `processes`: how many run, 0 if all devices are used from one; `pricer` is told what it costs.

    For "throughput" the seconds of one batch count, so that its micro-batches overlap. Where the plan is `compared`
    with other strategies, batches may overlap too: then those of the busiest device do.

    Raises `SpecError` for numbers and names that make no sense, `PlanError` if nothing fits.
    """
    processes = processes if processes > 1 else 0
    _check(cluster, batch, objective, num_microbatches, schedule, processes)
    computing = replace(cluster, devices=tuple(d for d in cluster.devices if d.name != "disk"))
    units = find_units(profile)
    if len(units.paths) < 2:
        raise PlanError(
            "a pipeline needs at least two modules with parameters, one per stage: this model has "
            f'{len(units.paths)}. Use strategy="balanced".'
        )
    lines = Lines(profile, computing, batch, units, one_thread=not processes)
    choices = list(choices_for(len(computing.devices), batch.size, lines, num_microbatches, schedule, processes))
    if not choices:
        raise PlanError(_no_choice(len(computing.devices), len(units.paths), num_microbatches, schedule, processes))
    goal = "latency" if objective == "throughput" and not compared else objective
    task = _Task(profile, computing, batch, units, lines, choices, objective, goal, processes)
    drawn = _close_ones(task) or _first_that_fits(task)
    plan, run, figures, best = drawn.plan, drawn.run, drawn.figures, drawn.best
    if pricer is not None and not profile.workload.new_tokens:  # generating runs otherwise
        pricer.remember(plan, figures)
    plan = replace(plan, reasons=_explain(computing, lines, best, figures, processes))
    if processes:
        return plan
    marks = run.figures
    return replace(plan, aligned=marks.aligned, written_back=marks.written_back)


class _Task(NamedTuple):
    """What is asked."""

    profile: Profile
    cluster: Cluster
    batch: BatchAxis
    units: Units
    lines: Lines
    choices: Sequence[Choice]
    objective: str
    goal: str
    processes: int

    @property
    def capacity(self) -> np.ndarray:
        """[devices] bytes for tensors."""
        return np.array([float(device.budget_bytes) for device in self.cluster.devices])


class _Drawn(NamedTuple):
    """A choice as a plan, priced op by op."""

    best: Best
    plan: Plan
    run: Run
    figures: Estimate


def _draw(task: _Task, best: Best) -> _Drawn:
    plan = write_plan(task.profile, task.cluster, task.batch, task.units, best, task.objective)
    run = run_plan(plan, task.profile, task.cluster, processes=task.processes > 0)
    return _Drawn(best, plan, run, price(run, plan, task.profile, task.cluster, best.bound))


def _first_that_fits(task: _Task) -> _Drawn:
    """The best choice by the search that fits; a device that came out too full has less to hold in the next round."""
    capacity, short = task.capacity, dict[str, int]()
    for _ in range(_TRIES):
        best = choose(task.lines, task.choices, capacity, task.goal)
        if best is None:
            break
        drawn = _draw(task, best)
        if drawn.figures.fits:
            return drawn
        short = {d.name: -d.free_bytes for d in drawn.figures.devices if d.free_bytes < 0}
        over = np.array([max(-d.free_bytes, 0) * 1.02 for d in drawn.figures.devices])
        capacity = np.maximum(capacity - over, 0.0)
    raise PlanError(_refusal(task.lines, task.choices, capacity, short, task.cluster))


def _close_ones(task: _Task) -> _Drawn | None:
    """The best of all that come close by the search, each priced op by op; None for runs of many ops."""
    most = min(_MOST_PRICED, _PRICED_OPS // max(len(task.profile.graph.ops), 1))
    if most < 2 * len(_ROOMS):
        return None
    found: dict[tuple[object, ...], Best] = {}
    for room in _ROOMS:
        best = choose(task.lines, task.choices, task.capacity * room, task.goal, every=True)
        for one in () if best is None else (best, *best.rivals, *_otherwise_kept(task, best)):
            key = one.choice, one.found.cuts, one.found.devices, one.found.recompute
            found.setdefault(key, replace(one, rivals=()))
    least: tuple[float, _Drawn] | None = None
    for one in sorted(found.values(), key=lambda one: one.value)[:most]:
        if least is not None and task.goal != "memory" and one.value > least[0] * _CLOSE:
            break
        drawn = _draw(task, one)
        value = value_of(drawn.figures, task.goal, task.lines.training)
        if drawn.figures.fits and (least is None or is_better(value, one.choice, least[0], least[1].best.choice)):
            least = value, drawn
    return None if least is None else least[1]


def _otherwise_kept(task: _Task, best: Best) -> Iterator[Best]:
    """The same stages with others of them computing again: where memory is the objective, bytes decide that."""
    choice, stages = best.choice, len(best.found.recompute)
    if task.goal != "memory" or not task.lines.training or choice.schedule == "zero-bubble":
        return
    every = [(False,) * stages, (True,) * stages]
    for way in product((False, True), repeat=stages) if stages <= _FEW_STAGES and choice.per_device == 1 else every:
        yield replace(best, found=replace(best.found, recompute=way), rivals=())


def _check(
    cluster: Cluster, batch: BatchAxis, objective: str, num_microbatches: int | None, schedule: str | None,
    processes: int,
) -> None:  # fmt: skip
    check_choices(objective=objective, schedule=schedule)
    devices = sum(device.name != "disk" for device in cluster.devices)
    if devices < 2:
        raise SpecError('a pipeline needs at least two devices that compute. Give more devices, or use "balanced".')
    if processes > 1 and processes != devices:
        raise SpecError(f"a pipeline over {devices} devices needs as many processes; {processes} run.")
    if not processes and schedule in ("interleaved", "zero-bubble"):
        raise SpecError(
            f'the schedule "{schedule}" needs a process per device: run under torchrun, or use "gpipe" or "1f1b".'
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
    if processes and batch.size % num_microbatches:
        good = max(m for m in range(1, num_microbatches) if batch.size % m == 0)
        raise SpecError(
            f"under torchrun all micro-batches have equally many rows: a batch of {batch.size} is not a multiple of "
            f"{num_microbatches}. Use {good} micro-batches, or another batch."
        )


def write_plan(
    profile: Profile, cluster: Cluster, batch: BatchAxis, units: Units, best: Best, objective: str
) -> Plan:  # fmt: skip
    """Write down what was decided."""
    found, choice, graph = best.found, best.choice, profile.graph
    cuts = best.line.begins[list(found.cuts[1:-1])]
    stage_of_unit = np.searchsorted(cuts, np.arange(len(units.paths)), side="right")
    stage_of = {name: str(stage_of_unit[unit]) for name, unit in tensor_units(graph, units).items()}
    placed = collapse(stage_of, graph) if stage_of else {"": "0"}
    paths: list[list[str]] = [[] for _ in found.recompute]
    for path, stage in placed.items():
        again = found.recompute[int(stage)]
        paths[int(stage)] += opened(path, graph) if again else [path]
    names = [cluster.devices[d].name for d in found.devices]
    devices = [cluster.device(name) for name in names]
    return Plan(
        strategy="pipeline",
        objective=objective,
        workload=profile.workload,
        devices=tuple(plan_device(d) for d in devices),
        placements={path: names[i % len(names)] for i, own in enumerate(paths) for path in own},
        num_microbatches=choice.microbatches,
        schedule=choice.schedule,
        fingerprint=graph.fingerprint,
        mesh=Mesh(pp=choice.positions),
        batch=batch,
        stages=tuple(
            Stage(paths=tuple(own), recompute=again) for own, again in zip(paths, found.recompute, strict=True)
        ),
    )


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


def _explain(cluster: Cluster, lines: Lines, best: Best, figures: Estimate, processes: int) -> tuple[str, ...]:
    """Say what was chosen and why, in sentences."""
    choice, found, pipelining, objective = best.choice, best.found, figures.pipelining, figures.objective
    assert pipelining is not None
    used = [cluster.devices[d].name for d in found.devices]
    stages = choice.positions * choice.per_device
    size = lines.batch.size
    reasons = [
        f"{stages} stages on {len(used)} devices, the batch of {size} in {choice.microbatches} micro-batches, schedule "
        f"{choice.schedule}: devices wait {pipelining.bubble:.0%} of the time"
    ]
    again = [i for i, yes in enumerate(found.recompute) if yes]
    if again:
        which = "all stages" if len(again) == stages else f"stage{'s' * (len(again) > 1)} {', '.join(map(str, again))}"
        reasons.append(
            f"{which} compute activations again in backward instead of keeping them: else the activations of "
            f"{max(s.in_flight for s in pipelining.stages)} micro-batches don't fit"
        )
    if choice.schedule == "1f1b" and not processes:
        reasons.append(
            "keeping all micro-batches' activations is slower or too much here: train with autoshard.schedule(model), "
            "which runs backwards in between; output.backward() would keep them all"
        )
    fullest = max(figures.devices, key=lambda d: d.peak_bytes / max(d.memory_bytes, 1))
    reasons.append(
        f"{fullest.name} is fullest: {format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.memory_bytes)}"
    )
    unused = [device.name for device in cluster.devices if device.name not in used]
    if unused:
        reasons.append(f"{', '.join(unused)} not used: more stages would wait for each other longer")
    single = _one_device(lines)
    if objective != "memory" and single is not None and single < figures.latency_seconds:
        reasons.append(
            f"one device alone would be faster ({single / figures.latency_seconds:.0%} of the time): a pipeline was "
            "asked for"
        )
    if objective != "memory":
        reasons.append(
            f"no pipeline of these devices is more than {figures.latency_seconds / best.bound - 1:.1%} faster by the "
            "lower bound" if best.bound > 0 else "no speed of the devices is known"
        )  # fmt: skip
    return tuple(reasons)


def _one_device(lines: Lines) -> float | None:
    """Seconds of the whole batch on the fastest device that has room for it; None if there is none."""
    line = lines.line(1, 1)
    need = float((line.static + line.kept + line.lasting).sum() + line.transient.max(initial=0.0))
    able = [d for d in range(len(line.capacity)) if need <= line.capacity[d]]
    return min((float((line.forward[d] + line.backward[d]).sum()) for d in able), default=None)


def _no_choice(
    devices: int, units: int, num_microbatches: int | None, schedule: str | None, processes: int
) -> str:  # fmt: skip
    if processes > units:
        return (
            f"{processes} stages need as many modules with parameters, and the model has {units}: a stage would be "
            f"without parameters. Use at most {units} processes."
        )
    asked = f"{num_microbatches} micro-batches" if num_microbatches else "this batch"
    return (
        f"no pipeline over {devices} devices can run {asked}{f' with the schedule {schedule!r}' if schedule else ''}: "
        'use another number of micro-batches, or schedule="gpipe".'
    )


def _refusal(
    lines: Lines, choices: Sequence[Choice], capacity: np.ndarray, short: dict[str, int], cluster: Cluster
) -> str:
    """Say what is lacking, and one change."""
    change = "Use more micro-batches, more devices, a smaller batch"
    if short:
        lack = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in short.items())
        start = f"no pipeline fits: in the last one tried there is too little on {lack}"
    else:
        line = lines.line(max(choice.microbatches for choice in choices), lines.count)
        alone = line.always + line.transient
        largest, room = int(alone.argmax()), max(cluster.devices, key=lambda device: device.budget_bytes)
        if alone[largest] > room.budget_bytes:
            change = "Use a smaller batch, a device with more memory"
            path = next(iter(lines.units.paths[int(line.begins[largest])]), "") or "the model"
            start = (
                f"no pipeline fits: {path} alone needs {format_bytes(float(alone[largest]))}, with what it hands out "
                f"for the whole batch, and {room.name} has {format_bytes(room.budget_bytes)}"
            )
        else:
            needed, there = float(line.always.sum()), sum(device.budget_bytes for device in cluster.devices)
            more = ", more while they run" if needed <= there else ""
            start = (
                f"no pipeline fits: its stages need at least {format_bytes(needed)} at the end of a pass{more}, "
                f"and the devices have {format_bytes(there)} together"
            )
    return f'{start}. {change}, or strategy="balanced".'

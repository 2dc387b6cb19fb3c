"""Stages of a pipeline, alone or in a mesh with replicas and tensor-parallel ranks: chosen together, then priced.

    cluster      host0 [ 0 1 2 3 ]   host1 [ 4 5 6 7 ]
    2 x 2 x 2    replica 0: stages [0 1] [2 3]    replica 1: stages [4 5] [6 7]

Ranks of a tensor-parallel group are neighbours, so they share a host where they can; stages follow one another;
replicas are furthest apart: they exchange least often. What can be cut, and at what degree, is what the axis analysis
found; only what wins is proved. A mesh needs one process per device (torchrun), a pipeline may do with one for all.
"""

from dataclasses import replace

import numpy as np

from autoshard.axes.groups import AxisGroups
from autoshard.batching import BatchAxis
from autoshard.capture.graph import ModelGraph
from autoshard.choices import check_choices
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.cost import tensor_units
from autoshard.engine.pricer import Pricer
from autoshard.errors import PlanError, SpecError
from autoshard.flow import flow
from autoshard.module_paths import above, parent
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, find_units
from autoshard.sharding import Cut
from autoshard.strategies.column_parallel import Prove
from autoshard.strategies.cut_results import find_results
from autoshard.strategies.cut_task import Shares
from autoshard.strategies.mesh_lines import MeshLines
from autoshard.strategies.mesh_reasons import explain_mesh, explain_stages, mesh_refusal, pipeline_refusal
from autoshard.strategies.mesh_search import Candidate, best_mesh
from autoshard.strategies.mesh_shapes import Asked, Shape, meshes, pipelines
from autoshard.strategies.paths import collapse


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
    computing = _computing(cluster)
    units = find_units(profile)
    if len(units.paths) < 2:
        raise PlanError(
            "a pipeline needs at least two modules with parameters, one per stage: this model has "
            f'{len(units.paths)}. Use strategy="balanced".'
        )
    lines = MeshLines(profile=profile, cluster=computing, batch=batch, one_process=not processes)
    asked = Asked(
        units=len(units.paths), rows=batch.size, training=lines.whole.training, processes=processes,
        num_microbatches=num_microbatches, schedule=schedule,
    )  # fmt: skip
    shapes = list(pipelines(asked, computing.devices, lines.seconds))
    if not shapes:
        raise PlanError(_no_choice(len(computing.devices), len(units.paths), num_microbatches, schedule, processes))
    price = pricer or Pricer(profile, cluster, processes=processes > 0)

    def write(candidate: Candidate) -> Plan:
        return replace(write_plan(lines, candidate, objective), strategy="pipeline")

    goal = "latency" if objective == "throughput" and not compared else objective
    best, closest = best_mesh(lines, shapes, goal, write, price)
    if best is None:
        raise PlanError(pipeline_refusal(lines, shapes, None if closest is None else closest.figures))
    plan = replace(best.plan, reasons=explain_stages(lines, best, processes))
    if processes:
        return plan
    moves = flow(profile.graph, {path: str(i) for i, stage in enumerate(plan.stages) for path in stage.paths})
    return replace(plan, aligned=moves.aligned, written_back=moves.written_back)


def hybrid(
    profile: Profile, cluster: Cluster, batch: BatchAxis, found: AxisGroups, prove: Prove, *,
    objective: str = "throughput", num_microbatches: int | None = None, schedule: str | None = None, processes: int = 0,
    price: Pricer | None = None,
) -> Plan:  # fmt: skip
    """Plan a mesh of which at least two dimensions are larger than 1.

    `found`: the axis groups of the same model; `prove`: proves the cuts of what is chosen. `processes`: how many run,
    all of which then take part; 0: as many devices as pay. `price`: of the same profile and cluster. Raises `PlanError`
    if nothing fits.
    """
    price = price or Pricer(profile, cluster)
    computing = _computing(cluster)
    lines = MeshLines(
        profile=profile, cluster=computing, batch=batch, found=found, tracer=price.tracer, objective=objective
    )
    if not processes:  # a process has the device that the plan says; without any, alike ones are neighbours
        hosts = list(dict.fromkeys(device.host for device in computing.devices))
        slow = dict(zip(computing.names, lines.seconds, strict=True))
        order = sorted(computing.devices, key=lambda d: (hosts.index(d.host), slow[d.name]))
        lines = MeshLines(
            profile=profile, cluster=replace(computing, devices=tuple(order)), batch=batch, found=found,
            tracer=price.tracer, objective=objective,
        )  # fmt: skip
    asked = Asked(
        units=lines.whole.count, rows=batch.size, training=lines.whole.training,
        processes=processes if processes > 1 else 0, num_microbatches=num_microbatches, schedule=schedule,
    )  # fmt: skip

    def write(candidate: Candidate) -> Plan:
        return replace(write_plan(lines, candidate, objective), cuts=lines.assumed(candidate.shape))

    while True:
        shapes = list(meshes(asked, lines.cluster.devices, lines.seconds))
        best, closest = best_mesh(lines, shapes, objective, write, price)
        if best is None:
            raise PlanError(mesh_refusal(lines, None if closest is None else closest.figures))
        cuts, refused = _proved(lines, best.candidate.shape, prove)
        if not refused:
            plan = replace(best.plan, cuts=cuts, results=find_results(found, cuts))
            return replace(plan, reasons=explain_mesh(lines, best))
        lines.ban(refused)


def _computing(cluster: Cluster) -> Cluster:
    return replace(cluster, devices=tuple(device for device in cluster.devices if device.name != "disk"))


def _proved(
    lines: MeshLines, shape: Shape, prove: Prove
) -> tuple[tuple[Cut, ...], dict[tuple[int, Shares], str]]:  # fmt: skip
    """The cuts of a shape, proved; and those that can't be, with the reason."""
    options = lines.options(shape)
    outcomes = prove([lines.groups[option.index] for option in options], [option.shares for option in options])
    refused = {
        (option.index, option.shares): found.reason
        for option, found in zip(options, outcomes, strict=True)
        if not isinstance(found, Cut)
    }
    return tuple(found for found in outcomes if isinstance(found, Cut)), refused


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


def write_plan(lines: MeshLines, candidate: Candidate, objective: str) -> Plan:
    """Write down what was decided, but for the cuts."""
    profile, units, shape, found = lines.profile, lines.units, candidate.shape, candidate.found
    devices, rows = lines.devices(shape), lines.rows(shape)
    assert rows is not None
    even = len(set(rows)) == 1
    mesh = Mesh(dp=shape.data, pp=shape.pipeline, tp=shape.tensor, shares=() if even else rows)
    heads = [devices[mesh.rank(pipeline=position)].name for position in range(shape.pipeline)]
    plan = Plan(
        strategy="hybrid", objective=objective, workload=profile.workload, devices=tuple(map(plan_device, devices)),
        placements={"": heads[0]}, num_microbatches=shape.microbatches, schedule=shape.schedule,
        fingerprint=profile.graph.fingerprint, mesh=mesh, batch=lines.batch,
    )  # fmt: skip
    if shape.pipeline == 1:
        return plan
    paths = _stage_paths(profile.graph, units, candidate)
    return replace(
        plan,
        placements={path: heads[i % len(heads)] for i, own in enumerate(paths) for path in own},
        stages=tuple(
            Stage(paths=tuple(own), recompute=again) for own, again in zip(paths, found.recompute, strict=True)
        ),
    )


def _stage_paths(graph: ModelGraph, units: Units, candidate: Candidate) -> list[list[str]]:
    found = candidate.found
    cuts = candidate.line.begins[list(found.cuts[1:-1])]
    stage_of_unit = np.searchsorted(cuts, np.arange(len(units.paths)), side="right")
    stage_of = {name: str(stage_of_unit[unit]) for name, unit in tensor_units(graph, units).items()}
    placed = collapse(stage_of, graph) if stage_of else {"": "0"}
    paths: list[list[str]] = [[] for _ in found.recompute]
    for path, stage in placed.items():
        paths[int(stage)] += opened(path, graph) if found.recompute[int(stage)] else [path]
    return paths


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

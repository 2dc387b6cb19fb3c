"""hybrid: replicas x stages x tensor-parallel ranks on one mesh, chosen together, then checked by the exact estimate.

    cluster      host0 [ 0 1 2 3 ]   host1 [ 4 5 6 7 ]
    2 x 2 x 2    replica 0: stages [0 1] [2 3]    replica 1: stages [4 5] [6 7]

Ranks of a tensor-parallel group are neighbours, so they share a host where they can; stages follow one another;
replicas are furthest apart: they exchange least often. What can be cut, and at what degree, is what the axis analysis
found; only what wins is proved. Every process takes part, so this needs one per device (torchrun).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from autoshard.axes.groups import AxisGroups
from autoshard.batching import BatchAxis
from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.errors import PlanError
from autoshard.estimate import Estimate
from autoshard.mesh_cost import Pricer
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.sharding import Cut
from autoshard.sizes import format_bytes, format_seconds
from autoshard.strategies.column_parallel import Prove
from autoshard.strategies.cut_choice import Option
from autoshard.strategies.cut_results import find_results
from autoshard.strategies.cut_task import Shares, assumed_cuts
from autoshard.strategies.mesh_pose import Poser, mesh_of
from autoshard.strategies.mesh_search import Meshed, Posed, Shape, best_mesh, factorings
from autoshard.strategies.pipeline import write_plan
from autoshard.strategies.pipeline_choice import Best, Choice, choices_for

_TRIES = 6
"""Rounds of searching and checking exactly; the next one knows what a mesh holds beyond what the search counts."""
_FEW = 8
"""Devices up to which tensor-parallel groups may span hosts; up to twice as many, every number of them is tried."""


def hybrid(
    profile: Profile, cluster: Cluster, batch: BatchAxis, found: AxisGroups, prove: Prove, *,
    objective: str = "throughput", num_microbatches: int | None = None, schedule: str | None = None, processes: int = 0,
    price: Pricer | None = None,
) -> Plan:  # fmt: skip
    """Plan a mesh of which at least two dimensions are larger than 1.

    `found`: the axis groups of the same model; `prove`: proves the cuts of what is chosen. `processes`: how many run,
    all of which then take part; 0: as many devices as pay. `price`: of the same
    profile and cluster. Raises `PlanError` if nothing fits.
    """
    computing = replace(cluster, devices=tuple(device for device in cluster.devices if device.name != "disk"))
    price = price or Pricer(profile, cluster)
    poser = Poser(
        profile=profile, cluster=computing, batch=batch, found=found, objective=objective, tracer=price.tracer
    )  # fmt: skip
    if not processes:  # a process has the device that the plan says; without any, alike ones are neighbours
        hosts = list(dict.fromkeys(device.host for device in computing.devices))
        slow = dict(zip(computing.names, poser.seconds.tolist(), strict=True))
        poser.arrange(sorted(computing.devices, key=lambda d: (hosts.index(d.host), slow[d.name])))
    banned: dict[tuple[int, Shares], str] = {}
    while True:
        best, figures = _best(poser, price, objective, num_microbatches, schedule, processes)
        cuts, refused = _proved(poser, best.shape, prove)
        if not refused:
            plan = replace(_plan(poser, best, objective), cuts=cuts, results=find_results(found, cuts))
            return replace(plan, reasons=_explain(poser, best, figures))
        banned |= refused
        poser.task = replace(poser.task, banned=dict(banned))
        poser.forget()


def _best(
    poser: Poser, price: Pricer, objective: str, num_microbatches: int | None, schedule: str | None, processes: int
) -> tuple[Meshed, Estimate]:
    """The best mesh that fits by the exact estimate. Raises `PlanError` if there is none."""
    figures: Estimate | None = None
    searched: dict[Posed, Meshed | None] = {}
    shapes = list(_shapes(poser, num_microbatches, schedule, processes))
    for _ in range(_TRIES):
        found = best_mesh(shapes, poser.pose, objective, searched)
        if found is None:
            break
        plan = replace(_plan(poser, found, objective), cuts=_assumed(poser, found.shape))
        figures = price(plan)
        if figures.fits:
            return found, figures
        poser.lacks(found.shape.ranks, _peaks(plan, figures) - found.held)
    raise PlanError(_refusal(poser, figures))


def _peaks(plan: Plan, figures: Estimate) -> np.ndarray:
    """[positions] bytes on the fullest device of each, without what its driver takes."""
    assert plan.mesh is not None
    by_name = {device.name: device for device in figures.devices}
    peaks = np.zeros(plan.mesh.pipeline)
    for rank, device in enumerate(plan.devices):
        row, position = by_name[device.name], plan.mesh.place(rank)[1]
        peaks[position] = max(peaks[position], row.peak_bytes - row.overhead_bytes)
    return peaks


def _shapes(poser: Poser, num_microbatches: int | None, schedule: str | None, processes: int) -> Iterator[Shape]:
    """Every mesh that makes sense, with every number of micro-batches and schedule."""
    count, size = len(poser.order), poser.batch.size
    hosts = [device.host for device in poser.order]
    widest = count if count <= _FEW else max(map(hosts.count, hosts))
    for used in [processes] if processes > 1 else _counts(count):
        for data, pipeline, tensor in factorings(used):
            if sum(n > 1 for n in (data, pipeline, tensor)) < 2 or tensor > widest or data > size:
                continue
            for variant in (0, 1) if tensor > 1 else (0,):
                if tensor > 1 and poser.ranks(tensor, pipeline > 1, variant) is None:
                    continue
                for microbatches, name, per_device in _schedules(
                    poser, pipeline, size // data, num_microbatches, schedule
                ):
                    yield Shape(data=data, pipeline=pipeline, tensor=tensor, microbatches=microbatches, schedule=name,
                                per_device=per_device, variant=variant)  # fmt: skip


def _counts(count: int) -> list[int]:
    """How many devices to use: of many all, or a power of two."""
    if count <= 2 * _FEW:
        return list(range(count, 1, -1))
    return [count, *(2**k for k in range(count.bit_length() - 1, 0, -1) if 2**k < count)]


def _schedules(
    poser: Poser, pipeline: int, rows: int, num_microbatches: int | None, schedule: str | None
) -> Iterable[tuple[int, str, int]]:
    if pipeline == 1:
        return [(1, "none", 1)] if num_microbatches in (None, 1) else []
    found = choices_for(pipeline, rows, poser.whole, num_microbatches, schedule, pipeline)
    return [(one.microbatches, one.schedule, one.per_device) for one in found]


def _plan(poser: Poser, best: Meshed, objective: str) -> Plan:
    """Write down what was decided, but for the cuts."""
    shape = best.shape
    devices, rows = poser.devices(shape), poser.rows(shape)
    assert rows is not None
    mesh = mesh_of(shape, rows)
    heads = tuple(devices[mesh.rank(pipeline=position)] for position in range(shape.pipeline))
    choice = Choice(
        positions=shape.pipeline, microbatches=shape.microbatches, schedule=shape.schedule, per_device=shape.per_device
    )
    chosen = Best(choice=choice, line=best.line, found=best.found, bound=0.0, value=best.value)
    on_heads = replace(poser.cluster, devices=heads)
    plan = write_plan(poser.profile, on_heads, poser.batch, poser.units, chosen, objective)
    if shape.pipeline == 1:
        plan = replace(plan, stages=(), placements={"": devices[0].name})
    rows_of = (plan_device(d) for d in devices)
    return replace(plan, strategy="hybrid", mesh=mesh, devices=tuple(rows_of))


def _assumed(poser: Poser, shape: Shape) -> tuple[Cut, ...]:
    return assumed_cuts(poser.task, _options(poser, shape))


def _options(poser: Poser, shape: Shape) -> tuple[Option, ...]:
    """What is cut in a shape."""
    ranks = poser.ranks(shape.tensor, shape.pipeline > 1, shape.variant) if shape.tensor > 1 else None
    return () if ranks is None else ranks.options


def _proved(poser: Poser, shape: Shape, prove: Prove) -> tuple[tuple[Cut, ...], dict[tuple[int, Shares], str]]:
    """The cuts of a shape, proved; and those that can't be, with the reason."""
    options = _options(poser, shape)
    outcomes = prove([poser.groups[option.index] for option in options], [option.shares for option in options])
    refused = {
        (option.index, option.shares): found.reason
        for option, found in zip(options, outcomes, strict=True)
        if not isinstance(found, Cut)
    }
    return tuple(found for found in outcomes if isinstance(found, Cut)), refused


def _explain(poser: Poser, best: Meshed, figures: Estimate) -> tuple[str, ...]:
    """Say what was chosen and why, in sentences."""
    shape = best.shape
    stages = shape.pipeline * shape.per_device
    every = ((shape.data, "replicas"), (stages, "stages"), (shape.tensor, "tensor-parallel ranks"))
    parts = [f"{n} {what}" for n, what in every if n > 1]
    reasons = [f"a mesh of {' x '.join(parts)}, {shape.size} devices with a process each (torchrun)"]
    if shape.pipeline > 1:
        bubble = figures.pipelining.bubble if figures.pipelining else 0.0
        reasons.append(
            f"each replica divides its rows into {shape.microbatches} micro-batches, schedule {shape.schedule}: "
            f"devices wait {bubble:.0%} of the time"
        )
    if any(best.found.recompute):
        reasons.append("activations are computed again in backward where they don't fit")
    if figures.collective_seconds:
        reasons.append(f"{format_seconds(figures.collective_seconds)} of a pass are sums between devices")
    full = max(figures.devices, key=lambda device: device.peak_bytes / max(device.memory_bytes, 1))
    reasons.append(f"{full.name} is fullest: {format_bytes(full.peak_bytes)} of {format_bytes(full.memory_bytes)}")
    left = len(poser.order) - shape.size
    if left:
        reasons.append(f"{left} device{'s' if left > 1 else ''} left out: with more a pass takes no less")
    return tuple(reasons)


def _refusal(poser: Poser, figures: Estimate | None) -> str:
    if figures is not None:
        worst = min(figures.devices, key=lambda device: device.free_bytes)
        return (
            f"no mesh fits: in the last one tried {worst.name} lacks {format_bytes(-worst.free_bytes)}. "
            "Use more devices, a smaller batch, or another optimizer."
        )
    need = float(poser.whole.held.sum())
    return (
        f"no mesh of {len(poser.order)} devices fits, or can be made: the model holds {format_bytes(need)} all the "
        f"time, and a batch of {poser.batch.size} rows is divided. Use more devices, or another batch."
    )

"""What a pipeline in one process costs: its stages for one micro-batch (`stages`), in the order of its schedule.

* Seconds over a boundary: for every tensor the link's latency and its bytes over the bandwidth; from neighbour to
  neighbour. Copies are asynchronous. One thread launches all ops, so a pass is never faster than that.
* Peak of a device: what is always there, saved activations of the micro-batches in flight, and the most that the
  running action has beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, Event, Pipelining, StageEstimate, Transfer, gap_above
from autoshard.engine.placed import lower_bound, of_every_device
from autoshard.engine.stages import StageBoundary, StagesCost, stage_figures
from autoshard.engine.timing import optimizer_seconds
from autoshard.errors import PlanError
from autoshard.flow import OUTPUTS, producer_of
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import optimizer_step_bytes
from autoshard.profile.part import part_of_batch
from autoshard.profile.profile import Profile
from autoshard.schedules.orders import PipeAction, make_order
from autoshard.schedules.simulate import Simulated, Times, simulate

KINDS = {"F": "forward", "B": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePass:
    """A pipeline in numbers: its stages, and what came of them by the clock.

    Attributes:
        names: the device of every stage.
        done: seconds until each of them has done its actions. events: of these.
    """

    figures: StagesCost
    names: tuple[str, ...]
    simulated: Simulated
    done: tuple[float, ...]
    events: tuple[Event, ...]


def run_plan(plan: Plan, profile: Profile, cluster: Cluster) -> PipelinePass:
    """Work out the stages of a pipeline and run them by the clock; as `estimate_stages`, which also prices them."""
    mesh, batch, count = plan.mesh, plan.batch, plan.num_microbatches
    if mesh is None or batch is None or len(plan.stages) != mesh.pp:
        raise PlanError("this plan has no stages, or does not say how the batch is divided. Plan again.")
    if batch.size < count:
        raise PlanError(
            f"a batch of {batch.size} can't be divided into {count} micro-batches: use at most {batch.size}, or a "
            "larger batch."
        )
    names = tuple(device.name for device in plan.devices[: mesh.pp])
    part = part_of_batch(profile, batch, ceil(batch.size / count))
    figures = stage_figures(profile, part, plan.stages, [cluster.device(name) for name in names])
    return _run_stages(figures, names, cluster, count, profile.workload)


def estimate_stages(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute what a plan with stages in one process costs.

    Raises `PlanError` if the plan names what the model or the cluster lacks, or can't be run.
    """
    run = run_plan(plan, profile, cluster)
    workload, count, stages = profile.workload, plan.num_microbatches, run.figures.stages
    rows, events, latency = dict[str, DeviceEstimate](), [*run.events], 0.0
    for position, name in enumerate(run.names):
        device = cluster.device(name)
        step = optimizer_seconds(sum(stages[position].trained) * workload.training, workload, device)
        rows[name] = _device_estimate(run, position, device, count, workload, step)
        begin = run.done[position]
        latency = max(latency, begin + step)
        events += [_event(name, "optimizer", begin, begin + step)] if step else []
    launch = count * sum(stage.launch_seconds for stage in stages)
    latency, bound = max(latency, launch), max(launch, lower_bound(profile, cluster, divided=True))
    busiest = min(max(row.compute_seconds + row.transfer_seconds for row in rows.values()), latency)
    return Estimate(
        devices=of_every_device(rows, cluster),
        transfers=_transfers(run, profile, count, cluster),
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=busiest,
        lower_bound_seconds=bound,
        gap=gap_above(busiest if plan.objective == "throughput" and not workload.training else latency, bound),
        aligned=run.figures.aligned,
        written_back=run.figures.written_back,
        notes=profile.graph.notes,
        pipelining=Pipelining(
            schedule=plan.schedule, num_microbatches=count,
            stages=tuple(_stage_estimate(run, i, count if workload.training else 1) for i in range(len(stages))),
            bubble=run.simulated.bubble,
            events=tuple(sorted(events, key=lambda e: (e.begin_seconds, e.device, e.end_seconds))),
        ),
    )  # fmt: skip


def _run_stages(
    figures: StagesCost, names: tuple[str, ...], cluster: Cluster, microbatches: int, workload: Workload
) -> PipelinePass:
    """Run all forwards, then all backwards, by the clock."""
    order = make_order("gpipe", len(names), microbatches, training=workload.training)
    times = Times(
        forward=[stage.forward_seconds for stage in figures.stages],
        backward=[stage.backward_seconds for stage in figures.stages],
        sends=[_over(boundary.tensors, cluster, names, i, 1) for i, boundary in enumerate(figures.boundaries)],
        returns=[_over(boundary.returned, cluster, names, i, -1) for i, boundary in enumerate(figures.boundaries)],
    )
    simulated = simulate(order, times)
    done = [max((ran.end for ran in simulated.ran if ran.device == d), default=0.0) for d in range(len(names))]
    return PipelinePass(
        figures=figures, names=names, simulated=simulated, done=tuple(done),
        events=tuple(_events(figures, names, simulated)),
    )  # fmt: skip


def _device_estimate(
    run: PipelinePass, position: int, device: Device, microbatches: int, workload: Workload, step_seconds: float
) -> DeviceEstimate:
    """Bytes and seconds of one device; the parts are what is live at the moment of the peak, so they add up to it."""
    held = run.figures.stages[position].nbytes
    gradient, activation = _peak(run, position, microbatches, workload, device)
    used = held.parameter + held.buffer + held.optimizer + held.inputs + gradient + activation
    overhead = device.overhead_bytes if used else 0
    return DeviceEstimate(
        name=device.name,
        memory_bytes=device.memory_bytes,
        parameter_bytes=held.parameter,
        buffer_bytes=held.buffer,
        gradient_bytes=gradient,
        optimizer_bytes=held.optimizer,
        activation_bytes=activation + held.inputs,
        overhead_bytes=overhead,
        peak_bytes=used + overhead,
        compute_seconds=run.simulated.busy[position] + step_seconds,
        transfer_seconds=sum(sent.end - sent.begin for sent in run.simulated.sent if sent.destination == position),
    )


def _peak(run: PipelinePass, position: int, microbatches: int, workload: Workload, device: Device) -> tuple[int, int]:
    """(gradients, activations) of a device when both together are largest.

    Each micro-batch keeps its saved activations; what runs adds the largest of its own. After the last forward outputs
    of micro-batches become one tensor, beside them, through which one backward goes; at the end gradients meet the
    optimizer step.
    """
    stage, training = run.figures.stages[position], workload.training
    one = stage.nbytes
    kept = one.kept if training else one.lasting  # of a micro-batch, after its forward
    there, peaks = microbatches * kept, [(0, (microbatches - 1) * kept + one.forward)]
    if microbatches > 1:
        peaks.append((0, there + microbatches * one.outputs))
        there += microbatches * (one.outputs - one.unsaved)
    there += microbatches * one.arriving
    peaks.append((0, there + microbatches * (one.returning if one.arriving else 0)))
    if not training:
        return max(peaks, key=sum)
    there -= microbatches * one.leaving
    for back in range(microbatches):
        coming = one.returning * (microbatches - back - 1) if one.leaving else 0
        running = one.backward if back else one.first_backward
        peaks.append((one.gradient if back else 0, there - one.kept + coming + running))
        there -= one.kept - one.lasting
    step = optimizer_step_bytes(list(stage.trained), workload.optimizer, not device.name.startswith("cpu"))
    return max([*peaks, (one.gradient, there + step)], key=sum)


def _over(
    tensors: Sequence[tuple[int, int]], cluster: Cluster, names: tuple[str, ...], boundary: int, way: int
) -> float:
    """Seconds in which tensors go over a boundary, forwards or back."""
    ends = names[boundary], names[boundary + 1]
    link = cluster.link(*ends[::way])
    return sum(link.seconds(nbytes) for _, nbytes in tensors)


def _events(figures: StagesCost, names: Sequence[str], simulated: Simulated) -> list[Event]:
    """Actions and copies by the clock. Where a stage is computed again, that comes first in its backward."""
    found = []
    for ran in simulated.ran:
        action, stage, begin = ran.action, figures.stages[ran.action.stage], ran.begin
        place = {"stage": action.stage, "microbatch": action.microbatch}
        name = names[ran.device]
        if stage.recompute and action.kind == "B":
            again = min(ran.end, begin + stage.forward_seconds)
            found.append(_event(name, "recompute", begin, again, **place))
            begin = again
        if ran.end > begin or not stage.recompute:
            found.append(_event(name, KINDS[action.kind], begin, ran.end, **place))
    for sent in simulated.sent:
        nbytes = sum(nbytes for _, nbytes in _sent_tensors(figures.boundaries, sent.action))
        place = {"stage": sent.action.stage, "microbatch": sent.action.microbatch}
        source, name = names[sent.source], names[sent.destination]
        found.append(_event(name, "transfer", sent.begin, sent.end, source=source, nbytes=nbytes, **place))
    return found


def _event(device: str, kind: str, begin: float, end: float, **more: int | str) -> Event:
    event = Event(device=device, kind=kind, begin_seconds=begin, end_seconds=end)
    return replace(event, **more)  # type: ignore[arg-type]


def _sent_tensors(boundaries: Sequence[StageBoundary], action: PipeAction) -> tuple[tuple[int, int], ...]:
    return boundaries[action.stage].tensors if action.kind == "F" else boundaries[action.stage - 1].returned


def _stage_estimate(run: PipelinePass, index: int, in_flight: int) -> StageEstimate:
    stage = run.figures.stages[index]
    return StageEstimate(
        device=run.names[index],
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        recompute=stage.recompute,
        in_flight=in_flight,
        activation_bytes=stage.nbytes.kept,
    )


def _transfers(run: PipelinePass, profile: Profile, microbatches: int, cluster: Cluster) -> tuple[Transfer, ...]:
    """Every tensor over every boundary, all micro-batches together."""
    graph, names = profile.graph, run.names

    def row(value: int, nbytes: int, boundary: int, way: int) -> Transfer:
        ends = (names[boundary], names[boundary + 1])[::way]
        readers = (op for op in graph.ops[graph.values[value].op + 1 :] if value in op.inputs)
        reader = next(readers, None)
        return Transfer(
            source=ends[0], destination=ends[1], nbytes=nbytes * microbatches,
            seconds=cluster.link(*ends).seconds(nbytes) * microbatches,
            producer=producer_of(graph, value), consumer=graph.calls[reader.call].path if reader else OUTPUTS,
            backward=way < 0,
        )  # fmt: skip

    found = [row(*one, i, 1) for i, boundary in enumerate(run.figures.boundaries) for one in boundary.tensors]
    return (
        *found,
        *(row(*one, i, -1) for i, boundary in enumerate(run.figures.boundaries) for one in boundary.returned),
    )

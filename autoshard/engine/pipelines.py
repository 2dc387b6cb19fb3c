"""What a pipeline in one process costs: its stages for one micro-batch, in the order of its schedule.

stage 0   forward 3.1 ms, backward 6.2 ms, bytes as in `stage_memory`
  boundary  2 tensors, 4 MiB go over it; the gradient of one of them comes back
stage 1   …

* Seconds over a boundary: for every tensor the link's latency and its bytes over the bandwidth; from neighbour to
  neighbour. Copies are asynchronous. One thread launches all ops, so a pass is never faster than that.
* Peak of a device: what is always there, saved activations of the micro-batches in flight, and the most that the
  running action has beside them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.capture.stages import Staged, divide
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, Event, Pipelining, StageEstimate, Transfer, gap_above
from autoshard.engine.lanes import waiting
from autoshard.engine.placed import lower_bound, of_every_device
from autoshard.engine.stage_memory import StageBytes, StageMemory
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.flow import OUTPUTS, producer_of
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.measure import optimizer_step_bytes, trained_sizes
from autoshard.profile.part import part_of_batch
from autoshard.profile.profile import Profile
from autoshard.schedules.orders import PipeAction, make_order
from autoshard.schedules.simulate import Simulated, Times, simulate

KINDS = {"F": "forward", "B": "backward"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """What crosses from a stage to the next for one micro-batch: tensors (value, bytes), and those with gradients."""

    tensors: tuple[tuple[int, int], ...]
    returned: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage for one micro-batch.

    `launch_seconds`: the part of all its seconds that ops need to be launched. `trained`: bytes of the parameters that
    it trains, in the model's order.
    """

    device: str
    forward_seconds: float
    backward_seconds: float
    recompute: bool
    nbytes: StageBytes
    trained: tuple[int, ...]
    launch_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePass:
    """A pipeline in numbers: its stages, what goes over their boundaries, and what came of them by the clock.

    `mixed_device`, `written_back`: as in `Plan`.
    """

    stages: tuple[StageCost, ...]
    boundaries: tuple[StageBoundary, ...]
    mixed_device: tuple[str, ...]
    written_back: tuple[str, ...]
    simulated: Simulated

    def done(self, pp_rank: int) -> float:
        """Seconds until a device has done its actions."""
        return max((ran.end for ran in self.simulated.ran if ran.device == pp_rank), default=0.0)


def run_plan(plan: Plan, profile: Profile, cluster: Cluster) -> PipelinePass:
    """Work out the stages of a pipeline and run all forwards, then all backwards, by the clock.

    Outputs go to the root's execution device, and a parameter that several stages read is copied to them. Raises
    `PlanError` if the plan does not say how the batch is divided, or its stages don't have all parameters.
    """
    mesh, batch, count = plan.mesh, plan.batch, plan.num_microbatches
    if mesh is None or batch is None or len(plan.stages) != mesh.pp:
        raise PlanError("this plan has no stages, or does not say how the batch is divided. Plan again.")
    if batch.size < count:
        raise PlanError(
            f"a batch of {batch.size} can't be divided into {count} micro-batches: use at most {batch.size}, or a "
            "larger batch."
        )
    part = part_of_batch(profile, batch, ceil(batch.size / count))
    training, names = profile.workload.training, [device.name for device in plan.devices[: mesh.pp]]
    staged = divide(part.graph, [stage.paths for stage in plan.stages])
    memory = StageMemory(profile, part.graph, plan.stages)
    trained = trained_sizes(part.graph) if training else []
    stages = []
    for index, (stage, name) in enumerate(zip(plan.stages, names, strict=True)):
        device = cluster.device(name)
        mine = np.where(np.array(staged.op_stage, np.int64) == index, op_seconds(part, device), 0.0)
        ahead, back = mine[: part.graph.backward_begin], mine[part.graph.backward_begin :]
        again = ahead[memory.runs_again[: len(ahead)]]
        own = tuple(nbytes for tensor, nbytes in trained if memory.owner[tensor] == index)
        stages.append(
            StageCost(
                device=name, forward_seconds=float(ahead.sum()), backward_seconds=float(back.sum() + again.sum()),
                recompute=stage.recompute and training, nbytes=memory.of(index, device, own), trained=own,
                launch_seconds=device.launch_seconds * sum(map(np.count_nonzero, (ahead, back, again))),
            )
        )  # fmt: skip
    boundaries = _boundaries_of(part.graph, staged, len(stages))
    times = Times(
        forward=[stage.forward_seconds for stage in stages],
        backward=[stage.backward_seconds for stage in stages],
        sends=[_over(boundary.tensors, cluster, names, i, 1) for i, boundary in enumerate(boundaries)],
        returns=[_over(boundary.returned, cluster, names, i, -1) for i, boundary in enumerate(boundaries)],
    )
    return PipelinePass(
        stages=tuple(stages), boundaries=boundaries, mixed_device=memory.moves.mixed_device,
        written_back=memory.moves.written_back,
        simulated=simulate(make_order("gpipe", len(names), count, training=training), times),
    )  # fmt: skip


def _boundaries_of(graph: ModelGraph, staged: Staged, count: int) -> tuple[StageBoundary, ...]:
    """Return what goes over every boundary, from neighbour to neighbour; its gradient comes back the same way."""
    tensors: list[list[tuple[int, int]]] = [[] for _ in range(count - 1)]
    returned: list[list[tuple[int, int]]] = [[] for _ in range(count - 1)]
    training = graph.backward_begin < len(graph.ops)
    outputs = set(graph.outputs)
    for crossing in staged.crossings:
        row = graph.values[crossing.value]
        nbytes = graph.copied_bytes(crossing.value)
        for boundary in range(crossing.source, crossing.readers[-1]):
            tensors[boundary].append((crossing.value, nbytes))
            if training and row.requires_grad and not (crossing.value in outputs and crossing.readers == (count - 1,)):
                returned[boundary].append((crossing.value, nbytes))
    return tuple(StageBoundary(tensors=tuple(a), returned=tuple(b)) for a, b in zip(tensors, returned, strict=True))


def estimate_stages(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute what a plan with stages in one process costs.

    Raises `PlanError` if the plan names what the model or the cluster lacks, or can't be run.
    """
    run = run_plan(plan, profile, cluster)
    workload, count, stages = profile.workload, plan.num_microbatches, run.stages
    rows, events = dict[str, DeviceEstimate](), _events(run)
    launch = count * sum(stage.launch_seconds for stage in stages)
    for pp_rank, stage in enumerate(stages):
        name, device = stage.device, cluster.device(stage.device)
        step = optimizer_seconds(sum(stage.trained) * workload.training, workload, device)
        rows[name] = _device_estimate(run, pp_rank, device, count, workload, step)
        begin = run.done(pp_rank)
        end = begin + step
        events += [_event(name, "optimizer", begin, end)] if step else []
        events += [replace(waiting(name, 0.0), begin_seconds=end, end_seconds=launch)] if launch > end else []
    latency = max((event.end_seconds for event in events), default=0.0)
    bound = max(launch, lower_bound(profile, cluster, divided=True))
    busiest = min(max(row.compute_seconds + row.transfer_seconds for row in rows.values()), latency)
    return Estimate(
        devices=of_every_device(rows, cluster),
        transfers=_transfers(run, profile, count, cluster),
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=busiest,
        lower_bound_seconds=bound,
        gap=gap_above(busiest if plan.objective == "throughput" and not workload.training else latency, bound),
        mixed_device=run.mixed_device,
        written_back=run.written_back,
        notes=profile.graph.notes,
        pipelining=Pipelining(
            schedule=plan.schedule, num_microbatches=count,
            stages=tuple(_stage_estimate(stage, count if workload.training else 1) for stage in stages),
            bubble=run.simulated.bubble,
            events=tuple(sorted(events, key=lambda e: (e.begin_seconds, e.device, e.end_seconds))),
        ),
    )  # fmt: skip


def _device_estimate(
    run: PipelinePass, pp_rank: int, device: Device, microbatches: int, workload: Workload, step_seconds: float
) -> DeviceEstimate:
    """Bytes and seconds of one device; the parts are what is live at the moment of the peak, so they add up to it."""
    owner = run.stages[pp_rank].nbytes
    gradient, activation = _peak(run, pp_rank, microbatches, workload, device)
    used = owner.parameter + owner.buffer + owner.optimizer + owner.inputs + gradient + activation
    overhead = device.overhead_bytes if used else 0
    return DeviceEstimate(
        name=device.name,
        memory_bytes=device.memory_bytes,
        parameter_bytes=owner.parameter,
        buffer_bytes=owner.buffer,
        gradient_bytes=gradient,
        optimizer_bytes=owner.optimizer,
        activation_bytes=activation + owner.inputs,
        overhead_bytes=overhead,
        peak_bytes=used + overhead,
        compute_seconds=run.simulated.busy[pp_rank] + step_seconds,
        transfer_seconds=sum(sent.end - sent.begin for sent in run.simulated.sent if sent.destination == pp_rank),
    )


def _peak(run: PipelinePass, pp_rank: int, microbatches: int, workload: Workload, device: Device) -> tuple[int, int]:
    """(gradients, activations) of a device when both together are largest.

    Each micro-batch keeps its saved activations; what runs adds the largest of its own. After the last forward outputs
    of micro-batches become one tensor, beside them, through which one backward goes; at the end gradients meet the
    optimizer step.
    """
    stage, training = run.stages[pp_rank], workload.training
    one = stage.nbytes
    kept = one.kept if training else one.outputs_and_cache  # of a micro-batch, after its forward
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
        there -= one.kept - one.outputs_and_cache
    step = optimizer_step_bytes(list(stage.trained), workload.optimizer, not device.name.startswith("cpu"))
    return max([*peaks, (one.gradient, there + step)], key=sum)


def _over(tensors: Sequence[tuple[int, int]], cluster: Cluster, names: Sequence[str], boundary: int, way: int) -> float:
    """Seconds in which tensors go over a boundary, forwards or back."""
    ends = names[boundary], names[boundary + 1]
    link = cluster.link(*ends[::way])
    return sum(link.seconds(nbytes) for _, nbytes in tensors)


def _events(run: PipelinePass) -> list[Event]:
    """Actions and copies by the clock. Where a stage is computed again, that comes first in its backward."""
    found = []
    for ran in run.simulated.ran:
        action, stage, begin = ran.action, run.stages[ran.action.stage], ran.begin
        place = {"stage": action.stage, "microbatch": action.microbatch}
        name = stage.device
        if stage.recompute and action.kind == "B":
            again = min(ran.end, begin + stage.forward_seconds)
            found.append(_event(name, "recompute", begin, again, **place))
            begin = again
        if ran.end > begin or not stage.recompute:
            found.append(_event(name, KINDS[action.kind], begin, ran.end, **place))
    for sent in run.simulated.sent:
        nbytes = sum(nbytes for _, nbytes in _sent_tensors(run.boundaries, sent.action))
        place = {"stage": sent.action.stage, "microbatch": sent.action.microbatch}
        source, name = run.stages[sent.source].device, run.stages[sent.destination].device
        found.append(_event(name, "transfer", sent.begin, sent.end, source=source, nbytes=nbytes, **place))
    return found


def _event(device: str, kind: str, begin: float, end: float, **more: int | str) -> Event:
    event = Event(device=device, kind=kind, begin_seconds=begin, end_seconds=end)
    return replace(event, **more)  # type: ignore[arg-type]


def _sent_tensors(boundaries: Sequence[StageBoundary], action: PipeAction) -> tuple[tuple[int, int], ...]:
    return boundaries[action.stage].tensors if action.kind == "F" else boundaries[action.stage - 1].returned


def _stage_estimate(stage: StageCost, in_flight: int) -> StageEstimate:
    return StageEstimate(
        device=stage.device,
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        recompute=stage.recompute,
        in_flight=in_flight,
        activation_bytes=stage.nbytes.kept,
    )


def _transfers(run: PipelinePass, profile: Profile, microbatches: int, cluster: Cluster) -> tuple[Transfer, ...]:
    """Every tensor over every boundary, all micro-batches together."""
    graph, names = profile.graph, [stage.device for stage in run.stages]

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

    found = [row(*one, i, 1) for i, boundary in enumerate(run.boundaries) for one in boundary.tensors]
    return (
        *found,
        *(row(*one, i, -1) for i, boundary in enumerate(run.boundaries) for one in boundary.returned),
    )

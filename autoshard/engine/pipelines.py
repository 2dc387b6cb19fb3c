"""What a pipeline in one process costs: one micro-batch of the placed model, in the order of its schedule.

    stage 0   forward 3.1 ms, backward 6.2 ms, bytes as in `stage_memory`
      copies  2 tensors, 4 MiB; the gradient of one of them comes back
    stage 1   …

Ops and copies are those of the flow, as for every placement. Copies are asynchronous. One thread launches all ops, so a
pass is never faster than that.
"""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import (
    DeviceEstimate,
    Estimate,
    Event,
    Pipelining,
    StageEstimate,
    Transfer,
    gap_above,
    waiting,
)  # fmt: skip
from autoshard.engine.placed import lower_bound, moved_copies, of_every_device, of_moments, transfer_of
from autoshard.engine.stage_memory import StageBytes, recomputed, segments_of, stage_bytes
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.flow import Flow, flow
from autoshard.plan import Plan
from autoshard.profile.measure import optimizer_step_bytes, trained_sizes
from autoshard.profile.part import part_of_batch
from autoshard.profile.profile import Profile
from autoshard.schedules.orders import PipeAction, make_order
from autoshard.schedules.simulate import Simulated, Times, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """One stage for one micro-batch.

    `launch_seconds`: the part of all its seconds that ops need to be launched; `trained`: bytes of the parameters that
    it trains, in the model's order.
    """

    device: str
    forward_seconds: float
    backward_seconds: float
    launch_seconds: float
    recompute: bool
    nbytes: StageBytes
    trained: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelinePass:
    """A pipeline by the clock: its stages, and copies of one micro-batch by (boundary, whether backwards)."""

    stages: tuple[StageCost, ...]
    copies: dict[tuple[int, bool], list[Transfer]]
    flow: Flow
    simulated: Simulated


def run_plan(plan: Plan, profile: Profile, cluster: Cluster) -> PipelinePass:
    """Price the stages of a pipeline and run all forwards, then all backwards, by the clock.

    Raises `PlanError` if the plan does not say how the batch is divided, or its stages don't have all parameters.
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
    graph, begin, training = part.graph, part.graph.backward_begin, profile.workload.training
    names = [device.name for device in plan.devices[: mesh.pp]]
    moves, segments = flow(graph, plan.placements), segments_of(graph, plan.stages)
    moves = recomputed(graph, moves, segments)
    trained = trained_sizes(graph) if training else []
    input_bytes = sum(row.nbytes for row in profile.graph.storages if row.kind == "input")
    # Gradients of parameters that several stages read go back once per step, not for each micro-batch.
    of_parameters = {tensor.value for tensor in graph.tensors} | {value for _, value in graph.gradients}
    op_device, again = np.array(moves.op_device, np.int64), np.array(segments >= 0)
    stages = []
    for stage, name in zip(plan.stages, names, strict=True):
        device, own = cluster.device(name), tuple(n for tensor, n in trained if moves.tensor_device[tensor] == name)
        mine = np.where(op_device == moves.devices.index(name), op_seconds(part, device), 0.0)
        back = np.concatenate([mine[begin:], mine[again]])
        stages.append(
            StageCost(
                device=name, forward_seconds=float(mine[:begin].sum()), backward_seconds=float(back.sum()),
                launch_seconds=device.launch_seconds * (np.count_nonzero(mine[:begin]) + np.count_nonzero(back)),
                recompute=stage.recompute and training, trained=own,
                nbytes=stage_bytes(graph, moves, device, own, profile.workload, input_bytes),
            )
        )  # fmt: skip
    copies: dict[tuple[int, bool], list[Transfer]] = {}
    for copy in moved_copies(moves):
        crosses = copy.reason != "output" and {copy.source, copy.destination} <= set(names)
        if crosses and copy.value not in of_parameters:
            boundary = max(names.index(copy.source), names.index(copy.destination)) - 1
            copies.setdefault((boundary, copy.reason == "backward"), []).append(transfer_of(copy, cluster))
    seconds = [
        [sum(one.seconds for one in copies.get((at, back), ())) for at in range(len(names) - 1)]
        for back in (False, True)
    ]
    times = Times(
        forward=[stage.forward_seconds for stage in stages], backward=[stage.backward_seconds for stage in stages],
        sends=seconds[0], returns=seconds[1],
    )  # fmt: skip
    order = make_order("gpipe", len(names), count, training=training)
    return PipelinePass(stages=tuple(stages), copies=copies, flow=moves, simulated=simulate(order, times))


def estimate_stages(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute what a plan with stages in one process costs.

    Raises `PlanError` if the plan names what the model or the cluster lacks, or can't be run.
    """
    run = run_plan(plan, profile, cluster)
    workload, count, stages = profile.workload, plan.num_microbatches, run.stages
    rows, events = dict[str, DeviceEstimate](), _events(run)
    launch = count * sum(stage.launch_seconds for stage in stages)
    for rank, stage in enumerate(stages):
        name, device = stage.device, cluster.device(stage.device)
        step = optimizer_seconds(sum(stage.trained), workload, device)
        rows[name] = _device_estimate(run, rank, device, count, profile, step)
        end = max((ran.end for ran in run.simulated.ran if ran.device == rank), default=0.0)
        if step:
            events.append(Event(device=name, kind="optimizer", begin_seconds=end, end_seconds=end + step))
        if launch > end + step:
            events.append(waiting(name, launch - end - step).starting(end + step))
    latency = max((event.end_seconds for event in events), default=0.0)
    bound = max(launch, lower_bound(profile, cluster, divided=True))
    busiest = min(max(row.compute_seconds + row.transfer_seconds for row in rows.values()), latency)
    every = [one for _, ones in sorted(run.copies.items(), key=lambda item: item[0][::-1]) for one in ones]
    return Estimate(
        devices=of_every_device(rows, cluster),
        transfers=tuple(replace(one, nbytes=count * one.nbytes, seconds=count * one.seconds) for one in every),
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=busiest,
        lower_bound_seconds=bound,
        gap=gap_above(busiest if plan.objective == "throughput" and not workload.training else latency, bound),
        mixed_device=run.flow.mixed_device,
        written_back=run.flow.written_back,
        notes=profile.graph.notes,
        pipelining=Pipelining(
            schedule=plan.schedule, num_microbatches=count,
            stages=tuple(
                StageEstimate(
                    device=stage.device, forward_seconds=stage.forward_seconds,
                    backward_seconds=stage.backward_seconds, recompute=stage.recompute,
                    in_flight=count if workload.training else 1, activation_bytes=stage.nbytes.kept,
                )
                for stage in stages
            ),
            bubble=run.simulated.bubble,
            events=tuple(sorted(events, key=lambda e: (e.begin_seconds, e.device, e.end_seconds))),
        ),
    )  # fmt: skip


def _device_estimate(
    run: PipelinePass, rank: int, device: Device, count: int, profile: Profile, step_seconds: float
) -> DeviceEstimate:
    """Bytes and seconds of one device; the parts are what is live at the moment of the peak, so they add up to it."""
    own, trained, workload = run.stages[rank].nbytes, run.stages[rank].trained, profile.workload
    step = optimizer_step_bytes(trained, workload.optimizer, fused_list=not device.name.startswith("cpu"))
    gradient, activation = own.peak(count, step, training=workload.training)
    parts = {
        "parameter": own.parameter, "buffer": own.buffer, "gradient": gradient, "optimizer": own.optimizer,
        "activation": activation + own.inputs,
    }  # fmt: skip
    sent = sum(sent.end - sent.begin for sent in run.simulated.sent if sent.destination == rank)
    busy = run.simulated.busy[rank] + step_seconds
    return replace(of_moments(device, [parts]), compute_seconds=busy, transfer_seconds=sent)


def _events(run: PipelinePass) -> list[Event]:
    """Actions and copies by the clock. Where a stage is computed again, that comes first in its backward."""
    found = []

    def add(action: PipeAction, name: str, kind: str, begin: float, end: float, source: str = "", n: int = 0) -> None:
        found.append(Event(
            device=name, kind=kind, begin_seconds=begin, end_seconds=end, stage=action.stage,
            microbatch=action.microbatch, source=source, nbytes=n,
        ))  # fmt: skip

    for ran in run.simulated.ran:
        stage, begin, backward = run.stages[ran.action.stage], ran.begin, ran.action.kind == "B"
        if stage.recompute and backward:
            begin = min(ran.end, begin + stage.forward_seconds)
            add(ran.action, stage.device, "recompute", ran.begin, begin)
        add(ran.action, stage.device, "backward" if backward else "forward", begin, ran.end)
    for sent in run.simulated.sent:
        backward = sent.action.kind == "B"
        nbytes = sum(one.nbytes for one in run.copies.get((sent.action.stage - backward, backward), ()))
        source, name = run.stages[sent.source].device, run.stages[sent.destination].device
        add(sent.action, name, "transfer", sent.begin, sent.end, source, nbytes)
    return found

"""What a pipeline costs: its stages for one micro-batch (`stage_cost`), put in the order of its schedule and simulated.

* Seconds of a pass: until the last device is done with its actions, the sums of gradients of parameters that several
  stages hold, and its optimizer step.
* Seconds over a border: for every tensor the link's latency and its bytes over the bandwidth; from neighbour to
  neighbour. Sends are asynchronous.
  In one process one thread launches the ops of all devices: a pass takes as long as that at least.
* Peak of a device: what is always there, what the micro-batches in flight keep, and what the running action needs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from autoshard.cluster.cluster import Cluster, Device
from autoshard.collective_cost import all_reduce_seconds
from autoshard.cost import check_devices, divided_bound, of_every_device, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.estimate import DeviceEstimate, Estimate, Event, Pipelining, StageEstimate, Transfer, gap_above
from autoshard.plan import Mesh, Plan
from autoshard.profile.measure import optimizer_step_bytes
from autoshard.profile.part import part_of_batch
from autoshard.profile.profile import Profile
from autoshard.schedules.orders import Action, Order, in_flight, make_order
from autoshard.schedules.simulate import Simulated, Times, simulate
from autoshard.stage_cost import Border, Figures, stage_figures
from autoshard.workload import Workload

KINDS = {"F": "forward", "B": "backward", "I": "backward", "W": "weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A pipeline in numbers: its stages, the order of its actions, and what came of it by the clock.

    `names`: the device of every position; stage i is on position i mod p. `issue_seconds`: a pass is not faster, as one
    thread launches all ops of all devices; 0 where every device has its own. `joined`: one backward goes through all
    micro-batches; `apart`: each has its own, and outputs become one after the last of them.
    """

    figures: Figures
    names: tuple[str, ...]
    order: Order
    simulated: Simulated
    issue_seconds: float = 0.0
    joined: bool = False
    apart: bool = False


def estimate_pipeline(
    plan: Plan, profile: Profile, cluster: Cluster, *, processes: bool | None = None
) -> Estimate:  # fmt: skip
    """Compute what a plan of stages costs.

    `processes`: whether every device has a process of its own; by default what the schedule and the hosts say. Raises
    `PlanError` if the plan names what the model or the cluster lacks, or can't be run.
    """
    return price(run_plan(plan, profile, cluster, processes=processes), plan, profile, cluster)


def run_plan(plan: Plan, profile: Profile, cluster: Cluster, *, processes: bool | None = None) -> Run:
    """Work out the stages of a plan and run them by the clock; as `estimate_pipeline`, which also prices them."""
    mesh = plan.mesh or Mesh()
    check_devices((device.name for device in plan.devices), cluster, "has stages on")
    if plan.batch is None or len(plan.stages) < mesh.pipeline:
        raise PlanError("this plan has no stages, or does not say how the batch is divided. Plan again.")
    if processes is None:
        processes = needs_processes(plan, cluster)
    names = tuple(plan.devices[mesh.rank(pipeline=position)].name for position in range(mesh.pipeline))
    part = part_of_batch(profile, plan.batch, rows_of_part(plan.batch.size, plan.num_microbatches))
    devices = [cluster.device(names[i % len(names)]) for i in range(len(plan.stages))]
    figures = stage_figures(
        profile, part, plan.stages, devices, processes=processes, schedule=plan.schedule,
        batch=plan.batch,
    )  # fmt: skip
    run = run_schedule(
        figures, names, cluster, plan.schedule, plan.num_microbatches, profile.workload, one_process=not processes
    )
    issue = 0.0 if processes else plan.num_microbatches * sum(s.launch_seconds for s in figures.stages)
    return replace(run, issue_seconds=issue)


def needs_processes(plan: Plan, cluster: Cluster) -> bool:
    """Whether a plan can only run with a process per device: several hosts, or a schedule that one can't issue."""
    hosts = {cluster.device(device.name).host for device in plan.devices}
    return len(hosts) > 1 or plan.schedule in ("interleaved", "zero-bubble")


def rows_of_part(size: int, parts: int) -> int:
    """Rows of the largest of so many parts of a batch. Raises `PlanError` if there are fewer rows than parts."""
    if size < parts:
        raise PlanError(
            f"a batch of {size} can't be divided into {parts} micro-batches: use at most {size}, or a larger batch."
        )
    return ceil(size / parts)


def run_schedule(
    figures: Figures, names: tuple[str, ...], cluster: Cluster, schedule: str, microbatches: int, workload: Workload,
    *, one_process: bool = False,
) -> Run:  # fmt: skip
    """Put stages in the order of a schedule and run it by the clock. "none" is one forward after the other."""
    order = make_order(
        "gpipe" if schedule == "none" else schedule, len(names), microbatches,
        stages_per_device=len(figures.stages) // len(names), training=workload.training, one_process=one_process,
    )  # fmt: skip
    times = Times(
        forward=[stage.forward_seconds for stage in figures.stages],
        backward=[stage.backward_seconds for stage in figures.stages],
        weight=[stage.weight_seconds for stage in figures.stages],
        sends=[_over(border.tensors, cluster, names, i, 1) for i, border in enumerate(figures.borders)],
        returns=[_over(border.returned, cluster, names, i, -1) for i, border in enumerate(figures.borders)],
    )
    joined = one_process and schedule != "1f1b" and workload.training
    return Run(
        figures=figures, names=names, order=order, simulated=simulate(order, times), joined=joined,
        apart=workload.training and not joined,
    )  # fmt: skip


def price(run: Run, plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Put together the estimate of a pipeline that was run by the clock."""
    figures, simulated, names, workload = run.figures, run.simulated, run.names, profile.workload
    per_device = len(run.order)
    done = [max((ran.end for ran in simulated.ran if ran.device == d), default=0.0) for d in range(per_device)]
    events = list(_events(run))
    reduce_seconds = _sum_shared(figures, names, cluster, done, events)
    rows = []
    for position, name in enumerate(names):
        device = cluster.device(name)
        mine = range(position, len(figures.stages), per_device)
        own = sum(nbytes for stage in mine for _, nbytes in figures.stages[stage].trained)
        step = optimizer_seconds(own, workload, device)
        if step:
            events.append(_event(name, "optimizer", done[position], done[position] + step))
            done[position] += step
        incoming = sum(sent.end - sent.begin for sent in simulated.sent if sent.destination == position)
        rows.append(device_estimate(run, position, device, plan.num_microbatches, workload, step, incoming))
    devices = of_every_device({row.name: row for row in rows}, cluster)
    latency = max(*done, run.issue_seconds)
    value = max(row.peak_bytes / max(row.memory_bytes, 1) for row in rows) if plan.objective == "memory" else latency
    bound = max(run.issue_seconds, divided_bound(profile, cluster))
    stages = tuple(_stage_estimate(run, i) for i in range(len(figures.stages)))
    return Estimate(
        devices=devices,
        transfers=_transfers(run, profile, plan.num_microbatches, cluster),
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=min(max(row.compute_seconds + row.transfer_seconds for row in rows), latency),
        lower_bound_seconds=bound,
        gap=gap_above(value, bound),
        aligned=figures.aligned,
        written_back=figures.written_back,
        notes=profile.graph.notes,
        collective_seconds=reduce_seconds,
        all_reduces=len(figures.shared),
        pipelining=Pipelining(
            schedule=plan.schedule,
            num_microbatches=plan.num_microbatches,
            stages=stages,
            bubble=simulated.bubble,
            events=tuple(sorted(events, key=lambda e: (e.begin_seconds, e.device, e.end_seconds))),
        ),
    )


def device_estimate(
    run: Run, position: int, device: Device, microbatches: int, workload: Workload, step_seconds: float,
    incoming_seconds: float,
) -> DeviceEstimate:  # fmt: skip
    """Bytes and seconds of one device; the parts are what is live at the moment of the peak, so they add up to it."""
    mine = [run.figures.stages[i] for i in range(position, len(run.figures.stages), len(run.names))]
    parameter, buffer = (sum(getattr(s.nbytes, kind) for s in mine) for kind in ("parameter", "buffer"))
    optimizer, inputs = (sum(getattr(s.nbytes, kind) for s in mine) for kind in ("optimizer", "inputs"))
    gradient, activation = _peak(run, position, microbatches, workload, device)
    used = parameter + buffer + optimizer + inputs + gradient + activation
    overhead = device.overhead_bytes if used else 0
    return DeviceEstimate(
        name=device.name,
        memory_bytes=device.memory_bytes,
        parameter_bytes=parameter,
        buffer_bytes=buffer,
        gradient_bytes=gradient,
        optimizer_bytes=optimizer,
        activation_bytes=activation + inputs,
        cache_bytes=0,
        transfer_bytes=0,
        overhead_bytes=overhead,
        peak_bytes=used + overhead,
        compute_seconds=run.simulated.busy[position] + step_seconds,
        transfer_seconds=incoming_seconds,
    )


def _peak(run: Run, position: int, microbatches: int, workload: Workload, device: Device) -> tuple[int, int]:
    """(gradients, activations) of a device when both together are largest, by walking through its actions.

    Each micro-batch in flight keeps its saved activations; the running action adds the largest of its own. At the end
    outputs of micro-batches become one tensor, beside them, and gradients meet the optimizer step.
    """
    mine = [stage.nbytes for stage in run.figures.stages[position :: len(run.names)]]
    gradients = there = 0  # `there`: kept between actions
    made: set[int] = set()
    peaks = [(0, 0)]
    row = run.order[position]
    last = max((index for index, action in enumerate(row) if action.kind == "F"), default=-1)
    joining = microbatches > 1 and not run.apart
    merged = microbatches * sum(one.outputs for one in mine) if joining else 0

    for index, action in enumerate(row):
        one = run.figures.stages[action.stage].nbytes
        if action.kind == "F":
            peaks.append((gradients, there + one.forward))
            there += one.kept if workload.training else one.lasting
        elif action.kind != "W":
            first = action.stage not in made
            back = microbatches - len([other for other in row[:index] if other.kind == "B"])
            coming = one.returning * (back - 1) if run.joined and one.leaving else 0
            peaks.append((gradients, there - one.kept + coming + (one.first_backward if first else one.backward)))
            gradients += one.gradient * first
            made.add(action.stage)
        if action.kind in ("B", "W"):
            there -= one.kept - one.lasting
        if index == last and merged:
            peaks.append((gradients, there + merged))
            there += merged - microbatches * sum(one.unsaved for one in mine)
        if index == last and not run.apart:
            there += microbatches * sum(one.arriving for one in mine)
            coming = sum(one.returning for one in mine if one.arriving)
            peaks.append((gradients, there + microbatches * coming))
            there -= (microbatches if run.joined else 0) * sum(one.leaving for one in mine)
    if run.apart and microbatches > 1:
        peaks.append((gradients, there + microbatches * sum(one.outputs for one in mine)))
    if workload.training:
        sizes = [size for stage in run.figures.stages[position :: len(run.names)] for _, size in stage.trained]
        step = optimizer_step_bytes(sizes, workload.optimizer, not device.name.startswith("cpu"))
        peaks.append((gradients, there + step))
    return max(peaks, key=sum)


def _over(tensors: Sequence[tuple[int, int]], cluster: Cluster, names: tuple[str, ...], border: int, way: int) -> float:
    """Seconds in which tensors go over a border, forwards or back."""
    ends = names[border % len(names)], names[(border + 1) % len(names)]
    if ends[0] == ends[1]:
        return 0.0
    link = cluster.link(*ends[::way])
    return sum(link.seconds(nbytes) for _, nbytes in tensors)


def _sum_shared(
    figures: Figures, names: tuple[str, ...], cluster: Cluster, done: list[float], events: list[Event]
) -> float:
    """Sum gradients of parameters that several stages hold: all holders wait for each other. Returns the seconds."""
    total = 0.0
    for nbytes, stages in figures.shared:
        holders = sorted({stage % len(names) for stage in stages})
        seconds = all_reduce_seconds(cluster, [names[position] for position in holders], nbytes)
        begin = max(done[position] for position in holders)
        for position in holders if len(holders) > 1 else ():
            done[position] = begin + seconds
            events.append(_event(names[position], "all-reduce", begin, begin + seconds, nbytes=nbytes))
        total += seconds
    return total


def _events(run: Run) -> list[Event]:
    """Actions and copies by the clock. Where a stage is computed again, that comes first in its backward."""
    found = []
    for ran in run.simulated.ran:
        action, stage, begin = ran.action, run.figures.stages[ran.action.stage], ran.begin
        place = {"stage": action.stage, "microbatch": action.microbatch}
        name = run.names[ran.device]
        if stage.recompute and action.kind in ("B", "I"):
            again = min(ran.end, begin + stage.forward_seconds)
            found.append(_event(name, "recompute", begin, again, **place))
            begin = again
        if ran.end > begin or not stage.recompute:
            found.append(_event(name, KINDS[action.kind], begin, ran.end, **place))
    for sent in run.simulated.sent:
        nbytes = sum(nbytes for _, nbytes in _sent_tensors(run.figures.borders, sent.action))
        place = {"stage": sent.action.stage, "microbatch": sent.action.microbatch}
        source, name = run.names[sent.source], run.names[sent.destination]
        found.append(_event(name, "transfer", sent.begin, sent.end, source=source, nbytes=nbytes, **place))
    return found


def _event(device: str, kind: str, begin: float, end: float, **more: int | str) -> Event:
    event = Event(device=device, kind=kind, begin_seconds=begin, end_seconds=end)
    return replace(event, **more)  # type: ignore[arg-type]


def _sent_tensors(borders: Sequence[Border], action: Action) -> tuple[tuple[int, int], ...]:
    return borders[action.stage].tensors if action.kind == "F" else borders[action.stage - 1].returned


def _stage_estimate(run: Run, index: int) -> StageEstimate:
    stage = run.figures.stages[index]
    return StageEstimate(
        device=run.names[index % len(run.names)],
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        weight_seconds=stage.weight_seconds,
        recompute=stage.recompute,
        in_flight=in_flight(run.order)[index],
        activation_bytes=stage.nbytes.kept,
    )


def _transfers(run: Run, profile: Profile, microbatches: int, cluster: Cluster) -> tuple[Transfer, ...]:
    """Every tensor over every border, all micro-batches together."""
    graph, names = profile.graph, run.names

    def row(value: int, nbytes: int, border: int, way: int) -> Transfer:
        ends = (names[border % len(names)], names[(border + 1) % len(names)])[::way]
        producer = graph.calls[graph.ops[graph.values[value].op].call].path
        readers = (op for op in graph.ops[graph.values[value].op + 1 :] if value in op.inputs)
        reader = next(readers, None)
        return Transfer(
            source=ends[0], destination=ends[1], nbytes=nbytes * microbatches,
            seconds=cluster.link(*ends).seconds(nbytes) * microbatches, producer=producer,
            consumer=graph.calls[reader.call].path if reader else "", backward=way < 0,
        )  # fmt: skip

    if len(names) == 1:
        return ()
    found = [row(*one, i, 1) for i, border in enumerate(run.figures.borders) for one in border.tensors]
    return (*found, *(row(*one, i, -1) for i, border in enumerate(run.figures.borders) for one in border.returned))

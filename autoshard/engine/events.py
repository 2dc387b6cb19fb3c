"""When every device and every link is busy in a predicted pass, for plans of one process.

    cuda:0        | blocks.0 | blocks.1 |          |          |
    to cuda:1                           |==|                        a copy that goes there
    cuda:1                                 | blocks.2 | head |

A pass is lowered to a program (`programs`) of the estimate's own seconds and played: those of a device add up to its
`compute_seconds`, and the last event ends at `latency_seconds`. Where the one thread that launches the ops of all
devices takes longer than they do, they wait for it ("launch"). Neighbouring ops of one module are one event.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from autoshard.capture.graph import ModelGraph, Op
from autoshard.cluster.cluster import Cluster
from autoshard.engine.cuts import Tracer, estimate_cuts, local_profile
from autoshard.engine.estimate import Event, Transfer, waiting
from autoshard.engine.offloaded import (
    PASSES,
    Piece,
    calls_in_order,
    fetches_of,
    offloaded_modules,
    offloaded_program,
)
from autoshard.engine.pipelines import estimate_stages
from autoshard.engine.placed import check_devices, moved_copies
from autoshard.engine.pricer import check_mesh, in_one_piece
from autoshard.engine.programs import play
from autoshard.engine.replicas import run_replicas
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.flow import Copy, Flow, flow
from autoshard.plan import Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile

LINKS = ("transfer", "fetch", "gather", "reduce")
"""Kinds of events that occupy a link into their device, not the device."""


def events(plan: Plan, profile: Profile, cluster: Cluster) -> tuple[Event, ...]:
    """Return what happens in one pass in the long run, in the order in which it begins.

    Raises `PlanError` for a plan that names what the model or the cluster lacks.
    """
    if plan.mesh is not None:
        check_mesh(plan, cluster)
        found = _of_mesh(plan, profile, cluster)
    elif plan.cuts:
        found = _of_cuts(plan, profile, cluster)
    else:
        found = _in_turns(plan, profile, cluster)
    return tuple(sorted(found, key=lambda event: (event.begin_seconds, event.device, event.source)))


def _of_mesh(plan: Plan, profile: Profile, cluster: Cluster) -> Sequence[Event]:
    if profile.workload.new_tokens:
        return _in_turns(in_one_piece(plan), profile, cluster)
    if plan.mesh is not None and plan.mesh.pp == 1:
        return _of_replicas(plan, profile, cluster)
    stages = estimate_stages(plan, profile, cluster).pipelining
    assert stages is not None
    return stages.events


# ---- devices that take turns: ops and copies in the order of the recorded run, and what they wait for


def _in_turns(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """Ops and copies of a plan that places or streams modules; of several passes the one in the middle is drawn."""
    check_devices([*plan.placements.values(), *plan.offloaded.values()], cluster, "needs")
    graph, moves = profile.graph, flow(profile.graph, plan.placements)
    modules = [module for module in offloaded_modules(plan, graph) if module.store != module.device]
    calls, fetches = calls_in_order(modules, graph), fetches_of(modules, graph, cluster)
    drawn = _ordered(profile, cluster, moves, {op for call in calls for op in call[:2]})
    ops = [op for op, _ in drawn]
    waits = {bisect_left(ops, begin): number for number, (begin, _, _) in enumerate(calls)}
    frees = {bisect_left(ops, end) - 1: number for number, (_, end, _) in enumerate(calls)}
    pieces = [
        Piece(seconds=event.end_seconds, waits=waits.get(place, -1), frees=frees.get(place, -1))
        for place, (_, event) in enumerate(drawn)
    ]
    program, ends = offloaded_program(pieces, fetches, PASSES if fetches else 1)
    played = play(program)
    middle = len(ends) // 2
    first, begin = (ends[middle - 1] + 1, played.ends[ends[middle - 1]]) if middle else (0, 0.0)
    own = [number for number in range(first, ends[middle] + 1) if program[number].stream == "compute"]
    found = [event.starting(played.begins[n] - begin) for n, (_, event) in zip(own, drawn, strict=True)]
    found = [event for event in found if event.end_seconds > event.begin_seconds or event.kind == "transfer"]
    end = played.ends[ends[middle]]
    for task, came, there in zip(program, played.begins, played.ends, strict=True):
        if task.stream != "compute" and there > begin and came < end:
            module = modules[calls[int(task.name)][2]]
            nbytes = sum(graph.storages[storage].nbytes for storage in module.storages)
            found.append(Event(
                device=module.device, kind="fetch", begin_seconds=max(came, begin) - begin,
                end_seconds=min(there, end) - begin, source=module.store, nbytes=nbytes, label=module.path,
            ))  # fmt: skip
    return found


def _ordered(profile: Profile, cluster: Cluster, moves: Flow, breaks: Collection[int]) -> list[tuple[int, Event]]:
    """(op, event) of ops and copies one after another, and of the optimizer's steps after them."""
    copies: dict[int, list[tuple[float, Event]]] = {}
    for copy in moved_copies(moves):
        seconds = cluster.link(copy.source, copy.destination).seconds(copy.nbytes)
        copies.setdefault(ceil(copy.born), []).append((copy.born, copied(copy, seconds)))
    found = []
    for begin, event in runs(profile, cluster, moves.devices, moves.op_device, {*copies, *breaks}):
        found += [(int(born), copy) for born, copy in sorted(copies.pop(begin, ()), key=lambda row: row[0])]
        found.append((begin, event))
    end = len(profile.graph.ops)
    found += [(end, copy) for at in sorted(copies) for _, copy in copies[at]]
    return found + [(end, event) for event in optimizer_events(profile, cluster, moves)]


def runs(
    profile: Profile, cluster: Cluster, devices: tuple[str, ...], op_device: tuple[int, ...], breaks: Collection[int]
) -> list[tuple[int, Event]]:
    """Return neighbouring ops of one module on one device, with the first of them; `breaks`: ops that begin anew.

    An op of such a break that takes no time has an event of its own, of 0 seconds.
    """
    graph = profile.graph
    seconds = np.zeros(len(graph.ops))
    placed = np.array(op_device, np.int64)
    for index, name in enumerate(devices):
        if name in cluster.names:
            seconds = np.where(placed == index, op_seconds(profile, cluster.device(name)), seconds)
    busy = np.flatnonzero(seconds)
    found: list[tuple[int, Event]] = []
    for op in sorted({*busy.tolist(), *(op for op in breaks if op < len(graph.ops))}):
        row = graph.ops[op]
        device = devices[placed[op]] if placed[op] >= 0 else ""
        event = Event(
            device=device, kind=kind_of(row, graph), end_seconds=float(seconds[op]), label=graph.calls[row.call].path
        )  # fmt: skip
        begin, before = found[-1] if found else (0, event)
        if found and op not in breaks and replace(before, end_seconds=event.end_seconds) == event:
            found[-1] = begin, replace(before, end_seconds=before.end_seconds + event.end_seconds)
        else:
            found.append((op, event))
    return found


def kind_of(op: Op, graph: ModelGraph) -> str:
    """The kind of an op's event: a forward op that runs after backward has begun computes something again."""
    if op.backward:
        return "backward"
    return "recompute" if op.index >= graph.backward_begin else "forward"


def optimizer_events(profile: Profile, cluster: Cluster, moves: Flow) -> list[Event]:
    """The optimizer's step on every device that has one."""
    trained = trained_sizes(profile.graph) if profile.workload.training else []
    own = dict.fromkeys(cluster.names, 0)
    for name, nbytes in trained:
        if moves.tensor_device[name] in own:
            own[moves.tensor_device[name]] += nbytes
    steps = ((name, optimizer_seconds(own[name], profile.workload, cluster.device(name))) for name in own)
    return [Event(device=name, kind="optimizer", end_seconds=seconds) for name, seconds in steps if seconds]


# ---- devices that work at the same time: ranks of a plan with cuts, replicas


def _of_cuts(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """Ranks side by side: every rank computes, then all of them together add up and put together.

    One process runs its ranks one after another, so that where in a pass they meet says little.
    """
    tracer = Tracer(profile.graph)
    estimate, traced = estimate_cuts(plan, profile, cluster, tracer=tracer), tracer.trace(plan.cuts)
    computing = {device.name: device.compute_seconds for device in estimate.devices}
    names = [device.name for device in plan.devices]
    phases = [[
        event for rank, name in enumerate(names)
        for event in _computing(local_profile(profile, traced, rank), cluster, name, computing[name])
    ]]  # fmt: skip
    for kind in ("all-reduce", "all-gather"):
        own = [one for one in traced.of_pass(profile.workload.training) if one.gathers == (kind == "all-gather")]
        seconds, nbytes = sum(one.seconds(cluster, names) for one in own), sum(one.nbytes for one in own)
        row = Event(device="", kind=kind, end_seconds=seconds, nbytes=nbytes, label=f"{len(own)} in all")
        phases.append([replace(row, device=name) for name in names if own])
    return _one_after_another(phases)


def _of_replicas(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """Parts of the batch go out, every replica computes, gradients are summed, results come back.

    Forward and backward share what a device computes as they do on one device.
    """
    run = run_replicas(plan, profile, cluster)
    first, names = run.replicas[0].name, [replica.name for replica in run.replicas]
    copies = [copied(one, one.seconds) for one in run.transfers]
    computing = []
    for replica in run.replicas:
        computing += _computing(profile, cluster, replica.name, replica.compute_seconds)
        if run.launch_seconds > replica.compute_seconds:
            computing.append(waiting(replica.name, run.launch_seconds - replica.compute_seconds))
    summed = [Event(device=name, kind="all-reduce", end_seconds=run.sum_seconds) for name in names if run.sum_seconds]
    there, back = ([one for one in copies if (one.device == first) == returns] for returns in (False, True))
    return _one_after_another([there, computing, summed, back])


def _computing(profile: Profile, cluster: Cluster, name: str, seconds: float) -> list[Event]:
    """What a device computes in so many seconds, by kind, in proportion to what it would of the whole batch."""
    device, totals = cluster.device(name), dict[str, float]()
    for op, own in zip(profile.graph.ops, op_seconds(profile, device).tolist(), strict=True):
        if own:
            kind = kind_of(op, profile.graph)
            totals[kind] = totals.get(kind, 0.0) + own
    trained = sum(nbytes for _, nbytes in trained_sizes(profile.graph)) if profile.workload.training else 0
    if step := optimizer_seconds(trained, profile.workload, device):
        totals["optimizer"] = step
    whole = sum(totals.values())
    return [Event(device=name, kind=kind, end_seconds=part * seconds / whole) for kind, part in totals.items()]


def _one_after_another(phases: Iterable[Sequence[Event]]) -> list[Event]:
    """Events of phases, each of which begins when all of the one before is over; copies of a phase share one link."""
    found, begin = list[Event](), 0.0
    for phase in phases:
        ends: dict[str, float] = {}
        for event in phase:
            stream = "copies" if event.kind == "transfer" else event.device
            found.append(event.starting(ends.get(stream, begin)))
            ends[stream] = found[-1].end_seconds
        begin = max(ends.values(), default=begin)
    return found


def copied(one: Copy | Transfer, seconds: float) -> Event:
    """A copy that has not begun."""
    label = f"{one.producer or '(model)'} -> {one.consumer or '(model)'}"
    return Event(
        device=one.destination, kind="transfer", end_seconds=seconds, source=one.source, nbytes=one.nbytes, label=label
    )  # fmt: skip

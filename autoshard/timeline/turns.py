"""Devices that take turns: ops and copies in the order of the recorded run, and the waits for streamed modules."""

from collections.abc import Mapping
from math import ceil

import numpy as np

from autoshard.capture.graph import ModelGraph, Op
from autoshard.cluster.cluster import Cluster
from autoshard.cost import check_devices, op_seconds, optimizer_seconds
from autoshard.estimate import Event
from autoshard.flow import HOST_NAME, Copy, Flow, flow
from autoshard.plan import Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.stream_cost import Streamed, module_fetch_seconds, pass_calls, streamed_modules
from autoshard.stream_schedule import Turn, steady_seconds


def of_placements(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """Ops and copies of a plan that places modules: one thing at a time."""
    check_devices(plan.placements.values(), cluster, "places modules on")
    return _in_turn(profile, cluster, flow(profile.graph, plan.placements), {})


def of_streamed(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """The same with waits for what is brought, and the fetches, in the last pass that `stream_schedule` plays.

    A fetch that goes on after the end of the pass is drawn at its begin, where the one of the pass before ends.
    """
    check_devices([*plan.placements.values(), *plan.streamed.values()], cluster, "needs")
    moves = flow(profile.graph, plan.placements)
    timed = [module for module in streamed_modules(plan, profile.graph) if module.store != module.device]
    fetch = [module_fetch_seconds(module, profile.graph, cluster) for module in timed]
    calls, after = pass_calls(profile, cluster, moves, timed)
    turns: list[Turn] = []
    seconds = steady_seconds(calls, after, fetch, [module.store == "disk" for module in timed], turns)
    order = [(begin, module) for begin, module in _in_order(timed) if fetch[module] > 0]
    starts = {order[turn.call][0]: turn.start_seconds for turn in turns}
    found = _in_turn(profile, cluster, moves, starts)
    for turn in turns:
        found += _fetch(timed[order[turn.brought][1]], turn, profile.graph, seconds)
    return found


def _in_order(modules: list[Streamed]) -> list[tuple[int, int]]:
    """(first op, module) of every call, as `pass_calls` orders them."""
    spans = ((begin, end, index) for index, module in enumerate(modules) for begin, end in module.calls)
    return [(begin, index) for begin, _, index in sorted(spans)]


def _fetch(module: Streamed, turn: Turn, graph: ModelGraph, seconds: float) -> list[Event]:
    """A fetch as one event, or two where it goes on in the next pass."""
    nbytes = sum(graph.storages[storage].nbytes for storage in module.storages)
    begin, end = turn.fetch_begin_seconds, turn.fetch_end_seconds
    parts = [(begin, end)] if end <= seconds else [(begin, seconds), (0.0, end - seconds)]
    if begin >= seconds:
        parts = [(begin - seconds, end - seconds)]
    return [
        Event(
            device=module.device, kind="fetch", begin_seconds=at, end_seconds=until, source=module.store,
            nbytes=nbytes, label=module.path,
        )
        for at, until in parts if until > at
    ]  # fmt: skip


def _in_turn(profile: Profile, cluster: Cluster, moves: Flow, starts: Mapping[int, float]) -> list[Event]:
    """Lay out ops and copies one after another; `starts`: op -> no earlier than these seconds."""
    copies: dict[int, list[Copy]] = {}
    for copy in moves.copies:
        if not copy.kept and moves.counts(copy) and HOST_NAME not in (copy.source, copy.destination):
            copies.setdefault(ceil(copy.born), []).append(copy)
    found: list[Event] = []
    clock = 0.0
    breaks = {*copies, *starts}
    for run in runs(profile, cluster, moves.devices, moves.op_device, breaks):
        begin, _, device, kind, label, seconds = run
        for copy in sorted(copies.pop(begin, ()), key=lambda copy: copy.born):
            if copy.born >= begin:
                clock = max(clock, starts.get(begin, 0.0))
            found.append(_transfer(copy, clock, cluster))
            clock = found[-1].end_seconds
        clock = max(clock, starts.get(begin, 0.0))
        if seconds:
            found.append(Event(device=device, kind=kind, begin_seconds=clock, end_seconds=clock + seconds, label=label))
            clock += seconds
    for at in sorted(copies):
        for copy in copies[at]:
            found.append(_transfer(copy, clock, cluster))
            clock = found[-1].end_seconds
    return found + optimizer_events(profile, cluster, moves, clock, together=False)


def _transfer(copy: Copy, clock: float, cluster: Cluster) -> Event:
    return Event(
        device=copy.destination,
        kind="transfer",
        begin_seconds=clock,
        end_seconds=clock + cluster.link(copy.source, copy.destination).seconds(copy.nbytes),
        source=copy.source,
        nbytes=copy.nbytes,
        label=f"{copy.producer or 'inputs'} -> {copy.consumer or 'outputs'}",
    )


def optimizer_events(profile: Profile, cluster: Cluster, moves: Flow, clock: float, *, together: bool) -> list[Event]:
    """The optimizer's step on every device, one after another or all at once."""
    found: list[Event] = []
    trained = trained_sizes(profile.graph) if profile.workload.training else []
    for device in cluster.devices:
        own = sum(nbytes for name, nbytes in trained if moves.tensor_device[name] == device.name)
        seconds = optimizer_seconds(own, profile.workload, device)
        if seconds:
            found.append(Event(device=device.name, kind="optimizer", begin_seconds=clock, end_seconds=clock + seconds))
            clock += 0.0 if together else seconds
    return found


Run = tuple[int, int, str, str, str, float]
"""Ops `begin` to `end` of one module on one device: (begin, end, device, kind, module, seconds)."""


def runs(
    profile: Profile, cluster: Cluster, devices: tuple[str, ...], op_device: tuple[int, ...], breaks: "set[int]"
) -> list[Run]:
    """Return neighbouring ops of one module on one device as runs; `breaks`: ops that begin a new one.

    An op of such a break that takes no time has a run of its own, of 0 seconds.
    """
    graph = profile.graph
    seconds = np.zeros(len(graph.ops))
    placed = np.array(op_device, np.int64)
    for index, name in enumerate(devices):
        if name in cluster.names:
            seconds = np.where(placed == index, op_seconds(profile, cluster.device(name)), seconds)
    seconds = np.where(placed >= 0, seconds, 0.0)
    busy = np.flatnonzero(seconds)
    found: list[Run] = []
    for op in sorted({*busy.tolist(), *(op for op in breaks if op < len(graph.ops))}):
        row = graph.ops[op]
        key = devices[placed[op]] if placed[op] >= 0 else "", kind_of(row, graph), graph.calls[row.call].path
        time = float(seconds[op])
        if found and op not in breaks and found[-1][2:5] == key:
            begin, _, *_, before = found[-1]
            found[-1] = (begin, op + 1, *key, before + time)
        else:
            found.append((op, op + 1, *key, time))
    return found


def kind_of(op: Op, graph: ModelGraph) -> str:
    """The kind of an op's event: a forward op that runs after backward has begun computes something again."""
    if op.backward:
        return "backward"
    return "recompute" if op.index >= graph.backward_begin else "forward"

"""Devices that work at the same time: ranks of a plan with cuts, stages, replicas."""

from collections.abc import Sequence

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cost import check_devices, op_seconds, optimizer_seconds
from autoshard.engine.cuts import OUTSIDE, Collective, local_profile, trace_cuts
from autoshard.engine.pricer import estimate_mesh
from autoshard.estimate import DeviceEstimate, Estimate, Event, Transfer
from autoshard.flow import flow
from autoshard.module_paths import above
from autoshard.plan import Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.timeline.turns import Run, kind_of, optimizer_events, runs


def of_cuts(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """Ranks side by side, with what they do together.

    The estimate is that of the rank with most to compute. It sets the pace: the others begin every part between two
    collectives when it does. One that takes longer than it for a part begins its next one later.
    """
    names = [device.name for device in plan.devices]
    check_devices(names, cluster, "cuts the model over")
    graph = profile.graph
    traced = trace_cuts(graph, plan.cuts)
    after: dict[int, list[Collective]] = {}
    for collective in traced.collectives:
        after.setdefault(collective.op + 1, []).append(collective)
        if profile.workload.training:
            after.setdefault(_backward_end(graph, collective), []).append(collective.backward)
    parts: dict[str, list[list[Run]]] = {}
    ends: dict[str, list[Event]] = {}
    breaks = {at for at in after if at < len(graph.ops)}
    for rank, name in enumerate(names):
        local = local_profile(profile, traced, rank)
        moves = flow(local.graph, {"": name})
        parts[name] = _parts(runs(local, cluster, moves.devices, moves.op_device, breaks), sorted(after))
        ends[name] = optimizer_events(local, cluster, moves, 0.0, together=True)

    def total(name: str) -> float:
        return sum(run[5] for part in parts[name] for run in part) + sum(event.end_seconds for event in ends[name])

    pace = max(names, key=total)
    return _side_by_side(parts, ends, pace, [after[at] for at in sorted(after)], cluster, names)


def _side_by_side(
    parts: dict[str, list[list[Run]]], ends: dict[str, list[Event]], pace: str, together: Sequence[list[Collective]],
    cluster: Cluster, names: list[str],
) -> list[Event]:  # fmt: skip
    """Part by part: every rank computes, then all of them do what comes after."""
    found: list[Event] = []
    clock, clocks = 0.0, dict.fromkeys(names, 0.0)
    for number in range(len(together) + 1):
        for name in names:
            at = max(clock, clocks[name])
            for _, _, device, kind, label, seconds in parts[name][number]:
                if seconds:
                    found.append(
                        Event(device=device, kind=kind, begin_seconds=at, end_seconds=at + seconds, label=label)
                    )
                    at += seconds
            clocks[name] = at
        clock = clocks[pace]
        for collective in together[number] if number < len(together) else ():
            seconds = collective.seconds(cluster, names)
            kind = "all-gather" if collective.gathers else "all-reduce"
            found += [
                Event(
                    device=name, kind=kind, begin_seconds=clock, end_seconds=clock + seconds, nbytes=collective.nbytes,
                    label=collective.block,
                )
                for name in names
            ]  # fmt: skip
            clock += seconds
    for name in names:
        for event in ends[name]:
            begin = max(clock, clocks[name])
            found.append(
                Event(device=name, kind=event.kind, begin_seconds=begin, end_seconds=begin + event.end_seconds)
            )
    return found


def _parts(found: list[Run], bounds: Sequence[int]) -> list[list[Run]]:
    """Runs between the ops of some bounds: one part more than there are bounds."""
    parts: list[list[Run]] = [[] for _ in range(len(bounds) + 1)]
    number = 0
    for run in found:
        while number < len(bounds) and run[0] >= bounds[number]:
            number += 1
        parts[number].append(run)
    return parts


def _backward_end(graph: ModelGraph, collective: Collective) -> int:
    """The op after the last backward op of the collective's block; the backward sums what the block let in."""
    last = graph.backward_begin - 1
    for op in range(len(graph.ops) - 1, graph.backward_begin - 1, -1):
        path = graph.calls[graph.ops[op].call].path
        if collective.block in (OUTSIDE, "", path) or collective.block in above(path):
            last = op
            break
    return last + 1


def of_mesh(plan: Plan, profile: Profile, cluster: Cluster) -> list[Event]:
    """Stages: the events of the estimate's own simulation. Replicas alone: see `_replicas`."""
    estimate = estimate_mesh(plan, profile, cluster)
    if estimate.pipelining is not None:
        return list(estimate.pipelining.events)
    return _replicas(plan, profile, cluster, estimate)


def _replicas(plan: Plan, profile: Profile, cluster: Cluster, estimate: Estimate) -> list[Event]:
    """Parts of the batch go out, every replica computes, gradients are summed, results come home.

    The estimate has one figure for what a device computes; forward and backward share it as they do on one device.
    """
    found: list[Event] = []
    clock = 0.0
    home = plan.devices[0].name
    for transfer in estimate.transfers:
        if transfer.destination != home:
            found.append(_moved(transfer, clock))
            clock = found[-1].end_seconds
    begin = clock
    for device in estimate.devices:
        at = begin
        for kind, seconds in _kinds(device, plan, profile, cluster):
            found.append(Event(device=device.name, kind=kind, begin_seconds=at, end_seconds=at + seconds))
            at += seconds
        clock = max(clock, at)
    end = clock
    for device in estimate.devices:
        if device.transfer_seconds:
            kind = "all-reduce" if estimate.all_reduces else "all-gather"
            end = max(end, clock + device.transfer_seconds)
            found.append(
                Event(
                    device=device.name, kind=kind, begin_seconds=clock, end_seconds=clock + device.transfer_seconds
                )
            )  # fmt: skip
    for transfer in estimate.transfers:
        if transfer.destination == home:
            found.append(_moved(transfer, end))
            end = found[-1].end_seconds
    return found


def _moved(transfer: Transfer, clock: float) -> Event:
    return Event(
        device=transfer.destination, kind="transfer", begin_seconds=clock, end_seconds=clock + transfer.seconds,
        source=transfer.source, nbytes=transfer.nbytes,
        label=f"{transfer.producer or 'inputs'} -> {transfer.consumer or 'outputs'}",
    )  # fmt: skip


def _kinds(device: DeviceEstimate, plan: Plan, profile: Profile, cluster: Cluster) -> list[tuple[str, float]]:
    """What a replica computes, by kind: the optimizer's step as it is, the rest in proportion."""
    if not device.compute_seconds:
        return []
    graph, mesh = profile.graph, plan.mesh
    seconds = op_seconds(profile, cluster.device(device.name))
    totals: dict[str, float] = {}
    for op in graph.ops:
        kind = kind_of(op, graph)
        totals[kind] = totals.get(kind, 0.0) + float(seconds[op.index])
    trained = sum(nbytes for _, nbytes in trained_sizes(graph)) if profile.workload.training else 0
    kept = trained / mesh.data if mesh is not None and mesh.sharded else trained
    step = min(optimizer_seconds(kept, profile.workload, cluster.device(device.name)), device.compute_seconds)
    scale = (device.compute_seconds - step) / (sum(totals.values()) or 1.0)
    found = [(kind, total * scale) for kind, total in totals.items() if total]
    return [*found, ("optimizer", step)] if step else found

"""A plan with cuts for the sliders: what a rank has is its part, at the profile's size, of what the whole model has."""

from collections.abc import Callable, Sequence
from itertools import permutations
from math import ceil, log2
from typing import Any

import numpy as np

from autoshard.cluster.cluster import Cluster, Device, Link
from autoshard.cut_cost import Traced, local_profile, trace_cuts
from autoshard.estimate import Estimate
from autoshard.flow import flow
from autoshard.plan import Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling, powers
from autoshard.report.whatif.moments import front, live_vectors
from autoshard.report.whatif.sparse import counted, terms
from autoshard.workload import OPTIMIZER_STATE_TENSORS

Rates = Callable[[Device], dict[str, Any]]


def ranks(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, table: "Table"
) -> dict[str, Any] | None:
    """Return ranks and what they do together, as `predict` takes them; None for ranks in several machines.

    Ranks with equal shares on equal devices are looked at once.
    """
    names = [device.name for device in plan.devices]
    if len({cluster.device(name).host for name in names}) > 1:
        return None
    traced = trace_cuts(profile.graph, plan.cuts)
    known: dict[object, dict[str, Any]] = {}
    devices = []
    for figures in estimate.devices:
        rank = names.index(figures.name) if figures.name in names else -1
        key = rank < 0 or (tuple(cut.shares[rank] for cut in plan.cuts), figures.compute_seconds, figures.peak_bytes)
        if key not in known:
            known[key] = _rank(rank, plan, estimate, profile, cluster, scaling, traced, table)
        devices.append({**known[key], "name": figures.name, "memory": figures.memory_bytes})
    return {"devices": devices, "transfers": [], "collectives": _collectives(profile, cluster, names, scaling, traced)}


class Table:
    """Polynomials and kinds of ops that are added to those of the whole model."""

    def __init__(
        self, rows: list[list[float]], ops: list[list[int]], of_op: Sequence[int], of_extra: Sequence[int], rates: Rates
    ) -> None:
        self.rows, self.ops, self.of_op, self.of_extra, self.rates = rows, ops, of_op, of_extra, rates
        self.numbers = {tuple(row): i for i, row in enumerate(rows)}
        self.kinds = {(kind[0], kind[1], kind[2]): i for i, kind in enumerate(ops)}

    def row(self, vector: np.ndarray) -> int:
        """Number of a polynomial."""
        key = tuple(terms(vector))
        if key not in self.numbers:
            self.numbers[key] = len(self.rows)
            self.rows.append(list(key))
        return self.numbers[key]

    def kind(self, flops: int, moved: int, dtype: int) -> int:
        """Number of a kind of op."""
        key = (flops, moved, dtype)
        if key not in self.kinds:
            self.kinds[key] = len(self.ops)
            self.ops.append(list(key))
        return self.kinds[key]


def _rank(
    rank: int, plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, traced: Traced,
    table: Table,
) -> dict[str, Any]:  # fmt: skip
    device = cluster.device(plan.devices[max(rank, 0)].name)
    empty = {"always": 0, "front": [], "ops": [], "optimizer": 0, **table.rates(device)}
    if rank < 0:
        return empty
    local = local_profile(profile, traced, rank)
    moves = flow(local.graph, {"": device.name})
    moments = front(live_vectors(local, moves, scaling, 0, device, whole=profile))
    placed = []
    for op, mine in zip(profile.graph.ops, local.graph.ops, strict=True):
        kind = table.of_op[op.index]
        if kind < 0:
            continue
        flops = mine.flops / op.flops if op.flops else 1.0
        whole = profile.op_bytes[op.index]
        moved = local.op_bytes[op.index] / whole if whole else 1.0
        if flops != 1.0 or moved != 1.0:
            rows = scaling.table[scaling.flops[op.index]] * flops, scaling.table[scaling.moved[op.index]] * moved
            kind = table.kind(table.row(rows[0]), table.row(rows[1]), table.ops[kind][2])
        placed.append(kind)
    placed += [kind for kind in table.of_extra if kind >= 0]
    figures = next(one for one in estimate.devices if one.name == device.name)
    fullest = float((moments @ powers(scaling.monomials, *scaling.sizes)).max(initial=0.0))
    own = sum(nbytes for _, nbytes in trained_sizes(local.graph)) if profile.workload.training else 0
    state = OPTIMIZER_STATE_TENSORS[profile.workload.optimizer]
    return {
        **empty,
        "always": figures.peak_bytes - fullest,
        "front": [terms(row) for row in moments],
        "ops": counted(placed),
        "optimizer": own * (3 + 2 * state) if profile.workload.optimizer != "none" else 0,
    }


def _collectives(
    profile: Profile, cluster: Cluster, names: Sequence[str], scaling: Scaling, traced: Traced
) -> list[list[Any]]:
    """[how many, ways of doing it, bytes] of collectives that are alike; see `collective_cost`."""
    passes = 2 if profile.workload.training else 1
    found: dict[tuple[bool, tuple[float, ...]], int] = {}
    base = scaling.at(*scaling.sizes)
    for one in traced.collectives:
        values = [v for v in profile.graph.ops[one.op].outputs if profile.graph.values[v].nbytes == one.nbytes]
        number = int(scaling.value[values[0]]) if values else -1
        constant = np.eye(1, len(scaling.monomials))[0] * one.nbytes
        vector = scaling.table[number] if number >= 0 and base[number] else constant
        key = one.gathers, tuple(terms(vector))
        found[key] = found.get(key, 0) + passes
    ways = {gathers: _ways(cluster, names, gathers) for gathers, _ in found}
    return [[count, ways[gathers], list(vector)] for (gathers, vector), count in found.items()]


def _ways(cluster: Cluster, names: Sequence[str], gathers: bool) -> list[list[list[float]]]:
    """The cheapest of some ways counts, each the slowest of lines (seconds, seconds per byte)."""
    count = len(names)
    if count < 2:
        return [[[0.0, 0.0]]]
    ring = [cluster.link(a, b) for a, b in zip(names, [*names[1:], names[0]], strict=True)]
    times = count - 1 if gathers else 2 * (count - 1)
    ways = [[[times * link.latency_seconds, times / count / link.bytes_per_second] for link in ring]]
    part = 1 / count if gathers else 1.0
    ways.append([_received([cluster.link(other, name) for other in names if other != name], part) for name in names])
    if not gathers:
        levels = 2 * ceil(log2(count))
        every = [cluster.link(a, b) for a, b in permutations(names, 2)]
        ways.append([[levels * link.latency_seconds, 2 / link.bytes_per_second] for link in every])
    return [[list(line) for line in dict.fromkeys(tuple(line) for line in lines)] for lines in ways]


def _received(links: Sequence[Link], part: float) -> list[float]:
    return [max(link.latency_seconds for link in links), sum(part / link.bytes_per_second for link in links)]

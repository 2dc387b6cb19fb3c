"""A plan with cuts for the sliders: what a rank has is its part, at the profile's size, of what the whole model has."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.cluster.cluster import Cluster, Device
from autoshard.cut_cost import Traced, local_profile, trace_cuts
from autoshard.cut_stream_cost import one_rank
from autoshard.estimate import Estimate
from autoshard.flow import flow
from autoshard.plan import Plan
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling, powers
from autoshard.report.whatif.links import Links
from autoshard.report.whatif.moments import front, live_vectors
from autoshard.report.whatif.sparse import counted, terms
from autoshard.report.whatif.streams import stream_data
from autoshard.stream_cost import streamed_modules, with_slots
from autoshard.workload import OPTIMIZER_STATE_TENSORS

Rates = Callable[[Device], dict[str, Any]]


def ranks(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, table: "Table"
) -> dict[str, Any]:
    """Return ranks and what they do together, as `predict` takes them.

    Ranks with equal shares on equal devices are looked at once.
    """
    names = [device.name for device in plan.devices]
    traced = trace_cuts(profile.graph, plan.cuts)
    known: dict[object, dict[str, Any]] = {}
    devices, links = [], Links(cluster)
    for figures in estimate.devices:
        rank = names.index(figures.name) if figures.name in names else -1
        key = rank < 0 or (tuple(cut.shares[rank] for cut in plan.cuts), figures.compute_seconds, figures.peak_bytes)
        if key not in known:
            known[key] = _rank(rank, plan, estimate, profile, cluster, scaling, traced, table, links)
        peak = {} if rank >= 0 else {"always": figures.peak_bytes}  # of what is kept there for others
        devices.append({**known[key], **peak, "name": figures.name, "memory": figures.memory_bytes})
    together = _collectives(profile, names, scaling, traced, links)
    return {"way": "ranks", "devices": devices, "transfers": [], "collectives": together, "links": links.rows}


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
    table: Table, links: Links,
) -> dict[str, Any]:  # fmt: skip
    device = cluster.device(plan.devices[max(rank, 0)].name)
    empty = {"always": 0, "overhead": 0, "front": [], "ops": [], "optimizer": 0, **table.rates(device)}
    if rank < 0:
        return empty
    local = local_profile(profile, traced, rank)
    bare = moves = flow(local.graph, {"": device.name})
    modules = streamed_modules(replace(plan, placements={"": device.name}), local.graph)
    if modules:
        moves = with_slots(bare, modules, local.graph)
    moments = front(live_vectors(local, moves, scaling, 0, device, whole=profile))
    kinds = []
    for op, mine in zip(profile.graph.ops, local.graph.ops, strict=True):
        kind = table.of_op[op.index]
        flops = mine.flops / op.flops if op.flops else 1.0
        whole = profile.op_bytes[op.index]
        moved = local.op_bytes[op.index] / whole if whole else 1.0
        if kind >= 0 and (flops != 1.0 or moved != 1.0):
            rows = scaling.table[scaling.flops[op.index]] * flops, scaling.table[scaling.moved[op.index]] * moved
            kind = table.kind(table.row(rows[0]), table.row(rows[1]), table.ops[kind][2])
        kinds.append(kind)
    more = {}
    if modules:
        one, names = one_rank(plan, cluster, device.name), [device.name]
        more["stream"] = stream_data(modules, local, one, names, scaling, bare, kinds, table.of_extra, links.of(one))
    figures = next(one for one in estimate.devices if one.name == device.name)
    fullest = float((moments @ powers(scaling.monomials, *scaling.sizes)).max(initial=0.0))
    own = sum(nbytes for _, nbytes in trained_sizes(local.graph)) if profile.workload.training else 0
    state = OPTIMIZER_STATE_TENSORS[profile.workload.optimizer]
    return {
        **empty,
        **more,
        "always": figures.peak_bytes - figures.overhead_bytes - fullest,
        "overhead": figures.overhead_bytes,
        "front": [terms(row) for row in moments],
        "ops": counted(kind for kind in (*kinds, *table.of_extra) if kind >= 0),
        "optimizer": own * (3 + 2 * state) if profile.workload.optimizer != "none" else 0,
    }


def _collectives(
    profile: Profile, names: Sequence[str], scaling: Scaling, traced: Traced, links: Links
) -> list[list[Any]]:
    """[how many, cost, bytes] of collectives that are alike."""
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
    costs = {gathers: (links.all_gather if gathers else links.all_reduce)(names) for gathers, _ in found}
    return [[count, costs[gathers], list(vector)] for (gathers, vector), count in found.items()]

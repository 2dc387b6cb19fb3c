"""A plan with cuts for the sliders: what a rank has is its part, at the profile's size, of what the whole model has."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.cluster.cluster import Cluster
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
from autoshard.report.whatif.parts import Kinds, Part, rates
from autoshard.report.whatif.sparse import counted, terms
from autoshard.report.whatif.streams import stream_data
from autoshard.stream_cost import streamed_modules, with_slots
from autoshard.workload import OPTIMIZER_STATE_TENSORS


def ranks(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, dtypes: Sequence[str]
) -> dict[str, Any]:
    """Return ranks and what they do together, as `predict` takes them.

    Ranks with equal shares on equal devices are looked at once.
    """
    names = [device.name for device in plan.devices]
    traced = trace_cuts(profile.graph, plan.cuts)
    known: dict[object, dict[str, Any]] = {}
    devices, links, kinds = [], Links(cluster), Kinds(dtypes)
    for figures in estimate.devices:
        rank = names.index(figures.name) if figures.name in names else -1
        key = rank < 0 or (tuple(cut.shares[rank] for cut in plan.cuts), figures.compute_seconds, figures.peak_bytes)
        if key not in known:
            known[key] = _rank(rank, plan, estimate, profile, cluster, scaling, traced, kinds, links)
        peak = {} if rank >= 0 else {"always": figures.peak_bytes}  # of what is kept there for others
        devices.append({**known[key], **peak, "name": figures.name, "memory": figures.memory_bytes})
    together = _collectives(profile, names, scaling, traced, links)
    return {
        "way": "ranks", "devices": devices, "transfers": [], "collectives": together, "links": links.rows,
        "table": kinds.table, "ops": kinds.ops,
    }  # fmt: skip


def _rank(
    rank: int, plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, scaling: Scaling, traced: Traced,
    kinds: Kinds, links: Links,
) -> dict[str, Any]:  # fmt: skip
    device = cluster.device(plan.devices[max(rank, 0)].name)
    empty = {"always": 0, "overhead": 0, "front": [], "ops": [], "optimizer": 0, **rates(device, kinds.dtypes)}
    if rank < 0:
        return empty
    local = local_profile(profile, traced, rank)
    bare = moves = flow(local.graph, {"": device.name})
    modules = streamed_modules(replace(plan, placements={"": device.name}), local.graph)
    if modules:
        moves = with_slots(bare, modules, local.graph)
    moments = front(live_vectors(local, moves, scaling, 0, device, whole=profile))
    ops, extra = kinds.of(Part(profile, local, scaling, frozenset(), 1.0), profile)
    placed = [*bare.op_device, *(bare.op_device[one.beside] for one in scaling.extra)]  # what runs on the host is free
    more = {}
    if modules:
        one, names = one_rank(plan, cluster, device.name), [device.name]
        more["stream"] = stream_data(modules, local, one, names, scaling, bare, ops, extra, links.of(one))
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
        "ops": counted(kind for kind, where in zip((*ops, *extra), placed, strict=True) if kind >= 0 and where == 0),
        "optimizer": own * (3 + 2 * state) if profile.workload.optimizer != "none" else 0,
    }


def _collectives(
    profile: Profile, names: Sequence[str], scaling: Scaling, traced: Traced, links: Links
) -> list[list[Any]]:
    """[how many, cost, bytes] of collectives that are alike."""
    found: dict[tuple[bool, tuple[float, ...]], int] = {}
    base = scaling.at(*scaling.sizes)
    for one in traced.of_pass(profile.workload.training):
        values = [v for v in profile.graph.ops[one.op].outputs if profile.graph.values[v].nbytes == one.tensor_bytes]
        number = int(scaling.value[values[0]]) if values else -1
        constant = np.eye(1, len(scaling.monomials))[0] * one.tensor_bytes
        vector = (scaling.table[number] if number >= 0 and base[number] else constant) * max(one.added, 1)
        key = one.gathers, tuple(terms(vector))
        found[key] = found.get(key, 0) + 1
    costs = {gathers: (links.all_gather if gathers else links.all_reduce)(names) for gathers, _ in found}
    return [[count, costs[gathers], list(vector)] for (gathers, vector), count in found.items()]

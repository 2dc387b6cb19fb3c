"""Every strategy and every peer on the same model and devices, in one table."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import cast

from autoshard.cluster.parse import limited_to
from autoshard.engine.pricer import price
from autoshard.errors import AutoshardError, PlanError, SpecError
from autoshard.integrations.peer_maps import PeerMap, peer_maps
from autoshard.plan import Plan
from autoshard.plan.choices import Objective
from autoshard.search.choose import choose
from autoshard.search.limits import Asked
from autoshard.search.planning import candidates_of, cut, place, plan_measured
from autoshard.search.request import Request
from autoshard.strategies.compare import Alternative, Candidate, Comparison, compare, value_of

PLACING = ("sequential", "balanced", "balanced_low_0")


def compare_all(request: Request) -> Comparison:
    """Plan with every strategy, as where it is named, and price the maps of peers.

    A workload that nobody stated counts as stated: all strategies are asked. Raises `PlanError` if none is possible.
    """
    stated = dataclasses.replace(request.profile.workload, assumed=False)
    profile = dataclasses.replace(request.profile, workload=stated)
    request = dataclasses.replace(request, profile=profile)
    named = [Candidate(name=name, make=partial(place, request, name)) for name in PLACING]
    every = candidates_of(request)
    if "column-parallel" not in [one.name for one in every]:  # one process runs all ranks, but not at once, as priced
        named.insert(0, Candidate(name="column-parallel", make=lambda: cut(request, asked=True), usable=False))
    try:
        ours = compare([*every, *named], request.profile, request.limited, request.objective, price=request.price)
    except PlanError:
        place(request, "auto")  # its refusal says what would help
        raise
    rows = tuple(row if row is ours.chosen else _as_named(row, request) for row in ours.alternatives)
    theirs = [_priced(one, request) for one in peer_maps(request.model, request.limited)]
    written: Mapping[str, str] | None = getattr(request.model, "_tp_plan", None)
    if written:
        theirs.append(_cut_as_written(request, written))
    return dataclasses.replace(ours, alternatives=rows, peers=tuple(theirs))


def _as_named(row: Alternative, request: Request) -> Alternative:
    """The row, or the plan for processes where a request that names this strategy gets one."""
    asked = Asked(
        strategy=row.name, objective=cast(Objective, request.objective),
        assume_independent_rows=request.assume_independent_rows,
    )  # fmt: skip
    cluster, workload = limited_to(request.cluster, request.max_memory), request.profile.workload
    try:
        chosen = choose(request.model, request.inputs, workload, cluster, asked)
    except AutoshardError as error:
        return Alternative(name=row.name, refused=str(error), usable=False)
    if chosen is None:
        return row
    value = value_of(chosen.estimate, request.objective, workload.training)
    return Alternative(name=row.name, plan=chosen.plan, estimate=chosen.estimate, value=value, usable=False)


def _priced(peer: PeerMap, request: Request) -> Alternative:
    if peer.refused:
        return Alternative(name=peer.name, refused=peer.refused)
    try:
        plan = Plan.from_device_map(peer.device_map, request.profile)
    except (PlanError, SpecError) as error:
        return Alternative(name=peer.name, refused=str(error))
    return _alternative(peer.name, dataclasses.replace(plan, objective=request.objective), request)


def _alternative(name: str, plan: Plan, request: Request) -> Alternative:
    try:
        estimate = price(plan, request.profile, request.limited)
    except (PlanError, SpecError) as error:
        return Alternative(name=name, refused=str(error))
    value = value_of(estimate, request.objective, request.profile.workload.training)
    return Alternative(name=name, plan=plan, estimate=estimate, value=value)


def _cut_as_written(request: Request, written: Mapping[str, str]) -> Alternative:
    """What Transformers has written down for the model, carried out by us and priced."""
    name = "Transformers tp_plan"
    try:
        plan = plan_measured(
            request.model, request.inputs, request.profile, request.cluster, strategy="column-parallel",
            objective=request.objective, max_memory=request.max_memory, tp_plan=written,
        )  # fmt: skip
    except (PlanError, SpecError) as error:
        return Alternative(name=name, refused=str(error))
    return _alternative(name, plan, request)

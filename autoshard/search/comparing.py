"""Every strategy and every peer on the same model and devices, in one table."""

import dataclasses
from collections.abc import Mapping
from functools import partial

from autoshard.engine.pricer import price
from autoshard.errors import PlanError, SpecError
from autoshard.integrations.peer_maps import PeerMap, peer_maps
from autoshard.plan import Plan
from autoshard.search.planning import candidates_of, cut, place, plan_measured
from autoshard.search.request import Request
from autoshard.strategies.compare import Alternative, Candidate, Comparison, compare, value_of

PLACING = ("sequential", "balanced", "balanced_low_0")


def compare_all(request: Request) -> Comparison:
    """Plan with every strategy and price the maps of peers.

    A workload that nobody stated counts as stated: all strategies are asked. Raises `PlanError` if none is possible.
    """
    stated = dataclasses.replace(request.profile.workload, assumed=False)
    profile = dataclasses.replace(request.profile, workload=stated)
    request = dataclasses.replace(request, profile=profile)
    named = [Candidate(name=name, make=partial(place, request, name)) for name in PLACING]
    every = candidates_of(request)
    if "column-parallel" not in [one.name for one in every]:  # one process runs all ranks, but not at once, as priced
        named.insert(0, Candidate(name="column-parallel", make=lambda: cut(request), usable=False))
    try:
        ours = compare([*every, *named], request.profile, request.limited, request.objective, price=request.price)
    except PlanError:
        place(request, "auto")  # its refusal says what would help
        raise
    theirs = [_priced(one, request) for one in peer_maps(request.model, request.limited)]
    written: Mapping[str, str] | None = getattr(request.model, "_tp_plan", None)
    if written:
        theirs.append(_cut_as_written(request, written))
    return dataclasses.replace(ours, peers=tuple(theirs))


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

"""Planning: from a model and its profile to a plan, with any strategy. What several strategies need is found once."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from autoshard.cluster.cluster import RESERVED, Cluster
from autoshard.cluster.parse import limited_to, named_pins
from autoshard.common.collector import no_collection
from autoshard.common.sizes import format_bytes
from autoshard.errors import PlanError, SpecError
from autoshard.plan import Plan
from autoshard.plan.batching import ASSUMED
from autoshard.plan.choices import Objective
from autoshard.plan.mesh import Mesh
from autoshard.plan.sharding import even_shares, shares_of
from autoshard.plan.workload import Workload
from autoshard.search.request import Request

if TYPE_CHECKING:
    from autoshard.profile.profile import Profile
    from autoshard.strategies.compare import Candidate, Comparison


DIVIDING = ("auto", "pipeline", "data-parallel", "hybrid")
"""Strategies that may divide the batch."""


def plan_measured(
    model: nn.Module,
    inputs: Any,
    profile: "Profile",
    cluster: Cluster,
    *,
    strategy: str = "auto",
    **settings: Any,
) -> Plan:
    """Plan a model whose profile is known, with any strategy; `settings` are fields of `Request`."""
    from autoshard.profile.accelerator import on_devices

    profile = on_devices(profile, cluster)
    request = Request(model=model, inputs=inputs, profile=profile, cluster=cluster, **settings)
    if request.tp_plan is not None and (strategy != "column-parallel" or request.pins):
        raise SpecError('a tp_plan is carried out with strategy="column-parallel" and without pins.')
    if request.assume_independent_rows and strategy not in DIVIDING:
        raise SpecError(
            f'assume_independent_rows is about dividing the batch, which strategy="{strategy}" does not do. Leave it '
            f"out, or use one of {', '.join(DIVIDING)}."
        )
    from autoshard.capture.shapes import shared_answers

    with shared_answers():
        return _saying_what_is_free(_made(request, strategy), request)


def _made(request: Request, strategy: str) -> Plan:
    if strategy == "auto" and (request.num_microbatches or request.schedule):
        strategy = "pipeline"  # of the plans of one process, which alone has either
    if strategy == "auto":
        return _auto(request)
    makers: dict[str, Callable[[Request], Plan]] = {
        "column-parallel": lambda request: cut(request, asked=True),
        "pipeline": _pipeline,
        "data-parallel": _replicate,
        "hybrid": _mesh,
    }
    if strategy not in makers:
        return place(request, strategy)
    _check_usable(request, strategy)
    from autoshard.common.model_state import undisturbed

    return _compared(undisturbed(request.model, request.inputs, lambda: makers[strategy](request)), request)


def _compared(plan: Plan, request: Request) -> Plan:
    """The plan, if the model does the same for its parts, and a small one gives the same. Raises `PlanError`.

    A forward that writes into tensors which are no state of the model is not run: nobody would write them back.
    """
    from autoshard.axes.given import writes_elsewhere
    from autoshard.common.model_state import undisturbed
    from autoshard.verify.planned import numbers_against

    model, inputs, flops = request.model, request.inputs, request.profile.flops
    if plan.batch is not None:
        parts = part_sizes(plan, plan.batch.size)
        undisturbed(model, inputs, lambda: request.check_parts(parts))
    if writes_elsewhere(request.composite):
        return plan
    differing = undisturbed(model, inputs, lambda: numbers_against(model, plan, inputs, flops))
    if differing:
        raise PlanError(
            f"the model does not compute the same in parts: {differing}. This is a fault of autoshard: please report "
            'it with the model. Use strategy="balanced", which places whole modules.'
        )
    return plan


def part_sizes(plan: Plan, rows: int) -> set[int]:
    """How many rows a batch has, and its parts under a plan."""
    mesh = plan.mesh or Mesh()
    shares = shares_of(rows, mesh.data, mesh.shares)
    return {rows, *(part for share in shares for part in even_shares(share, plan.num_microbatches))}


def _saying_what_is_free(plan: Plan, request: Request) -> Plan:
    """The plan, and that a part of its cards is not used, where that was not told."""
    limited_cluster = limited_to(request.cluster, request.max_memory)
    kept = [one for one in plan.devices if one.memory_bytes < limited_cluster.device(one.name).memory_bytes]
    if not kept:
        return plan
    whole = limited_cluster.device(kept[0].name).memory_bytes
    words = (
        f"{RESERVED:.0%} of each card is kept free, as of {kept[0].name} of {format_bytes(whole)}; give max_memory "
        "to use it"
    )
    return dataclasses.replace(plan, reasons=(*plan.reasons, words))


def check_varied(vary: str) -> None:
    """Refuse to vary anything but a size of inputs."""
    if vary not in ("batch_size", "sequence_length"):
        raise SpecError(f"{vary!r} can't be varied: batch_size or sequence_length can.")


def largest_plan(
    vary: str,
    workload: Workload,
    measured: Callable[[Workload], tuple[nn.Module, Any, "Profile"]],
    cluster: Cluster,
    *,
    tried: Callable[[int, float | None], None] | None = None,
    **settings: Any,
) -> Plan:
    """Plan for the largest batch ("batch_size") or sequence ("sequence_length") that fits; see `autoshard.largest`.

    `measured`: a workload -> the model, its inputs and its profile. `settings` are those of `plan_measured`; `tried` is
    told of every size. The search begins at the size in `workload`. Raises what planning raises for that.
    """
    from autoshard.engine.pricer import price
    from autoshard.search.largest import largest

    def make(size: int) -> tuple[Plan, float]:
        asked: dict[str, Any] = {vary: size, "assumed": False}
        model, inputs, profile = measured(dataclasses.replace(workload, **asked))
        plan = plan_measured(model, inputs, profile, cluster, **settings)
        limited = cluster.with_memory({device.name: device.memory_bytes for device in plan.devices})
        estimate = price(plan, profile, limited)
        return plan, max(device.peak_bytes / max(device.memory_bytes, 1) for device in estimate.devices)

    start = getattr(workload, vary) or 1
    found = largest(make, start=start, step=settings.get("num_microbatches") or 1, tried=tried)
    return dataclasses.replace(found.made, reasons=(*found.made.reasons, found.reason(vary)))


def compare(request: Request) -> "Comparison":
    """Make the best plan of every strategy and price all of them. Raises `PlanError` if none is possible."""
    from autoshard.common.model_state import undisturbed
    from autoshard.strategies.compare import compare as price_all

    def compared() -> "Comparison":
        return price_all(
            candidates_of(request), request.profile, request.limited, request.objective, price=request.price
        )

    with no_collection():  # graphs are large and stay: 0.3 s of 1.5 for 70 billion parameters
        return undisturbed(request.model, request.inputs, compared)


def _auto(request: Request) -> Plan:
    """The best plan of all strategies that can be carried out as the model is run: in one process, or one per device.

    A workload that nobody stated says nothing about the batch; then it is not divided, and modules are placed.
    """
    alone = len(request.cluster.devices) == 1 or (request.processes not in (0, len(request.cluster.devices)))
    if request.pins or alone or (not request.processes and request.profile.workload.assumed):
        return place(request, "auto")
    from autoshard.strategies.compare import explained

    try:
        return _compared(explained(compare(request)), request)
    except PlanError:
        return place(request, "auto")  # says what would help


def candidates_of(request: Request) -> "list[Candidate]":
    """The strategies in the order in which equals are taken, the simplest first."""
    from autoshard.strategies.compare import Candidate

    found = [Candidate(name="placement", make=lambda: _place_for_passes(request))]
    if "disk" in request.cluster.names or request.pins or _plain_inputs(request):
        return found
    if request.processes > 1:
        return [*found, Candidate(name="column-parallel", make=lambda: cut(request))]
    if not request.profile.workload.assumed and request.has_rows:
        found.append(Candidate(name="data-parallel", make=lambda: _replicate(request)))
        found.append(Candidate(name="pipeline", make=lambda: _pipeline(request, compared=True)))
    return found


def _place_for_passes(request: Request) -> Plan:
    """The best placement; training steps can't overlap, so that their throughput is that of one after the other."""
    if request.objective == "throughput" and request.profile.workload.training:
        return dataclasses.replace(place(request, "auto", objective="latency", advise=False), objective="throughput")
    return place(request, "auto", advise=False)


def place(request: Request, strategy: str, *, objective: str | None = None, advise: bool = True) -> Plan:
    """Place whole modules, with any of the strategies that do; `advise`: say what would help if nothing fits.

    One process has the devices of one host. Of several hosts the one with the most memory is taken, and the plan says
    so.
    """
    from autoshard.strategies import make_plan

    def made(cluster: Cluster) -> Plan:
        return make_plan(
            request.profile, cluster, strategy=strategy, objective=objective or request.objective,
            pins=named_pins(cluster, request.pins), in_memory=request.in_memory, advise=advise,
        )  # fmt: skip

    hosts = {device.host for device in request.cluster.devices}
    if len(hosts) == 1 or request.processes > 1:
        return made(request.limited)
    cluster = request.limited.largest_host
    words = (
        f"one process has the devices of one host, here of {cluster.devices[0].host} ({len(hosts)} hosts were given); "
        "those of several want a process per device (--launch processes, or --strategy hybrid)"
    )
    try:
        plan = made(cluster)
    except PlanError as error:
        raise PlanError(f"{error} And {words}.") from None
    return dataclasses.replace(plan, reasons=(*plan.reasons[:1], words, *plan.reasons[1:]))


def _check_usable(request: Request, strategy: str) -> None:
    if request.pins:
        every = "every device has a part of each" if strategy == "column-parallel" else 'use "balanced"'
        raise SpecError(f'modules can\'t be pinned with strategy="{strategy}": {every}.')
    if "disk" in request.cluster.names and strategy != "column-parallel":
        raise SpecError(f'"disk" computes nothing: leave it out with strategy="{strategy}", or use "balanced".')
    if wrong := _plain_inputs(request):
        raise PlanError(f'{wrong}, which strategy="{strategy}" needs. Give others, or use "balanced".')


def _plain_inputs(request: Request) -> str:
    """What is wrong with inputs that are to be divided, or run with a model that is cut; "" if nothing is."""
    from autoshard.capture.capture import calls_of
    from autoshard.nested import tensors_in

    for path, tensor in tensors_in(calls_of(request.model, request.inputs, request.profile.workload)[0]):
        name = path.partition(".")[2]
        if tensor.layout is not torch.strided or tensor.is_nested:
            return f"input {name} is sparse, nested or of another layout that has no rows to compare"
        if not tensor.numel():
            return f"input {name} of shape {tuple(tensor.shape)} has no elements"
    return ""


def _check_caller(request: Request) -> None:
    """Refuse to cut a model whose caller would see what a rank does: to inputs, or in objects among the outputs.

    Ranks have copies of inputs, and the caller's tensor would stay as it is.
    """
    from autoshard.capture.changed import changed_inputs

    for graph in (request.composite, request.profile.graph):
        for changed in changed_inputs(graph):
            raise PlanError(
                f"the model can't be cut: {changed}, which a rank does to its own copy. Let forward work on a clone "
                'of it, or place modules (strategy="balanced").'
            )
    for path, kind in request.composite.sealed:
        raise PlanError(
            f"the model can't be cut: the output {path} is a {kind}, in which a tensor would be that of a rank. Return "
            'the tensor itself, or place modules (strategy="balanced").'
        )


def _replicate(request: Request) -> Plan:
    from autoshard.runtime.replicas import why_not_replicable
    from autoshard.strategies.data_parallel import data_parallel

    if reason := why_not_replicable(request.model):
        raise PlanError(reason)
    made = data_parallel(request.profile, request.limited, request.batch, objective=request.objective)
    return _saying_what_is_assumed(made)


def _pipeline(request: Request, *, compared: bool = False) -> Plan:
    from autoshard.strategies.pipeline import pipeline

    made = pipeline(
        request.profile, request.limited, request.batch, objective=request.objective,
        num_microbatches=request.num_microbatches, schedule=request.schedule, pricer=request.price,
        compared=compared,
    )  # fmt: skip
    return _saying_what_is_assumed(made)


def _mesh(request: Request) -> Plan:
    """A plan for one process per device, as the search finds it."""
    from autoshard.search.choose import choose
    from autoshard.search.limits import Asked

    asked = Asked(
        strategy="hybrid", objective=cast(Objective, request.objective), num_microbatches=request.num_microbatches,
        schedule=request.schedule, assume_independent_rows=request.assume_independent_rows,
    )  # fmt: skip
    chosen = choose(request.model, request.inputs, request.profile.workload, request.limited, asked)
    assert chosen is not None
    return chosen.plan


def _saying_what_is_assumed(plan: Plan) -> Plan:
    """The plan, with the user's word on its rows as its first reason."""
    if plan.batch is None or not plan.batch.assumed:
        return plan
    return dataclasses.replace(plan, reasons=(ASSUMED, *plan.reasons))


def cut(request: Request, asked: bool = False) -> Plan:
    """Find what can be cut, choose, and check what is chosen.

    `asked`: this strategy, not the best one: cut where one device would be faster, too.
    """
    from autoshard.axes.losses import spread_logits
    from autoshard.axes.tokens import divide_tokens
    from autoshard.engine.offloaded import compute_devices
    from autoshard.strategies.column_parallel import column_parallel
    from autoshard.strategies.written_cuts import as_written

    _check_caller(request)
    profile, cluster, found, check = request.profile, request.limited, request.groups, request.cut_checks()
    objective, processes, divides = request.objective, request.processes, request.divides_tokens
    even = not processes  # one process runs all ranks on the same local shapes
    if request.tp_plan is not None:
        return as_written(profile, cluster, found, check, request.tp_plan, objective=objective, even=even)

    def over(devices: Cluster) -> Plan:
        price = request.price if devices is cluster else None
        degree = processes if processes > 1 and processes == len(devices.devices) else None  # all of them run
        plan = column_parallel(
            profile, devices, found, check, objective=objective, degree=degree, even=even, asked=asked, price=price
        )
        cuts = plan.cuts
        if divides:
            cuts = divide_tokens(request.composite, found, cuts, request.stages)
        if processes and profile.workload.training and not request.stages:
            cuts = spread_logits(request.composite, found, cuts)
        return dataclasses.replace(plan, cuts=cuts)

    computing = tuple(cluster.device(name) for name in compute_devices(cluster))
    return over(cluster if computing == cluster.devices else dataclasses.replace(cluster, devices=computing))

"""The entries of the runtime: a plan either places whole modules or cuts parameters, and is applied accordingly."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autoshard.common.model_state import empty_caches
from autoshard.errors import ApplyError, PlanError, SpecError, first_line
from autoshard.plan import Plan
from autoshard.runtime import apply as placing
from autoshard.runtime.agreement import RankState, agree
from autoshard.runtime.collectives import ProcessRanks, count_processes
from autoshard.runtime.cuts import Loader, apply_cuts, cut_record, remove_cuts
from autoshard.runtime.data_parallel import apply_replicas, remove_replicas, replica_record
from autoshard.runtime.device_map import of_ranks, with_map, without_map
from autoshard.runtime.devices import check_copies, make_current, resolve_device
from autoshard.runtime.launched import check_launched
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.pipeline_record import pipeline_record
from autoshard.runtime.refused import refuse_hooks
from autoshard.runtime.results import modules_with_parts
from autoshard.runtime.sharded import shards
from autoshard.runtime.staged import apply_stages, remove_stages


def apply_plan(model: nn.Module, plan: Plan, *, loader: Loader | None = None) -> nn.Module:
    """Carry out a plan on a model, in place, and return it.

    A plan with cuts uses the processes of torch.distributed where there are several, one device each, and else all its
    devices from this one process. Applying over an applied model is as removing first. `loader`: gives values to a
    model on meta while it is cut. Raises `PlanError` if the plan does not belong to the model, `ApplyError` if it can't
    be carried out here and `RankError` if processes disagree; the model is then as it was.
    """
    applied = _applied(model, plan, loader)
    if record := cut_record(model):
        refuse_hooks(modules_with_parts(model, record.cuts), record.running)  # after torch has put on its own
    return applied


def _applied(model: nn.Module, plan: Plan, loader: Loader | None) -> nn.Module:
    if plan.launch == "processes":
        check_launched(plan)
    empty_caches(model)
    several, mesh = count_processes() > 1, plan.mesh
    divide: Any = None
    if mesh is not None and several:
        divide = apply_stages if mesh.pp > 1 else apply_replicas if mesh.data > 1 or shards(plan) else None
    if divide is None and not plan.cuts:
        _check_not_cut(model)
        return with_map(placing.place(model, plan), _map_of(plan))
    problem = _refuse_offloaded(plan)  # in several processes the others must hear of it before it is raised
    try:
        _check_belongs(model, plan)
    except (PlanError, ApplyError) as error:
        problem = error
    if several:
        ranks, device, problem = _clear(model, plan, problem)
        if divide is apply_stages:  # a Trainer can't call them, and they know each attribute that the model had
            return apply_stages(model, plan, ranks, device=device, problem=problem, loader=loader)
        if divide is not None:
            return of_ranks(divide(model, plan, ranks, device=device, problem=problem, loader=loader))
        cut = apply_cuts(model, plan.cuts, ranks, device=device, problem=problem, loader=loader, results=plan.results)
        return of_ranks(cut)
    if problem is not None:
        raise problem
    devices = [resolve_device(device.name) for device in plan.devices]
    check_copies(devices)
    if is_applied(model):
        remove(model)
    return with_map(
        apply_cuts(model, plan.cuts, LocalRanks.of(devices), loader=loader, results=plan.results), _map_of(plan)
    )


def _map_of(plan: Plan) -> dict[str, str]:
    """Where modules are, as Accelerate writes it; of parameters on several devices: the devices."""
    replicas = plan.mesh is not None and plan.mesh.data > 1
    return {device.name: device.name for device in plan.devices} if plan.cuts or replicas else plan.device_map


def _clear(
    model: nn.Module, plan: Plan, problem: PlanError | ApplyError | None
) -> tuple[ProcessRanks, torch.device | None, PlanError | ApplyError | None]:
    """Remove what is applied already; return the ranks, this one's device, and what stands against the plan."""
    ranks = ProcessRanks.of()
    device, problem = own_place(plan, ranks, problem)
    if is_applied(model):
        agree(ranks, RankState(), problem)  # all ranks remove, or none
        remove(model)
    return ranks, device, problem


def own_place(
    plan: Plan, ranks: ProcessRanks, problem: PlanError | ApplyError | None
) -> tuple[torch.device | None, PlanError | ApplyError | None]:
    """The device of this process, or why it has none; `problem`: what was found before."""
    if ranks.size != len(plan.devices):
        problem = PlanError(
            f"the plan is for {len(plan.devices)} devices, and {ranks.size} processes run. Start as many as it has "
            f"devices (torchrun --nproc-per-node {len(plan.devices)}), or plan for {ranks.size}."
        )
    if problem is not None:
        return None, problem
    try:
        name = own_name(plan, ranks.rank)
        device = torch.device("cpu") if torch.device(name).type == "cpu" else resolve_device(name)  # each has all of it
        make_current(device)
    except (ApplyError, RuntimeError) as error:
        return None, error if isinstance(error, ApplyError) else ApplyError(first_line(error))
    return device, None


def apply_device_map(model: nn.Module, device_map: Mapping[str, Any]) -> nn.Module:
    """Apply a `device_map` ({module path: device}) without any knowledge of the model's flow.

    Any map runs, slower than a plan. Raises what `apply_plan` raises.
    """
    _check_not_cut(model)
    empty_caches(model)
    placing.place(model, Plan.from_device_map(device_map), conservative=True)
    return with_map(model, {path: str(device) for path, device in device_map.items()})


def remove(model: nn.Module) -> nn.Module:
    """Undo `apply_plan`: the same module, whole, where it was. Raises `ApplyError` if nothing is applied."""
    without_map(model)
    empty_caches(model)
    if pipeline_record(model) is not None:
        return remove_stages(model)
    if replica_record(model) is not None:
        return remove_replicas(model)
    return remove_cuts(model) if cut_record(model) is not None else placing.remove(model)


def bring_back_to(model: nn.Module, device: torch.device) -> None:
    """Let `remove` bring an applied model to this device: one that was loaded in place was nowhere before."""
    record, runtime = pipeline_record(model) or replica_record(model), placing.find_runtime(model)
    if record is not None:
        record.originals = dict.fromkeys(record.originals, device)
    elif runtime is not None:
        runtime.record = replace(runtime.record, originals=dict.fromkeys(runtime.record.originals, device))


def is_applied(model: nn.Module) -> bool:
    """Whether a plan is applied to this very module."""
    records = cut_record(model), pipeline_record(model), replica_record(model), placing.find_runtime(model)
    return any(record is not None for record in records)


def check_whole(model: nn.Module) -> None:
    """Raise `PlanError` for a model that can't be recorded as it was: its parameters or its calls are divided.

    Raises `SpecError` for what is no model.
    """
    if not isinstance(model, nn.Module):
        raise SpecError(
            f"a model is a torch.nn.Module, not {type(model).__name__}. Checkpoints and configurations by name or path "
            "are planned by `autoshard plan …` and loaded by autoshard.load(path, devices)."
        )
    runtime = placing.find_runtime(model)
    if is_applied(model) and (runtime is None or runtime.record.division is not None):
        raise PlanError(
            "a plan is applied to this model that divides its parameters or its batch, so another one can't be made or "
            "applied. Call autoshard.remove(model) before."
        )


def _check_belongs(model: nn.Module, plan: Plan) -> None:
    """Raise `PlanError` unless a plan is for this model as it is when nothing is applied to it."""
    record, cuts = pipeline_record(model) or replica_record(model), cut_record(model)
    known = record.plan.fingerprint if record is not None else cuts.fingerprint if cuts is not None else ""
    # the tensors that the model has now may be parts
    placing.check_belongs(model, plan, named_tensors(model), known)


def _refuse_offloaded(plan: Plan) -> PlanError | ApplyError | None:
    if not plan.offloaded:
        return None
    way = "has stages or replicas" if plan.mesh is not None else f"cuts parameters over {len(plan.devices)} devices"
    return PlanError(
        f"this plan {way} and keeps the parameters of {len(plan.offloaded)} modules off them between calls, which "
        "can't be done at once. Plan for more devices, or with strategy='balanced'."
    )


def _check_not_cut(model: nn.Module) -> None:
    if cut_record(model) or pipeline_record(model) or replica_record(model):
        raise ApplyError("this model is divided over ranks. Call autoshard.remove(model) first, on all of them.")


def own_name(plan: Plan, rank: int) -> str:
    """What the device of a rank is called on its own machine; over several machines a plan counts them on.

    cuda:0, cuda:1 of the first of two, cuda:2, cuda:3 of the second  ->  cuda:0, cuda:1 on each
    """
    device = plan.devices[rank]
    if len({one.host for one in plan.devices}) == 1:
        return device.name
    kind = device.name.partition(":")[0]
    before = sum(one.host == device.host and one.name.partition(":")[0] == kind for one in plan.devices[:rank])
    return f"{kind}:{before}"

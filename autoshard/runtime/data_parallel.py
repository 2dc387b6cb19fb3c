"""Replicas in several processes: torch's fully_shard inside of the user's own module (`sharded.py`).

    rank 0 and 1   share a replica's parameters, or each has one whole     gradients are averaged over all that have the
    rank 2 and 3   the next replica                                        same part, as backward goes on

Where a replica is cut over ranks of its own, gradients are averaged over those that have the same part. Each process
gives its own rows, as many as the others; the mean is over processes.
Replicas for answers are copies that know nothing of each other: processes may generate as they like.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan
from autoshard.runtime.agreement import (
    RankState,
    agree,
    digest_of,
    random_states,
    set_random_states,
    state_of_rank,
    together,
)
from autoshard.runtime.around import take_off
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import Loader, apply_cuts, cut_record, let_gather, remove_cuts
from autoshard.runtime.devices import is_accelerator
from autoshard.runtime.groups import Made, cut_groups, end_groups, shard_groups
from autoshard.runtime.hooks import to_device
from autoshard.runtime.launched import recompute_layers
from autoshard.runtime.moves import check_filled, move_tensors, named_tensors
from autoshard.runtime.refused import COPIES, allow_methods, refuse_methods, refuse_saving, stand_in
from autoshard.runtime.sharded import (
    Replaced,
    Sharing,
    check_shardable,
    forget_whole,
    shard,
    shards,
    unshard,
    unshard_failed,
)
from autoshard.runtime.used import Used, no_sync


@dataclass(slots=True, kw_only=True)
class ReplicaRecord:
    """What of a plan of replicas over processes was applied to a model.

    Attributes:
        ranks: all processes of the plan; `replicas`: those that are given different rows.
        device: where this process computes; `originals`: name -> device it was on before.
        replaced: parameters that were replaced by sharded ones, which `used` follows; `handles`: undo the hooks.
        made: groups that were made for this model.
    """

    plan: Plan
    ranks: ProcessRanks
    replicas: ProcessRanks
    device: torch.device
    originals: dict[str, torch.device]
    replaced: list[Replaced] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    made: Made = field(default_factory=Made)
    used: Used | None = None

    def __deepcopy__(self, memo: dict) -> "ReplicaRecord":
        return self  # a copy of the model runs on the same processes


def apply_replicas(
    model: nn.Module, plan: Plan, ranks: ProcessRanks, *, device: torch.device | None, problem: Exception | None = None,
    loader: Loader | None = None,
) -> nn.Module:  # fmt: skip
    """Make a model one of the replicas of a plan; returns the same object. All ranks call it.

    `device`: where this process computes, None if `problem` says why this rank can't go on. `loader`: fills parameters
    on meta, of which a rank has only its shards. Raises `PlanError`, `ApplyError`, or `RankError` if ranks don't agree;
    the model is then as it was.
    """
    state, error = RankState(), problem
    originals = {name: tensor.device for name, tensor in named_tensors(model).items()}
    mesh = plan.mesh
    try:
        if problem is None:
            check_replicas(model, plan, filled=loader is not None and shards(plan))
            if shards(plan):
                check_shardable(model, plan)
            # each replica draws random numbers of its own
            state = replace(state_of_rank(model, plan.cuts, device), plan=digest_of(plan), random=())
    except Exception as found:
        error = found
    agree(ranks, state, error, device)
    assert device is not None and mesh is not None
    record = ReplicaRecord(plan=plan, ranks=ranks, replicas=ranks, device=device, originals=originals)
    try:
        if plan.cuts:
            _cut_replica(model, record, loader)
        else:
            _move_replica(model, record)
        if shards(plan):
            _shard_replica(model, record, loader)
    except BaseException:
        _withdraw(model, record)
        raise
    if not shards(plan):
        record.handles.append(model.register_forward_pre_hook(ReplicaHook(record), with_kwargs=True))
    return model


def _move_replica(model: nn.Module, record: ReplicaRecord) -> None:
    """Bring the tensors of this replica to its device, but for what goes there block by block when it is sharded."""
    tensors = named_tensors(model)
    divided = [one for one in model.parameters() if one.dim() or one.is_meta] if shards(record.plan) else []
    sharded = set(map(id, divided))
    target = {n: record.originals[n] if id(one) in sharded else record.device for n, one in tensors.items()}
    with together(record.ranks):
        move_tensors(tensors, target)


def _withdraw(model: nn.Module, record: ReplicaRecord) -> None:
    """Make a model what it was, where ranks could not all become replicas."""
    unshard_failed(model, record.replaced)
    take_off(model)
    for handle in record.handles:
        handle.remove()
    if cut_record(model) is not None:
        remove_cuts(model)
    elif not record.plan.cuts:
        move_tensors(named_tensors(model), record.originals)
    end_groups(record.made)


def _cut_replica(model: nn.Module, record: ReplicaRecord, loader: Loader | None) -> None:
    """Cut this replica over the ranks that share it; all ranks call it, and hear of what fails in another replica."""
    mesh, ranks = record.plan.mesh, record.ranks
    assert mesh is not None
    cut_ranks = cut_groups(mesh, ranks, record.made)
    random = random_states(record.device)
    with together(ranks):
        cuts, results = record.plan.cuts, record.plan.results
        apply_cuts(model, cuts, cut_ranks, device=record.device, loader=loader, results=results)
        if mesh.ep > 1:  # ranks that have samples of their own draw random numbers of their own
            set_random_states(random, record.device)


def _shard_replica(model: nn.Module, record: ReplicaRecord, loader: Loader | None) -> None:
    """Shard the parameters of this replica; all ranks call it, and put them back if one of them fails."""
    mesh = record.plan.mesh
    assert mesh is not None
    sharing = Sharing(record.ranks, *shard_groups(mesh, record.ranks, record.made))
    record.replicas = sharing.replicas or sharing.shared
    if mesh.ep > 1:
        experts = Sharing(record.ranks, *shard_groups(mesh, record.ranks, record.made, experts=True))
        sharing = replace(sharing, experts=experts)
    with together(record.ranks):
        used = record.used = shard(model, record.plan, sharing, record.device, record.replaced)
        record.handles.append(used)
        recompute_layers(model, record.plan)
        record.handles += let_gather(model, mesh.cp > 1)
        if loader is not None:
            loader.fill_rest(model, cut_record(model), record.device)
    forget_whole(record.replaced)
    record.handles.append(model.register_forward_pre_hook(ReplicaHook(record), with_kwargs=True))
    stand_in(model, "zero_grad", functools.partial(_zero_grad, model.zero_grad, used))
    refuse_methods(model, *COPIES)
    if not record.plan.cuts:  # of which `state_dict()` has whole tensors
        refuse_saving(model)
    if not hasattr(model, "no_sync"):
        stand_in(model, "no_sync", functools.partial(no_sync, model, used))


def _zero_grad(usual: Callable[[bool], None], used: Used, set_to_none: bool = True) -> None:
    """As `nn.Module.zero_grad`, also between forward and backward, when modules have whole parameters and no parts."""
    usual(set_to_none)
    for index, parameter in enumerate(used.parameters):
        used.seen.discard(index)
        if parameter.grad is not None:
            parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)


def check_replicas(model: nn.Module, plan: Plan, filled: bool = False) -> None:
    """Raise unless the model can be a replica: it has values, or is `filled`, and rows of its batch are not mixed."""
    if plan.batch is None and not plan.launch:
        raise PlanError(
            "this plan has replicas and does not say how the batch is divided. Plan again with "
            'strategy="data-parallel".'
        )
    if plan.workload.training and plan.mesh is not None and len(set(plan.mesh.shares)) > 1:
        raise PlanError(
            f"this plan gives devices unequal shares of the batch, {', '.join(map(str, plan.mesh.shares))}, which one "
            "process trains with. Plan again in the processes: each is given as many rows."
        )
    if plan.cuts and plan.mesh is not None and plan.mesh.sharded and not plan.launch:
        raise PlanError("a plan can't cut parameters over ranks and shard them over replicas, too. Plan again.")
    if not filled:
        check_filled(named_tensors(model))


def replica_record(model: nn.Module) -> ReplicaRecord | None:
    """What of replicas over processes was applied to a model, None if nothing was."""
    hooks = torch_private.forward_pre_hooks(model)
    return next((hook.record for hook in hooks if isinstance(hook, ReplicaHook)), None)


def remove_replicas(model: nn.Module) -> nn.Module:
    """Make a replica an ordinary model again, where it was, with its present values.

    All ranks call it where parameters are sharded or cut. Raises `ApplyError` if nothing is applied.
    """
    record = replica_record(model)
    if record is None:
        raise ApplyError("nothing to remove: this model is no replica.")
    if record.used is not None:
        record.used.check_assigned()
        unshard(model, record.replaced, {} if record.plan.cuts else record.originals)
        allow_methods(model)
    take_off(model)
    for handle in record.handles:
        handle.remove()
    if record.plan.spread and record.replaced:
        _give_gradients(model, record)
    if record.plan.cuts:
        remove_cuts(model)
    end_groups(record.made)
    if not record.plan.cuts:
        tensors = named_tensors(model)
        move_tensors(tensors, {name: record.originals.get(name, tensor.device) for name, tensor in tensors.items()})
    return model


def _give_gradients(model: nn.Module, record: ReplicaRecord) -> None:
    """Give parameters gradients of zero where another rank has one for its experts: they are put together."""
    parameters = list(model.parameters())
    here = torch.tensor([float(one.grad is not None) for one in parameters], device=record.device)
    there = record.ranks.all_reduce(here)
    for one, count in zip(parameters, there.tolist(), strict=True):
        if count and one.grad is None:
            one.grad = torch.zeros_like(one)


class ReplicaHook:
    """The hook on the root of a replica that holds the record; it refuses gradients that nobody would average."""

    def __init__(self, record: ReplicaRecord) -> None:
        self.record = record

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        if self.record.used is not None:
            return None
        if torch.is_grad_enabled() and any(one.requires_grad for one in module.parameters()):
            raise ApplyError(
                "this plan is for answers, and gradients of its replicas are averaged by nobody. Call the model "
                'inside of torch.no_grad(), or plan with workload=Workload(mode="training").'
            )
        return to_device((args, kwargs), self.record.device) if is_accelerator(self.record.device) else None

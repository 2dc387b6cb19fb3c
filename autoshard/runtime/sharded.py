"""Sharded replicas: torch's fully_shard, block by block, on the user's own module, and the way back.

    rank 0   weight rows 0 … 3   ┐  gathered for the forward of a block and for its backward, then let go;
    rank 1   weight rows 4 … 7   ┘  gradients are averaged and scattered: each keeps those of its rows

torch puts new parameters in the place of the old ones, so optimizers must be made afterwards; one made before is told
so at its first step. The old objects wait, without memory, and are the model's again after removal.

All ranks must run the same blocks in the same order: each gathers what the others give at that moment, whatever it is
of. At the end of each forward they compare which blocks they gathered.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.common.module_paths import is_below
from autoshard.common.packed import own_attributes
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.dtensors import alike_on, is_sharded, whole_of
from autoshard.runtime.exchanges import Gather, MeanOfReplicas, Order, ReduceScatter
from autoshard.runtime.moves import set_data
from autoshard.runtime.outsiders import refuse_changes
from autoshard.runtime.scalars import Scalars
from autoshard.runtime.used import REPLACED, Used


@dataclass(slots=True, eq=False)
class Replaced:
    """A parameter that was replaced, and where it was: (module, name) for each of its names."""

    parameter: nn.Parameter
    places: list[tuple[nn.Module, str]]
    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who divides what: all ranks of a plan, those among whom parameters are sharded, and those with equal shards.

    `experts`: the same for modules whose experts are divided over ranks.
    """

    ranks: ProcessRanks
    shared: ProcessRanks
    replicas: ProcessRanks | None = None
    experts: "Sharing | None" = None


def shard(
    model: nn.Module, plan: Plan, sharing: Sharing, device: torch.device, replaced: list[Replaced],
    absent: frozenset[nn.Parameter] = frozenset(),
) -> Used:  # fmt: skip
    """Let every rank keep its part of each parameter; returns what follows their use, and fills `replaced`.

    Ranks of different replicas have the same parts (`Mesh.dp`). Parameters get the dtype of the plan's precision.
    `absent`: parameters that this rank has nothing of, as those of other stages. All ranks call it, after
    `check_shardable`; then `forget_whole`, or `unshard_failed` if one of them raised.
    """
    from torch.distributed.device_mesh import DeviceMesh

    modules = dict(model.named_modules())
    blocks = [modules[path] for path in plan.gathered]
    blocks = [block for block in blocks if not absent.issuperset(block.parameters())]
    absent |= {one for one in model.parameters() if not one.numel()}  # of experts that other ranks have
    scalars = [one for one in _parameters(model, {id(one) for one in absent}) if not one.parameter.dim()]
    absent |= {one.parameter for one in scalars}
    left_out = {id(one) for one in absent}
    ranks = sharing.ranks
    options: dict[str, Any] = {"ignored_params": set(absent)}
    if plan.mesh is not None and plan.mesh.pp > 1:
        options["reshard_after_forward"] = False  # all micro-batches go through them
    order = Order(ranks, device, alone=sharing.shared.size == 1)
    experts = [modules[path] for path in plan.spread]
    replaced += scalars
    for one in scalars:
        _store(one.parameter, plan)
    for number, module in enumerate((*experts, *blocks, model)):
        group = sharing.experts if sharing.experts is not None and number < len(experts) else sharing
        own = _parameters(module, left_out | {id(one.parameter) for one in replaced})
        replaced += own
        for one in own:
            _store(one.parameter, plan)
        whole = [one.parameter.data for one in own]
        mesh = DeviceMesh.from_group(group.shared.group, device.type)
        engine = torch_private.fully_shard(module, mesh=mesh, **policy_of(plan, casts=group is sharing), **options)
        for one, data in zip(own, whole, strict=True):
            one.parameter.data = data  # where it was: on the device there is one block at a time, until it is sharded
        engine.set_custom_all_gather(Gather(ranks, order, number))
        engine.set_custom_reduce_scatter(ReduceScatter(ranks))
        if group.replicas is not None:
            engine.set_all_reduce_hook(MeanOfReplicas(ranks, group.replicas))
    model.set_reduce_scatter_unused_params(True)  # type: ignore[operator]
    for one in replaced:
        _give_memory(one, device)
    groups = [group for group in (sharing.shared, sharing.replicas) if group is not None]
    means = Scalars([one.parameter for one in scalars], [MeanOfReplicas(ranks, group) for group in groups])
    used = Used(model, [one.places[0] for one in replaced[len(scalars) :]], ranks, order, means)
    if policy_of(plan):
        used.frozen = {name: one for name, one in model.named_parameters() if _stays_narrow(one)}
    used.handles += [
        *means.watch(), model.register_forward_hook(means), model.register_forward_hook(order),
        model.register_forward_pre_hook(means.check_finished, prepend=True), model.register_forward_hook(_let_go),
        model.register_forward_pre_hook(used.check_frozen, prepend=True),
        *_let_load_whole(replaced[len(scalars) :]),
        *refuse_changes(model),
    ]  # fmt: skip
    used.follow_steps()
    return used


def _let_load_whole(replaced: Sequence[Replaced]) -> list[Any]:
    """Let modules load tensors that are whole, also while they are gathered; returns handles."""
    tables: dict[nn.Module, dict[str, Any]] = {}
    for module, name in (place for one in replaced for place in one.places):
        tables.setdefault(module, {})[name] = getattr(module, name)
    return [one.register_load_state_dict_pre_hook(partial(_take_parts, table)) for one, table in tables.items()]


def _take_parts(own: dict[str, Any], module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Hook before a state is loaded: of tensors that are whole, the same on all ranks, a rank takes its part."""
    for name, mine in own.items():
        value = state.get(prefix + name)
        if isinstance(value, torch.Tensor) and not is_sharded(value) and value.shape == mine.shape:
            whole: Any = alike_on(mine, value.detach().to(mine.device))
            state[prefix + name] = whole.redistribute(placements=mine.placements)


def _let_go(model: Any, args: Any, output: Any) -> None:
    """Let go of what is outside of blocks, too, if no backward will: an optimizer may be made before the next call."""
    if not torch.is_grad_enabled():
        model.reshard()


def _give_memory(one: Replaced, device: torch.device) -> None:
    """Give the shard of a parameter that was on meta memory with any values; the whole of it never has any."""
    from torch.distributed.tensor import DTensor

    module, name = one.places[0]
    empty: Any = getattr(module, name)
    if not empty.is_meta:
        return
    one.device = device
    if not is_sharded(empty):
        return
    local = torch.empty_like(empty.to_local(), device=device, requires_grad=False)
    made = DTensor.from_local(
        local, empty.device_mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride()
    )
    parameter = nn.Parameter(made, requires_grad=one.parameter.requires_grad)
    for module, name in one.places:
        setattr(module, name, parameter)


def _store(parameter: nn.Parameter, plan: Plan) -> None:
    """Give a parameter the dtype that a plan for processes trains it in."""
    if plan.launch and parameter.is_floating_point():
        parameter.data = parameter.data.to(stored_dtype(parameter, plan))


STORED = {"mixed": torch.float32, "full": torch.float32, "pure": torch.bfloat16}
"""The dtype of parameters, their gradients and their optimizer state, by a plan's precision."""


def stored_dtype(parameter: torch.Tensor, plan: Plan) -> torch.dtype:
    """The dtype that a plan for processes keeps a parameter in: "full" leaves float64 as it is.

    "mixed" leaves 16 bits of one that is not trained: it is gathered in 16 bits, and no optimizer adds small updates.
    """
    if plan.precision == "mixed" and _stays_narrow(parameter):
        return parameter.dtype
    is_wider = plan.precision == "full" and parameter.dtype == torch.float64
    return parameter.dtype if is_wider else STORED.get(plan.precision, parameter.dtype)


def _stays_narrow(parameter: torch.Tensor) -> bool:
    """Whether "mixed" leaves a parameter in its 16 bits."""
    return not parameter.requires_grad and parameter.dtype in (torch.bfloat16, torch.float16)


def policy_of(plan: Plan, casts: bool = True) -> dict[str, Any]:
    """What fully_shard is told of the precision of a plan for processes: "mixed" gathers and computes in 16 bits.

    `casts`: what a block is given is lowered, too; inside of one, code has its reasons for what is not.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy

    if not plan.launch or plan.precision != "mixed":
        return {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=casts)
    return {"mp_policy": policy}


def shards(plan: Plan) -> bool:
    """Whether fully_shard carries out a plan: of sharded replicas, and of all replicas that are trained."""
    mesh = plan.mesh
    if mesh is None:
        return False
    trained = plan.workload.training and (bool(plan.launch) or (mesh.data > 1 and mesh.pp == 1))
    return mesh.sharded or trained


def forget_whole(replaced: Sequence[Replaced]) -> None:
    """Free the memory of the whole parameters, once all ranks have sharded theirs."""
    for one in replaced:
        if one.parameter.dim():
            one.parameter.data = torch.empty(0, dtype=one.parameter.dtype, device=one.parameter.device)
            vars(one.parameter)[REPLACED] = True


def unshard_failed(model: nn.Module, replaced: Sequence[Replaced]) -> None:
    """Undo what `shard` did, also half-way, while the whole parameters are there; nobody else is asked."""
    torch_private.undo_fully_shard(model)
    for one in replaced:
        one.parameter.data = one.parameter.data.to(one.dtype)
        for module, name in one.places:
            setattr(module, name, one.parameter)


def check_shardable(model: nn.Module, plan: Plan) -> None:
    """Raise `PlanError` for a block that the model lacks, `ApplyError` for a parameter that can't be sharded."""
    from torch.distributed.fsdp import FSDPModule

    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise ApplyError(
            f"torch {torch.__version__} can't exchange gradients that only some ranks have, as sharded replicas must. "
            "Update torch (2.13 is known to do), or use devices that hold a whole replica each."
        )
    modules = {path for path, _ in model.named_modules()}
    for path in plan.gathered:
        if path not in modules:
            raise PlanError(f"the plan gathers {path!r} as one, which this {type(model).__name__} does not have.")
    block_of: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((path for path in plan.gathered if is_below(name, path)), "")
        other = block_of.setdefault(id(parameter), block)
        if other != block:
            raise PlanError(
                f"{name} is a parameter of {other or block} and of {block if other else 'what is outside of it'}, and "
                "layers are gathered one by one. Plan with --mesh of pp and tp, and --precision full or pure, where "
                "parameters stay whole."
            )
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise ApplyError(f"{name} has a gradient, which can't be sharded with it. Call zero_grad() before apply.")
        if torch_private.gradient_hooks(parameter) or torch_private.has_accumulation_hooks(parameter):
            raise ApplyError(
                f"{name} has a hook on its gradient, which would not be called for the part that is trained. Take it "
                "off; register_post_accumulate_grad_hook after apply is called with the mean over replicas."
            )
        for attribute in own_attributes(parameter):
            if not attribute.startswith("_"):
                raise ApplyError(
                    f"{name} has an attribute {attribute!r}, which a part of it would not have. Keep it on the module, "
                    "or use devices that hold a whole replica each."
                )
        if not parameter.is_contiguous():
            raise ApplyError(
                f"{name} is not contiguous, and torch's fully_shard can't shard it by its rows. Make it a parameter "
                "that is, or plan with --mesh of pp and --precision full or pure, where parameters stay whole."
            )
        if not parameter.dim() and any(is_below(name, path) for path in plan.spread):
            raise ApplyError(
                f"{name} has no dimension, and the experts beside it are divided over ranks. Make it a parameter of "
                "shape [1], or plan without ep."
            )


def unshard(model: nn.Module, replaced: Sequence[Replaced], originals: dict[str, torch.device]) -> None:
    """Put the whole parameters back, the same objects, with the values they have now; all ranks call it."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for module in model.modules():
        reshard = getattr(module, "reshard", None)
        if torch_private.is_fully_sharded(module) and reshard is not None:
            reshard()
    torch_private.undo_fully_shard(model)
    for one in replaced:
        module, name = one.places[0]
        present: Any = getattr(module, name)
        target = originals.get(names.get(id(present), ""), one.device)
        with torch.no_grad():
            set_data(one.parameter, whole_of(present.detach()).to(target, one.dtype))
            one.parameter.grad = None if present.grad is None else whole_of(present.grad).to(target, one.dtype)
        one.parameter.requires_grad_(present.requires_grad)
        for module, name in one.places:
            setattr(module, name, one.parameter)
        vars(one.parameter).pop(REPLACED, None)


def _parameters(module: nn.Module, done: set[int]) -> list[Replaced]:
    found: dict[int, Replaced] = {}
    for inner in module.modules():
        for name, parameter in inner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in done or is_sharded(parameter):
                continue
            one = found.setdefault(id(parameter), Replaced(parameter, [], parameter.device, parameter.dtype))
            one.places.append((inner, name))
    return list(found.values())

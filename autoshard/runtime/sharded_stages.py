"""Stages whose parameters are sharded over replicas, and gathered in 16 bits: torch's fully_shard on their layers.

    forward of the first part    each layer is gathered as it is called, what is outside of layers at the start
    until the last backward      whole parameters stay, gradients are added up whole
    last backward of a stage     gradients are averaged over replicas and scattered, parameters let go

The root of fully_shard is the user's model, whose own forward never runs: `run_inside` stands for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from autoshard.nested import map_tensors
from autoshard.plan import Plan
from autoshard.runtime.cuts import let_gather
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.sharded import Sharing, policy_of, shard, unshard, unshard_failed

_METHOD = "autoshard_run_inside"


def shards_stages(plan: Plan) -> bool:
    """Whether fully_shard is put on the stages of a plan: with sharded replicas, and where it lowers precision."""
    mesh = plan.mesh
    trained = bool(plan.launch) and plan.workload.training
    return mesh is not None and mesh.pp > 1 and trained and (mesh.sharded or bool(policy_of(plan)))


def shard_stages(model: nn.Module, record: PipelineRecord, sharing: Sharing) -> list[Any]:
    """Let this rank keep its part of each parameter of its stages; returns handles. All ranks call it."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    absent = frozenset(one for name, one in model.named_parameters() if not record.has(name))
    used = record.used = shard(model, record.plan, sharing, record.device, record.replaced, absent)

    def run(program: Callable[..., Any], *args: Any) -> Any:
        used.check_frozen()
        used.notes[-1](model, ())
        return program(*args)

    vars(model)[_METHOD] = run
    register_fsdp_forward_method(model, _METHOD)
    return [used, *let_gather(model)]


def withdraw(model: nn.Module, record: PipelineRecord) -> None:
    """Undo what `shard_stages` did, also half-way; nobody else is asked."""
    vars(model).pop(_METHOD, None)
    unshard_failed(model, record.replaced)


def unshard_stages(model: nn.Module, record: PipelineRecord) -> None:
    """Give this rank its stages whole; all ranks call it."""
    if record.used is not None:
        record.used.check_assigned()
    vars(model).pop(_METHOD, None)
    if record.used is not None:
        unshard(model, record.replaced, {})
        record.used, record.replaced = None, []


def run_inside(model: nn.Module, program: Callable[..., Any], *args: Any) -> Any:
    """Run a program of a stage while parameters outside of layers are whole; of others, their calls see to that."""
    return vars(model)[_METHOD](program, *args)


def layers_of(model: nn.Module, record: PipelineRecord, number: int) -> list[nn.Module]:
    """The layers of a stage that are gathered as one, and the model."""
    plan = record.plan
    return [*map(model.get_submodule, plan.layers_of(plan.stages[number])), model]


def lower(skeleton: nn.Module, plan: Plan) -> None:
    """Let a model that is only recorded compute in the dtype of a plan, as fully_shard lets the real one."""
    policy = policy_of(plan).get("mp_policy")
    if policy is None:
        return

    def cast(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        return lowered((args, kwargs), plan)

    for parameter in skeleton.parameters():
        if parameter.is_meta and parameter.dim():  # others are shared with the model, or are not gathered
            parameter.data = lowered(parameter.data, plan)
    for path in plan.gathered:
        skeleton.get_submodule(path).register_forward_pre_hook(cast, with_kwargs=True)


def lowered(given: Any, plan: Plan) -> Any:
    """Nested values with their floats in the dtype that a plan computes in, if that is another."""
    policy = policy_of(plan).get("mp_policy")
    if policy is None:
        return given
    return map_tensors(given, lambda one: one.to(policy.param_dtype) if one.is_floating_point() else one)


def let_go(model: Any, failed: bool) -> None:
    """Let go of whole parameters, and of gradients that a step which failed has left whole."""
    from torch.distributed.fsdp import FSDPModule

    if failed:
        model.reset_iter_state()
        return
    for module in model.modules():  # since torch 2.15 a reset takes the gradients, too
        if isinstance(module, FSDPModule):
            module.reshard()


def average_with(engines: Sequence[Any], last: bool) -> None:
    """Say to what is gathered as one, the model last, whether the next backward of a stage is its last."""
    for engine in engines:
        engine.set_requires_gradient_sync(last, recurse=False)
        engine.set_reshard_after_backward(last, recurse=False)
    engines[-1].set_is_last_backward(last)

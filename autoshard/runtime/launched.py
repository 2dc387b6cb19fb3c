"""Plans for one process per device, made before the processes run: which of them are carried out, and recomputation.

Each process calls the model with samples of its own, as under torch's fully_shard; gradients are means over processes.
"""

from dataclasses import replace
from typing import Literal

import torch
from torch import nn

from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Mesh, Plan
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import Action
from autoshard.runtime.collectives import count_processes
from autoshard.runtime.recompute import hook_recompute, recomputed_layers
from autoshard.runtime.sharded import stored_dtype
from autoshard.runtime.sharded_stages import shards_stages


def is_divided_here(plan: Plan, degree: Literal["tp", "ep", "cp"]) -> bool:
    """Whether a plan for processes divides matrices, experts or sequences, and where is still to be found."""
    return plan.launch == "processes" and plan.mesh is not None and getattr(plan.mesh, degree) > 1 and not plan.cuts


def of_first_replica(plan: Plan) -> Plan:
    """The plan on those devices that share the matrices of its first replica; that all fits was found for all of it."""
    assert plan.mesh is not None
    devices = (replace(device, memory_bytes=_ENDLESS_BYTES) for device in plan.devices[: plan.mesh.tp])
    return replace(plan, devices=tuple(devices))


def with_cuts(plan: Plan, found: Plan) -> Plan:
    """The plan with the cuts that were found for its first replica. Raises `PlanError` if there are none, or fewer."""
    assert plan.mesh is not None
    if not found.cuts or {cut.degree for cut in found.cuts} != {plan.mesh.tp}:
        raise PlanError(
            f"no matrix of this model can be shared by {plan.mesh.tp} devices, as tp={plan.mesh.tp} says. "
            "Plan with --mesh of dp and fsdp only."
        )
    placements = {"": plan.devices[0].name} if plan.mesh.pp == 1 else plan.placements
    return replace(plan, cuts=found.cuts, whole=found.whole, results=found.results, placements=placements)


def with_divided_outputs(plan: Plan) -> Plan:
    """The plan with logits left in parts behind their loss, too."""

    def in_parts(action: Action) -> Action:
        return replace(action, kind="loss_in_parts") if action.kind == "loss" else action

    return replace(plan, cuts=tuple(replace(cut, actions=tuple(map(in_parts, cut.actions))) for cut in plan.cuts))


def is_staged_here(plan: Plan) -> bool:
    """Whether stages of a plan for processes take parts of a batch, and how it is divided is still to be found."""
    staged = plan.launch == "processes" and plan.mesh is not None and plan.mesh.pp > 1
    divided = plan.workload.training or (plan.num_microbatches > 1 and not plan.workload.generates)
    return staged and divided and plan.batch is None


def answers_in_stages(plan: Plan) -> bool:
    """Whether the processes of a plan run a model's own forward, and generate(), each computing its stages."""
    return plan.launch == "processes" and plan.mesh is not None and plan.mesh.pp > 1 and plan.workload.generates


def with_batch(plan: Plan, batch: BatchAxis) -> Plan:
    """The plan with how its batch is divided, and with stages placed in the order of its processes."""
    mesh = plan.mesh
    assert mesh is not None
    placements = {
        path: plan.devices[mesh.rank(pipeline=number % mesh.pp)].name
        for number, stage in enumerate(plan.stages)
        for path in stage.paths
    }
    return replace(plan, batch=batch, placements=placements)


def check_stored(model: nn.Module, plan: Plan) -> None:
    """Raise `ApplyError` unless the parameters of stages have the dtype that a plan for processes trains them in."""
    for name, parameter in model.named_parameters():
        wanted = stored_dtype(parameter, plan)
        if parameter.is_floating_point() and parameter.dtype != wanted:
            other = "pure" if parameter.dtype == torch.bfloat16 else "full"
            raise ApplyError(
                f"{name} is {parameter.dtype}, and this plan trains stages in {wanted}. Convert the model before: "
                f"model.to({wanted}), or plan again with --precision {other}."
            )


_ENDLESS_BYTES = 1 << 60
FLOATS = ("bfloat16", "float16", "float32", "float64")


def check_launched(plan: Plan) -> None:
    """Raise `PlanError` unless a plan for processes can be carried out, and as many run as it has devices."""
    assert plan.mesh is not None
    training = plan.workload.training
    if not training and plan.mesh.tp * plan.mesh.pp > 1 and plan.precision not in FLOATS:
        raise PlanError(
            f"this plan is priced with weights of {plan.precision}, and parameters are divided as they are. Plan with "
            "--dtype bfloat16, or place a quantised model by Hugging Face's own loader."
        )
    if plan.mesh.ep > 1:
        _check_experts(plan.mesh)
    if plan.mesh.cp > 1 and (plan.mesh.tp * plan.mesh.pp * plan.mesh.ep > 1 or not training):
        raise PlanError(
            f"sequences are divided in training, with dp and fsdp, and this plan has cp={plan.mesh.cp} with tp="
            f"{plan.mesh.tp}, pp={plan.mesh.pp} and ep={plan.mesh.ep}. Plan with --mesh of dp, fsdp and cp."
        )
    if plan.mesh.pp > 1:
        _check_stages(plan)
    if training and plan.precision == "master":
        raise PlanError(
            'with precision "master" the optimizer keeps a copy of the parameters, which apply does not make. Plan '
            "with --precision mixed: parameters are then that copy, and are gathered in 16 bits."
        )
    if not training and plan.mesh.fsdp > 1:
        raise PlanError("sharded replicas are carried out for training. Plan answers with dp, tp and pp only.")
    if count_processes() != plan.mesh.size:
        running = f"{count_processes()} run" if count_processes() else "this is none of torchrun's"
        raise PlanError(
            f"this plan is for {plan.mesh.size} processes, one per device, and {running}. Start the script with "
            f"torchrun --nproc-per-node={plan.mesh.size // len({device.host for device in plan.devices})} …, and call "
            "torch.distributed.init_process_group() before autoshard.apply()."
        )


def _check_experts(mesh: Mesh) -> None:
    """Raise `PlanError` for what experts are not divided with."""
    if mesh.tp * mesh.pp > 1:
        raise PlanError(
            f"experts are divided among replicas, and this plan has ep={mesh.ep} with tp={mesh.tp} and pp={mesh.pp}. "
            "Plan with --mesh of dp, fsdp and ep, or without ep."
        )
    if mesh.data % mesh.ep or max(mesh.fsdp, mesh.ep) % min(mesh.fsdp, mesh.ep):
        raise PlanError(
            f"{mesh.ep} groups of experts don't fit {mesh.dp} x {mesh.fsdp} replicas. Plan with an ep that divides "
            "them, and is a multiple or a divisor of fsdp."
        )


def _check_stages(plan: Plan) -> None:
    """Raise `PlanError` for what stages are not trained with."""
    mesh = plan.mesh
    assert mesh is not None
    stages = f"this plan has pp={mesh.pp}"
    if mesh.data > 1 and len({device.host for device in plan.devices}) > 1 and not mesh.stages_outermost:
        raise PlanError(
            f"{stages} and {mesh.data} replicas on several hosts, and is for another order of processes than was "
            "priced: an older autoshard made it. Plan again."
        )
    if not plan.layers and (mesh.sharded or plan.precision == "mixed" or plan.recompute == "selective"):
        raise PlanError(
            f"{stages} and names no layers to gather one by one: they share parameters, or an older autoshard made it. "
            "Plan again, and where they share parameters with --mesh of pp and tp, and --precision full or pure."
        )
    if plan.schedule == "zero-bubble" and shards_stages(plan):
        raise PlanError(
            f"{stages} with the schedule zero-bubble, which computes gradients of parameters apart from the others; "
            "torch's fully_shard, which shards them and lowers precision, can't. Plan with --schedule 1f1b or "
            "interleaved, or without fsdp and with --precision full or pure."
        )


def recompute_layers(model: nn.Module, plan: Plan) -> None:
    """Let the layers of a plan for processes compute activations again in backward."""
    older = plan.mesh is not None and plan.mesh.pp > 1 and not plan.layers  # their stages are computed again whole
    if plan.launch and not older:
        hook_recompute(dict(model.named_modules()), recomputed_layers(plan), plan.recompute == "selective")

"""Plans for one process per device, made before the processes run: which of them are carried out, and recomputation.

Each process calls the model with samples of its own, as under torch's fully_shard; gradients are means over processes.
"""

from torch import nn

from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.runtime.collectives import count_processes
from autoshard.runtime.recompute import hook_recompute


def is_cut_alone(plan: Plan) -> bool:
    """Whether a plan for processes says only that every matrix is shared by all of them."""
    return plan.launch == "processes" and plan.mesh is not None and plan.mesh.size == plan.mesh.tp > 1


FLOATS = ("bfloat16", "float16", "float32", "float64")
OTHERS = {"tp": "column-parallel", "pp": "pipeline"}
"""Degrees of training that run where the processes plan themselves, and the strategy that has them."""


def check_launched(plan: Plan) -> None:
    """Raise `PlanError` unless a plan for processes is one of replicas, and as many processes run as it has devices."""
    assert plan.mesh is not None
    answers = is_cut_alone(plan) and not plan.workload.training
    if answers and plan.precision not in FLOATS:
        raise PlanError(
            f"this plan is priced with weights of {plan.precision}, and parameters are cut as they are. Plan with "
            "--dtype bfloat16, or place a quantised model by Hugging Face's own loader."
        )
    for name, degree in plan.mesh.degrees.items():
        if degree > 1 and name not in ("dp", "fsdp") and not answers:
            instead = "Plan with --mesh of dp and fsdp only"
            if name in OTHERS:
                instead = f'Plan in processes started with torchrun, with strategy="{OTHERS[name]}"'
            raise PlanError(
                "of plans made for processes elsewhere, apply trains dp and fsdp, and this one has "
                f"{name}={degree}. {instead}: those plans are carried out."
            )
    if plan.workload.training and plan.precision == "master":
        raise PlanError(
            'with precision "master" the optimizer keeps a copy of the parameters, which apply does not make. Plan '
            "with --precision mixed: parameters are then that copy, and are gathered in 16 bits."
        )
    if not plan.workload.training and plan.mesh.fsdp > 1:
        raise PlanError("sharded replicas are carried out for training. Plan answers with dp only.")
    if count_processes() != plan.mesh.size:
        running = f"{count_processes()} run" if count_processes() else "this is none of torchrun's"
        raise PlanError(
            f"this plan is for {plan.mesh.size} processes, one per device, and {running}. Start the script with "
            f"torchrun --nproc-per-node={plan.mesh.size // len({device.host for device in plan.devices})} …, and call "
            "torch.distributed.init_process_group() before autoshard.apply()."
        )


def recompute_layers(model: nn.Module, plan: Plan) -> list[object]:
    """Let the layers of a plan for processes compute activations again in backward; returns handles."""
    if not plan.launch or plan.recompute not in ("selective", "full"):
        return []
    modules = dict(model.named_modules())
    paths = [path for stage in plan.stages for path in stage.paths]
    return list(hook_recompute(modules, paths, selective=plan.recompute == "selective"))

"""What is different where the applied model runs in parts of its batch: rounding, and what its differences may mean."""

from dataclasses import replace

from torch import nn

from autoshard import torch_private
from autoshard.plan import Plan
from autoshard.runtime.hooks import RootHook

IN_PARTS = (
    "parts of the batch take other matrix products than the whole, so results are equal to rounding: what passes is "
    "1e-5 of the largest value of a tensor in float32 (1e-12 in float64, 1e-2 in float16, 5e-2 in bfloat16)"
)
MIXED = "with the batch in one piece this plan gives what the original gives: it is divided along what is no batch"


def is_divided(plan: Plan) -> bool:
    """Whether calls of a model run in parts under a plan."""
    return plan.batch is not None and (plan.num_microbatches > 1 or (plan.mesh is not None and plan.mesh.data > 1))


def runs_in_parts(model: nn.Module) -> bool:
    """Whether such a plan is applied to a model."""
    hooks = [hook for hook in torch_private.forward_pre_hooks(model) if isinstance(hook, RootHook)]
    return any(hook.runtime.record.division is not None for hook in hooks)


def in_one_piece(plan: Plan) -> Plan:
    """The same placements without dividing the batch."""
    return replace(plan, mesh=None, batch=None, num_microbatches=1, schedule="none")

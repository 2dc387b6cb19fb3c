"""What is different where the applied model runs in parts of its batch: rounding, and random numbers."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from autoshard import torch_private
from autoshard.plan import Plan
from autoshard.runtime.hooks import RootHook
from autoshard.runtime.state import Division
from autoshard.verify.draws import SteadyDraws

IN_PARTS = (
    "parts of the batch take other matrix products than the whole, so results are equal to rounding: what passes is "
    "1e-5 of the largest value of a tensor in float32 (1e-12 in float64, 1e-2 in float16, 5e-2 in bfloat16)"
)
DRAWN = (
    "random numbers were taken to be the same for all rows, and nothing was dropped: parts draw other ones than the "
    "whole"
)


def is_divided(plan: Plan) -> bool:
    """Whether calls of a model run in parts under a plan."""
    return plan.batch is not None and (plan.num_microbatches > 1 or (plan.mesh is not None and plan.mesh.data > 1))


def runs_in_parts(model: nn.Module) -> bool:
    """Whether such a plan is applied to a model."""
    return _division(model) is not None


def _division(model: nn.Module) -> Division | None:
    hooks = [hook for hook in torch_private.forward_pre_hooks(model) if isinstance(hook, RootHook)]
    return hooks[0].runtime.record.division if hooks else None


@contextmanager
def same_draws(divided: bool, notes: list[str]) -> Iterator[None]:
    """Inside, every row draws the same random numbers where the batch is divided, and a note says so if any are."""
    if not divided:
        yield
        return
    with SteadyDraws() as draws:
        yield
    if draws.count and DRAWN not in notes:
        notes.append(DRAWN)

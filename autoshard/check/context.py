"""Find how ranks divide sequences (context parallelism), and check that no op depends on how many tokens there are."""

from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.axes.tokens import depends_on_length, divide_context
from autoshard.capture.capture import capture
from autoshard.capture.graph import ModelGraph
from autoshard.check.rank import record_rank
from autoshard.errors import ApplyError, CaptureError, PlanError, first_line
from autoshard.plan.sharding import Cut, Results
from autoshard.plan.workload import Workload


def find_context(
    model: nn.Module, graph: ModelGraph, inputs: Any, workload: Workload, degree: int
) -> tuple[tuple[Cut, ...], tuple[Results, ...]]:
    """Return the cuts that divide the tokens of a model over so many ranks, and which modules give each rank a part.

    Raises `PlanError` where it can't be.

    `graph`: a forward with these inputs, captured with `composite=True`. Code that reads a length sees that of a rank's
    part: the last rank is recorded, and must run the same ops.
    """
    cuts, results = divide_context(graph, degree, model.training)
    forward = replace(workload, mode="inference", new_tokens=0)

    def record(local: nn.Module) -> Any:
        return capture(local, inputs, workload=forward, composite=True)

    try:
        reason = depends_on_length(graph, record_rank(model, cuts, degree - 1, record))
    except (ApplyError, CaptureError) as error:
        reason = f"a rank can't run with a part of them ({first_line(error)})"
    if reason:
        raise PlanError(
            f"sequences can't be divided over {degree} ranks, as cp={degree} says: {reason}. Plan without cp."
        )
    return cuts, results

"""Record what one rank of a cut model does, on shapes alone: its own Python code on local sizes, without the others."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from autoshard.capture.capture import calls_of, capture
from autoshard.capture.graph import ModelGraph
from autoshard.nested import flat_tensors
from autoshard.prove.ranks import LoneRank
from autoshard.prove.shrink import on_meta
from autoshard.runtime.cuts import apply_cuts
from autoshard.sharding import Cut
from autoshard.workload import Workload


def record_rank(
    model: nn.Module, inputs: Any, workload: Workload, whole: ModelGraph, cuts: Sequence[Cut], rank: int
) -> ModelGraph:
    """The composite graph of one rank of a model with these cuts; `whole`: that of the model with the same inputs.

    Ops that the cuts add are in its `aside`. Raises what the capture raises.
    """
    local = on_meta(model)
    apply_cuts(local, cuts, LoneRank(rank=rank, size=cuts[0].degree), shapes_only=True)
    given = inputs if inputs is not None else _derived(model, workload, whole)
    return capture(local, given, workload=workload, level=whole.level, composite=True)


def _derived(model: nn.Module, workload: Workload, whole: ModelGraph) -> dict[str, Any]:
    """The inputs with which the whole model was recorded where none were given: those of its own configuration."""
    shapes = [whole.values[value].shape for value in whole.inputs]
    for args, kwargs in calls_of(model, None, workload):
        if [tuple(tensor.shape) for tensor in flat_tensors((args, kwargs))] == shapes:
            return kwargs
    raise ValueError("the inputs it was recorded with can't be derived again")

"""Record what one rank of a cut model does, on shapes alone: its own Python code on local sizes, without the others."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from autoshard.capture.capture import calls_of
from autoshard.capture.graph import ModelGraph
from autoshard.nested import flat_tensors
from autoshard.prove.ranks import LoneRank
from autoshard.prove.shapes import Arguments, on_meta
from autoshard.runtime.cuts import apply_cuts
from autoshard.sharding import Cut
from autoshard.workload import Workload


def record_rank(
    model: nn.Module, cuts: Sequence[Cut], rank: int, record: Callable[[nn.Module], ModelGraph]
) -> ModelGraph:
    """The composite graph of one rank of a model with these cuts; `record`: how the whole model was recorded.

    Ops that the cuts add are in its `aside`. Raises what the capture raises.
    """
    local = on_meta(model)
    apply_cuts(local, cuts, LoneRank(rank=rank, size=cuts[0].degree), shapes_only=True)
    return record(local)


def call_of(model: nn.Module, inputs: Any, workload: Workload, whole: ModelGraph) -> Arguments:
    """The arguments with which the whole model was recorded; where none were given, those of its own configuration."""
    shapes = [whole.values[value].shape for value in whole.inputs]
    calls = calls_of(model, inputs, workload)
    for args, kwargs in calls:
        if inputs is not None or [tuple(tensor.shape) for tensor in flat_tensors((args, kwargs))] == shapes:
            return args, kwargs
    raise ValueError("the inputs it was recorded with can't be derived again")

"""One rank of a cut model on shapes alone: its own Python code on local sizes, without the other ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.capture import calls_of
from autoshard.capture.graph import ModelGraph
from autoshard.nested import flat_tensors
from autoshard.plan.sharding import Cut
from autoshard.plan.workload import Workload
from autoshard.runtime.collectives import Layout
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.moves import on_meta

Arguments = tuple[tuple, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class LoneRank:
    """One rank without the others: shapes are right, sums are not. `divides`: tokens, also without gradients."""

    rank: int
    size: int
    divides: bool = True
    has_values: bool = False

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    add_gathered = all_reduce

    def gather(self, tensor: torch.Tensor, dim: int, where: Layout, order: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] = where.size
        return tensor.new_zeros(shape)

    def own_along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor.chunk(self.size, dim)[self.rank].contiguous()

    add_along = own_along

    def whole_along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim)

    def own(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return values[self.rank]


def record_rank(
    model: nn.Module, cuts: Sequence[Cut], rank: int, record: Callable[[nn.Module], ModelGraph]
) -> ModelGraph:
    """The composite graph of one rank of a model with these cuts; `record`: how the whole model was recorded.

    Ops that the cuts add are in its `added_ops`. Raises what the capture raises.
    """
    local = on_meta(model)
    apply_cuts(local, cuts, LoneRank(rank=rank, size=cuts[0].degree), shapes_only=True)
    return record(local)


def call_of(model: nn.Module, inputs: Any, workload: Workload, whole: ModelGraph) -> Arguments:
    """The arguments with which the whole model was recorded; where none were given, those of its own configuration."""
    shapes = [whole.values[value].shape for value in whole.inputs]
    for args, kwargs in calls_of(model, inputs, workload):
        if inputs is not None or [tuple(tensor.shape) for tensor in flat_tensors((args, kwargs))] == shapes:
            return args, kwargs
    raise ValueError("the inputs it was recorded with can't be derived again")

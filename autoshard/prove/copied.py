"""A model of our own with random values for a proof that runs all of it, however large the original is."""

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.axes.regions import OUTSIDE, find_regions
from autoshard.capture.graph import ModelGraph
from autoshard.prove.sample import own_copies, own_copy, random_like
from autoshard.prove.stand_ins import StandIns
from autoshard.prove.stubs import put_stubs

LARGE_ELEMENTS = 1 << 25
"""Models with more elements than this in their parameters get stand-ins."""
SMALL_ELEMENTS = 1 << 16
"""In them, parameters with no more than this keep values of their own."""
HEAVY_FLOPS = 1 << 31
"""Models with more work than this in a forward are run on fewer tokens, if they take that."""
MORE_ROWS = 50
"""A proof has up to twelve rows where there was one; with some to spare."""
LEAST_ROOM = 1 << 22
"""Elements that a tensor may always have."""
KEPT = 2
"""How many of elements that are alike are run; others hand on what they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model with random values, how its floats are stored, and what computes with its largest weights.

    `training`: whether it is run with a backward. `most_elements`: no tensor has more, if sizes are those of the
    recorded run.
    """

    model: nn.Module
    dtype: torch.dtype
    weights: AbstractContextManager
    training: bool
    most_elements: int


def is_large(graph: ModelGraph) -> bool:
    """Whether the weights of a model are too many to be filled with random numbers."""
    return sum(torch.Size(tensor.shape).numel() for tensor in graph.tensors) > LARGE_ELEMENTS


def is_heavy(graph: ModelGraph) -> bool:
    """Whether one forward of a model takes long."""
    return is_large(graph) or sum(op.flops for op in graph.ops) > HEAVY_FLOPS


def copy_model(model: nn.Module, graph: ModelGraph, dtype: torch.dtype, training: bool) -> Trial:
    """Copy a model with random parameters in one floating-point type; buffers keep values that they have."""
    weights = StandIns()
    large = is_large(graph)
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if large and parameter.numel() > SMALL_ELEMENTS and parameter.is_floating_point():
            stand_in = nn.Parameter(weights.make(parameter.shape, dtype), requires_grad=False)
            stand_in.__dict__.update(own_copies(parameter))
            memo.setdefault(id(parameter), stand_in)
        elif id(parameter) not in memo:
            memo[id(parameter)] = filled = random_like(parameter, generator)
            filled.data = filled.data.to(dtype) if filled.is_floating_point() else filled.data
    for module in model.modules():
        for value in nested.flat_tensors(list(vars(module).values())):  # buffers, and what a forward left somewhere
            if id(value) not in memo:
                known = random_like(value, generator) if value.is_meta else own_copy(value)
                memo[id(value)] = known.to(dtype) if known.is_floating_point() else known
    left_out: list[str] = []
    if large:
        alike = [region.paths for region in find_regions(graph) if region.path != OUTSIDE]
        left_out = [path for paths in alike for path in paths[KEPT:]]
    for path in left_out:
        element = model.get_submodule(path)
        memo[id(element)] = _emptied(element)
    copied = copy.deepcopy(model, memo)
    put_stubs(copied, graph, left_out)
    largest = max((torch.Size(value.shape).numel() for value in graph.values), default=0)
    return Trial(
        model=copied, dtype=dtype, weights=weights if large else nullcontext(), training=training,
        most_elements=max(LEAST_ROOM, MORE_ROWS * largest),
    )  # fmt: skip


def _emptied(module: nn.Module) -> nn.Module:
    """A copy of a module with its plain attributes and nothing of what it holds."""
    made = copy.copy(module)
    made._modules, made._parameters, made._buffers = {}, {}, {}
    return made

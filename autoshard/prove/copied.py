"""A model of our own with random values, to be run whole and in parts."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.graph import ModelGraph
from autoshard.prove.sample import own_copy, random_like

LARGE_ELEMENTS = 1 << 25
"""Models with more elements than this in their parameters are not run."""
HEAVY_FLOPS = 1 << 31
"""Nor those with more work than this in a forward."""
MORE_ROWS = 50
"""A proof has up to four rows where there was one; with some to spare."""
LEAST_ROOM = 1 << 22
"""Elements that a tensor may always have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A model with random values, and how its floats are stored.

    `training`: whether it is run with a backward. `most_elements`: no tensor has more, if sizes are those of the
    recorded run.
    """

    model: nn.Module
    dtype: torch.dtype
    training: bool
    most_elements: int


def is_heavy(graph: ModelGraph) -> bool:
    """Whether a model takes too much memory or time to be run at plan time."""
    elements = sum(torch.Size(tensor.shape).numel() for tensor in graph.tensors)
    return elements > LARGE_ELEMENTS or sum(op.flops for op in graph.ops) > HEAVY_FLOPS


def copy_model(model: nn.Module, graph: ModelGraph, dtype: torch.dtype, training: bool) -> Trial:
    """Copy a model with random parameters in one floating-point type; buffers keep values that they have."""
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if id(parameter) not in memo:
            memo[id(parameter)] = filled = random_like(parameter, generator)
            filled.data = filled.data.to(dtype) if filled.is_floating_point() else filled.data
    for module in model.modules():
        for value in nested.flat_tensors(list(vars(module).values())):  # buffers, and what a forward left somewhere
            if id(value) not in memo:
                known = random_like(value, generator) if value.is_meta else own_copy(value)
                memo[id(value)] = known.to(dtype) if known.is_floating_point() else known
    copied = copy.deepcopy(model, memo)
    largest = max((torch.Size(value.shape).numel() for value in graph.values), default=0)
    return Trial(model=copied, dtype=dtype, training=training, most_elements=max(LEAST_ROOM, MORE_ROWS * largest))

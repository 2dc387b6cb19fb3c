"""Inputs of a call with other numbers of samples: those given, again and again; with masks and padding as asked for.

ids [2, S]     a b c d        4 samples     a b c d        mask      1 1 1 1       padded    1 1 1 1
               e f g h                      e f g h                  1 1 1 1                 1 1 1 0
                                            a b c d                  1 1 1 1                 1 1 0 0
                                            e f g h                  1 1 1 1                 1 0 0 0
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from autoshard.axes.axis import Factor, covers, size_of, whole
from autoshard.axes.batch_rules import axis_of
from autoshard.axes.rules import Axes
from autoshard.capture.graph import ModelGraph
from autoshard.nested import replace_at, tensor_at
from autoshard.plan.batching import BatchAxis, BatchInput, with_rows
from autoshard.plan.sharding import coordinates_of, kept

Padded = frozenset[tuple[str, int]]
"""Masks that end in some samples, and what stands there; tokens in some samples of which is a number that is asked for.
"""


class NotRun(Exception):
    """What would be compared could not be run, or made; the message says why."""


def enlarged(bound: Mapping[str, Any], inputs: Iterable[BatchInput], have: int, rows: int) -> dict[str, Any]:
    """Repeat the rows of a call, or leave some out, until there are `rows` of them."""
    made = dict(bound)
    for item in inputs:
        tensor = tensor_at(made, item.path)
        assert tensor is not None
        wide, given = coordinates_of(with_rows(item.axis, rows)), coordinates_of(item.axis)
        if (wide < 0).any() or (given < 0).any() or len(wide) * have != len(given) * rows:
            raise NotRun(f"not every part of {item.path} belongs to one of {have} rows of the batch ({item.axis})")
        sources = given.argsort(kind="stable").reshape(have, -1)  # per row of the call, where its parts are
        index = numpy.zeros(len(wide), dtype=numpy.int64)
        index[wide.argsort(kind="stable").reshape(rows, -1)] = sources[numpy.arange(rows) % have]
        made = replace_at(made, item.path, tensor.index_select(item.dim, torch.from_numpy(index).to(tensor.device)))
    return made


def is_mask(tensor: torch.Tensor | None) -> bool:
    """Whether there is nothing but zeros and ones in a tensor, and more than one number for each row."""
    if tensor is None or tensor.dtype is torch.bool:
        return tensor is not None
    if tensor.is_meta:  # it has no values: it stands for tokens or numbers
        return False
    if tensor.dim() < 2 or tensor.numel() == 0:
        return False
    parts = tensor[:1], tensor  # most tensors that are no mask show it in their first row
    return all(bool(((part == 0) | (part == 1)).all()) for part in parts) and bool(tensor.any())


def masked(bound: Mapping[str, Any], batch: BatchAxis, padded: Padded, rows: int) -> dict[str, Any]:
    """The call with masks that hide nothing, but for some that end at another place in every row but the first."""
    made, fills = dict(bound), dict(padded)
    for item in batch.inputs:
        tensor = tensor_at(made, item.path)
        if tensor is None or not is_mask(tensor):
            continue
        tensor = torch.ones_like(tensor)
        if item.path in fills and not (fills[item.path] and tensor.dtype is torch.bool):
            for row in range(1, rows):
                index = torch.from_numpy(kept(with_rows(item.axis, rows), (1,) * rows, row))
                size = tensor.shape[-1]
                part = tensor.index_select(item.dim, index)
                part[..., size - min(row, size // 2) :] = fills[item.path]
                tensor.index_copy_(item.dim, index, part)
        made = replace_at(made, item.path, tensor)
    return made


def marked(
    bound: Mapping[str, Any], batch: BatchAxis, padded: Padded, absent: Sequence[tuple[str, int]], rows: int
) -> dict[str, Any]:
    """The call without some numbers, but for those of `padded`, which stand near the end of all rows but the first."""
    made = dict(bound)
    for item in batch.inputs:
        numbers = [number for path, number in absent if path == item.path]
        tensor = tensor_at(made, item.path)
        if tensor is None or not numbers:
            continue
        others = [number for number in tensor.unique().tolist() if number not in numbers]
        if not others or tensor.dim() < 2 or tensor.shape[-1] <= len(numbers) or item.dim == tensor.dim() - 1:
            raise NotRun(f"{item.path} is too short to be tried without {numbers[0]}")
        tensor = tensor.clone()
        tensor[torch.isin(tensor, torch.tensor(numbers, dtype=tensor.dtype))] = others[0]
        for row in range(1, rows):
            index = torch.from_numpy(kept(with_rows(item.axis, rows), (1,) * rows, row))
            part = tensor.index_select(item.dim, index)
            for place, number in enumerate(numbers, 1):
                if (item.path, number) in padded:
                    part[..., -place] = number
            tensor.index_copy_(item.dim, index, part)
        made = replace_at(made, item.path, tensor)
    return made


def starts(paths: Sequence[str], graph: ModelGraph, batch: BatchAxis, factor: Factor) -> dict[int, Axes]:
    """The axes of the inputs of a run; `paths`: where each is among the arguments; `factor`: its samples."""
    items = {item.path: item for item in batch.inputs}
    found = {}
    for place, value in enumerate(graph.inputs):
        shape = graph.values[value].shape
        item = items.get(paths[place])
        axes = [whole(size, "it is an input") for size in shape]
        if item is not None:
            axis = axis_of(with_rows(item.axis, factor.size), factor)
            if not covers(axis, factor) or size_of(axis) != shape[item.dim]:
                raise NotRun(f"not every part of {item.path} belongs to a row of the batch ({item.axis})")
            axes[item.dim] = axis
        found[value] = tuple(axes)
    return found

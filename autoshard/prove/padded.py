"""Calls whose masks hide nothing, or end in some rows; and whose tokens have a number that stands for padding, or none.

mask [3, 4]   1 1 1 1        ids    a b c d
              1 1 1 0               e f g 0
              1 1 0 0               h i j 0
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard import nested
from autoshard.batching import BatchAxis, with_rows
from autoshard.prove.rows import NotRun, is_mask
from autoshard.sharding import kept

Padded = frozenset[tuple[str, int]]
"""Masks that end in some rows, and what stands there; tokens in some rows of which is a number that is asked for."""


def masked(bound: Mapping[str, Any], batch: BatchAxis, padded: Padded, rows: int) -> dict[str, Any]:
    """The call with masks that hide nothing, but for some that end at another place in every row but the first."""
    made, fills = dict(bound), dict(padded)
    for item in batch.inputs:
        tensor = nested.tensor_at(made, item.path)
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
        made = nested.replace_at(made, item.path, tensor)
    return made


def marked(
    bound: Mapping[str, Any], batch: BatchAxis, padded: Padded, absent: Sequence[tuple[str, int]], rows: int
) -> dict[str, Any]:
    """The call without some numbers, but for those of `padded`, which stand near the end of all rows but the first."""
    made = dict(bound)
    for item in batch.inputs:
        numbers = [number for path, number in absent if path == item.path]
        tensor = nested.tensor_at(made, item.path)
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
        made = nested.replace_at(made, item.path, tensor)
    return made

"""Rows for a proof: the arguments of a call with as many rows as are wanted, no two of them alike.

ids [2, S]:  a b c d        4 rows:  a c b d     the rows given, again and again, with single tokens in other places
             e f g h                 e g f h     (those that stand for images or begin and end a text stay)
mask [2, S]: 1 1 1 1                 masks end at another place in every row
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch

from autoshard.axes.samples import SHARED, Samples, fixed, samples
from autoshard.batching import BatchAxis, BatchInput, with_rows
from autoshard.capture.graph import ModelGraph
from autoshard.nested import replace_at, tensor_at
from autoshard.sharding import coordinates_of, kept


class NotRun(Exception):
    """What would be compared could not be run, or made; the message says why."""


def enlarged(bound: Mapping[str, Any], inputs: Iterable[BatchInput], have: int, rows: int) -> dict[str, Any]:
    """Repeat the rows of a call, or leave some out, until there are `rows` of them."""
    made = dict(bound)
    for item in inputs:
        tensor = tensor_at(made, item.path)
        assert tensor is not None
        wide = with_rows(item.axis, rows)
        if len(coordinates_of(wide)) % rows or (coordinates_of(wide) < 0).any():
            raise NotRun(f"not every part of {item.path} belongs to a row of the batch ({item.axis})")
        index = numpy.zeros(len(coordinates_of(wide)), dtype=numpy.int64)
        for row in range(rows):
            places, source = kept(wide, (1,) * rows, row), kept(item.axis, (1,) * have, row % have)
            if len(places) != len(source):
                raise NotRun(f"not every part of {item.path} belongs to one of {have} rows of the batch ({item.axis})")
            index[places] = source
        made = replace_at(made, item.path, tensor.index_select(item.dim, torch.from_numpy(index).to(tensor.device)))
    return made


def varied(bound: Mapping[str, Any], inputs: Iterable[BatchInput], rows: int) -> dict[str, Any]:
    """Give every row other values of the same kind: other numbers, single integers in other places.

    Where that leaves rows alike, as in a batch of zeros or ones, row `r` of integers is `r` larger.
    """
    generator = torch.Generator().manual_seed(0)
    made = dict(bound)
    for item in inputs:
        tensor = tensor_at(made, item.path)
        assert tensor is not None
        if is_mask(tensor):
            continue
        if tensor.is_floating_point() or tensor.is_complex():
            tensor = _random_as(tensor, generator)
        elif tensor.dim() - item.dim >= 2:
            tensor = _shuffled(tensor, item.dim, generator)
        made = replace_at(made, item.path, tensor)
    if are_alike(made, inputs, rows):
        for item in inputs:
            tensor = tensor_at(made, item.path)
            assert tensor is not None
            if tensor.is_floating_point():
                made = replace_at(made, item.path, _random_as(tensor, generator))
            elif tensor.dtype is not torch.bool and item.axis == f"*{rows}":
                more = torch.arange(rows, dtype=tensor.dtype, device=tensor.device)
                more = more.view(-1, *[1] * (tensor.dim() - item.dim - 1))
                made = replace_at(made, item.path, tensor + more)
    return made


def _random_as(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Random numbers with the mean and the spread of these, and of their sign where all have the same."""
    noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor.device)
    known = tensor.detach().double() if not tensor.is_complex() else tensor.detach().real.double()
    good = known[known.isfinite()]
    spread = float(good.std()) if good.numel() > 1 else 0.0
    made = noise * (spread or 1.0) + (float(good.mean()) if good.numel() else 0.0)
    if spread and bool((good >= 0).all()):
        made = made.abs()
    return torch.where(known.isfinite(), made, known).to(tensor.dtype)


def is_mask(tensor: torch.Tensor | None) -> bool:
    """Whether there is nothing but zeros and ones in a tensor, and more than one number for each row."""
    if tensor is None or tensor.dtype is torch.bool:
        return tensor is not None
    if tensor.is_meta:  # it has no values: it stands for tokens or numbers
        return False
    return (
        tensor.dim() > 1 and tensor.numel() > 0 and bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.any())
    )


def shortened(bound: Mapping[str, Any], inputs: Iterable[BatchInput], rows: int) -> dict[str, Any] | None:
    """End the masks of a call at another place in every row; None if it has none."""
    made, found = dict(bound), False
    for item in inputs:
        tensor = tensor_at(made, item.path)
        if tensor is None or not is_mask(tensor) or tensor.dim() != 2 or item.dim or item.axis != f"*{rows}":
            continue
        length = tensor.shape[1]
        tensor = tensor.clone()
        for row in range(rows):
            left_off = min(row, length // 2)
            if left_off:
                tensor[row, length - left_off :] = 0
            found |= left_off > 0
        made = replace_at(made, item.path, tensor)
    return made if found else None


def unlabelled(bound: Mapping[str, Any], inputs: Iterable[BatchInput], labels: Mapping[str, int]) -> dict[str, Any]:
    """Let some labels not count, another number of them in every row; `labels`: which inputs, and what says so."""
    made = dict(bound)
    for item in inputs:
        tensor = tensor_at(made, item.path)
        if tensor is None or item.path not in labels or item.dim:
            continue
        tensor = tensor.clone()
        for row in range(len(tensor)):
            if tensor.dim() == 1 and row == 1:
                tensor[row] = labels[item.path]
            elif tensor.dim() > 1:
                flat = tensor[row].reshape(-1)
                flat[1 : 1 + min(row, len(flat) // 2)] = labels[item.path]
                tensor[row] = flat.view(tensor[row].shape)
        made = replace_at(made, item.path, tensor)
    return made


def are_alike(bound: Mapping[str, Any], inputs: Iterable[BatchInput], rows: int) -> bool:
    """Whether two rows have the same in all inputs but masks."""
    texts: list[list[bytes]] = [[] for _ in range(rows)]
    for item in inputs:
        tensor = tensor_at(bound, item.path)
        if tensor is None or is_mask(tensor) or not tensor.numel():
            continue
        for row, text in enumerate(texts):
            index = torch.from_numpy(kept(item.axis, (1,) * rows, row))
            text.append(tensor.index_select(item.dim, index).detach().double().numpy().tobytes())
    return len(set(map(tuple, texts))) < rows


def _shuffled(tensor: torch.Tensor, dim: int, generator: torch.Generator) -> torch.Tensor:
    """Exchange what stands once in a row, along the dimension after the rows; the first and the last one stay."""
    rows = tensor.movedim(dim, 0).clone()
    for index, row in enumerate(rows):
        flat = row.reshape(row.shape[0], -1)
        _, which, counts = torch.unique(flat, dim=0, return_inverse=True, return_counts=True)
        single = (counts[which] == 1).nonzero().flatten()
        single = single[(single > 0) & (single < len(row) - 1)]
        order = single[torch.randperm(len(single), generator=generator)]
        rows[index, single] = row[order]
    return rows.movedim(0, dim)


def starts(paths: Sequence[str], graph: ModelGraph, batch: BatchAxis, rows: int) -> dict[int, Samples]:
    """The samples of the inputs of a run; `paths`: where each is among the arguments."""
    items = {item.path: item for item in batch.inputs}
    found = {}
    for place, value in enumerate(graph.inputs):
        shape = graph.values[value].shape
        item = items.get(paths[place])
        owner = None if item is None else owner_of(shape[item.dim], with_rows(item.axis, rows), rows)
        if item is None:
            found[value] = fixed(shape)
        elif owner is None:
            raise NotRun(f"not every part of {item.path} belongs to a row of the batch ({item.axis})")
        else:
            view = [1] * len(shape)
            view[item.dim] = -1
            found[value] = samples(shape, owner.view(view), True)
    return found


def owner_of(size: int, axis: str, rows: int) -> torch.Tensor | None:
    """The sample of each place along an axis; None where one has none."""
    owner = torch.full((size,), SHARED, dtype=torch.int32)
    for row in range(rows):
        index = torch.from_numpy(kept(axis, (1,) * rows, row))
        if len(index) and int(index.max()) >= size:
            return None
        owner[index] = row
    return None if bool((owner == SHARED).any()) else owner

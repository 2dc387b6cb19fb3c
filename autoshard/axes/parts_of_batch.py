"""Parts of a dimension that is longer for a larger batch: which ones have the same of every sample.

[0 1 2 0 1 2]        chunk(2)         [0 1 2] [0 1 2]           the same of all samples
[0 1 2]              x[:1], x[1:]     [0] [1 2]                 by the place in the batch
                     x[:100], x[100:] [0 1 2] []                by the place in the batch, from 100 samples on
                     x[[0, 1]] = 0                              by the place in the batch
"""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from autoshard.axes.given import arguments_of
from autoshard.axes.reshaping import PARTS
from autoshard.axes.samples import PLACE, SHARED, Samples, samples
from autoshard.axes.walk import name_of
from autoshard.capture.graph import Op

if TYPE_CHECKING:
    from autoshard.axes.sample_indices import Contents

BY_LIST = frozenset({"index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"})
BY_INDEX = frozenset({"index_select", "index_add", "index_add_", "index_copy", "index_copy_", "index_fill",
                      "index_fill_"})  # fmt: skip
NO_END = 1 << 31
"""Ends from here on are no places: Python says so where there is no end."""


def by_place(op: Op, item: Samples, counts: Sequence[bool], made: Sequence[Samples], contents: "Contents",
             resized: bool) -> bool:  # fmt: skip
    """Whether an op takes, or writes, a part of the batch by its place in it.

    `item`: what it is given; `counts`: which of its dimensions are longer for a larger batch; `made`: its results;
    `resized`: its numbers are others for a larger batch.
    """
    name = name_of(op)
    if name in BY_LIST or name in BY_INDEX:
        return any(counts[dim] and not _of_all(item, dim, places) for dim, places in _indices(op, item, contents))
    dim = part_dim(op, len(item.shape))
    if dim is None or not counts[dim]:
        return False
    if not resized and has_constant_bound(op, counts):
        return True
    if item.owner.shape[dim] == 1:
        return False
    before = _elements(item.full())
    return any(not _has_the_same(before, _elements(part.full())) for part in made)


def of_place(item: Samples, *, varies: bool) -> Samples:
    """What a part is made of that was taken by its place: what is the same at all places stays what it is.

    `varies`: whether elements that depend on no sample may differ along the batch.
    """
    kept = torch.full((), PLACE, dtype=torch.int32)
    owner = kept.expand(item.owner.shape) if varies else torch.where(item.owner == SHARED, item.owner, kept)
    return samples(item.shape, owner, item.varies)


def has_constant_bound(op: Op, counts: Sequence[bool]) -> bool:
    """Whether the numbers of an op say where in a dimension that is longer for a larger batch a part begins or ends."""
    dim = part_dim(op, len(counts))
    if dim is None or not counts[dim]:
        return False
    assert op.node is not None
    name = name_of(op)
    if name in ("chunk", "unsafe_chunk", "unbind"):
        return False
    if name == "tensor_split":
        return not isinstance(op.node.args[1], int)
    if name != "slice":
        return True
    given = arguments_of(op)
    start, end, step = given["start"] or 0, given["end"], given["step"]
    return not 0 <= start < step or not (end is None or end >= NO_END)


def part_dim(op: Op, ndim: int) -> int | None:
    """Along which dimension an op takes parts."""
    if op.node is None or name_of(op) not in PARTS | {"unbind"} or not ndim:
        return None
    dim = arguments_of(op)["dim"]
    return dim % ndim if isinstance(dim, int) else 0


def _indices(op: Op, item: Samples, contents: "Contents") -> Iterator[tuple[int, torch.Tensor]]:
    """(dimension, numbers) of indices that code alone decides."""
    assert op.node is not None
    args: Sequence[Any] = op.node.args
    if name_of(op) in BY_INDEX:
        dims = [args[1] % len(item.shape)] if item.shape else []
    else:
        dims = [dim for dim, index in enumerate(args[1]) if isinstance(index, torch.fx.Node)]
    for dim, value in zip(dims, op.inputs[1:], strict=False):
        numbers = contents.of(value)
        if numbers is not None and numbers.dtype not in (torch.bool, torch.uint8):
            yield dim, numbers if contents.is_longer(value) else numbers[:0]


def _of_all(item: Samples, dim: int, places: torch.Tensor) -> bool:
    """Whether places along a dimension have the same share of all samples, or of all places if there are none."""
    if not len(places.flatten()):
        return False
    owner = item.full().movedim(dim, 0)
    if item.owner.shape[dim] == 1:
        return len(set(torch.bincount(places.flatten() % len(owner), minlength=len(owner)).tolist())) == 1
    return _has_the_same(_elements(owner), _elements(owner[places.flatten().long()]))


def _has_the_same(whole: dict[int, int], part: dict[int, int]) -> bool:
    """Whether a part has the same share of the elements of every sample."""
    return len({Fraction(part.get(code, 0), count) for code, count in whole.items()}) <= 1


def _elements(owner: torch.Tensor) -> dict[int, int]:
    """How many elements each sample has."""
    codes, counts = owner.unique(return_counts=True)
    return {int(code): int(count) for code, count in zip(codes, counts, strict=True) if code >= 0}

"""Rules of ops that compute nothing: views, parts, concatenations, lookups by index, constants."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from autoshard.axes.axis import Axis, concatenate, cut, cut_out, every, factors_of, fresh, reshape, size_of
from autoshard.axes.rules import Axes, Context, Seen, aten, broadcast, dims_of, names, rule, unshardable

# ---- the same elements in another shape


@rule("view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "_reshape_alias")
def reshaped(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes] | None:
    if args and isinstance(args[0], torch.dtype):
        return [x.axes] if walk.shapes[0] == x.shape else None
    return [tuple(reshape(x.axes, walk.shapes[0], walk.why))]


@rule("squeeze")
def squeezed(walk: Context, x: Seen, dim: Any = None) -> list[Axes]:
    """A dimension that stays since it is longer would go where a rank has one slice of it: one with a single factor."""
    for d in dims_of(dim, len(x.shape)):
        if x.shape and sum(1 for _ in factors_of(x.axes[d])) == 1:
            walk.block([x.axes[d]], "a share of 1 would be squeezed")
    return [tuple(reshape(x.axes, walk.shapes[0], walk.why))]


@rule("pixel_shuffle")
def _shuffled(walk: Context, x: Seen, term: int) -> list[Axes]:
    """(channels x factor x factor, height, width) -> (channels, height x factor, width x factor)."""
    channels, height, width = reshape([x.axes[-3]], [x.shape[-3] // term**2, term, term], walk.why)
    walk.block([height, width], "one number says how much both are")
    return [(*x.axes[:-3], channels, (*x.axes[-2], *height), (*x.axes[-1], *width))]


@rule("channel_shuffle", "native_channel_shuffle")
def _channels_shuffled(walk: Context, x: Seen, groups: int) -> list[Axes]:
    """groups x channels -> channels x groups."""
    outer, inner = reshape([x.axes[1]], [groups, x.shape[1] // groups], walk.why)
    walk.block([outer], "a number says how many groups there are")
    return [(x.axes[0], (*inner, *outer), *x.axes[2:])]


@rule("pixel_unshuffle")
def _unshuffled(walk: Context, x: Seen, term: int) -> list[Axes]:
    height, down = reshape([x.axes[-2]], [x.shape[-2] // term, term], walk.why)
    width, right = reshape([x.axes[-1]], [x.shape[-1] // term, term], walk.why)
    walk.block([down, right], "one number says how much both are")
    return [(*x.axes[:-3], (*x.axes[-3], *down, *right), height, width)]


@rule("view_as_real")
def _as_real(walk: Context, x: Seen) -> list[Sequence[Axis | None]]:
    return [(*x.axes, None)]


@rule("view_as_complex")
def _as_complex(walk: Context, x: Seen) -> list[Axes]:
    walk.block([x.axes[-1]], "it is the two parts of a complex number")
    return [x.axes[:-1]]


@rule("permute", "transpose", "t")
def permuted(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    order = torch.empty((*range(2, 2 + len(x.shape)),), device="meta")
    return [tuple(x.axes[size - 2] for size in getattr(aten, walk.name)(order, *args, **kwargs).shape)]


@rule("expand")
def expanded(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    """New and spread dimensions hold the same in every slice: an axis of their own."""
    shape = walk.shapes[0]
    padded = (*((),) * (len(shape) - len(x.shape)), *x.axes)
    sizes = (*(1,) * (len(shape) - len(x.shape)), *x.shape)
    return [tuple(axis if old == new else fresh(new) for axis, old, new in zip(padded, sizes, shape, strict=True))]


@rule("repeat")
def repeated(walk: Context, x: Seen, repeats: Sequence[int]) -> list[Axes]:
    axes = (*((),) * (len(repeats) - len(x.shape)), *x.axes)
    times = (*(1,) * (len(x.shape) - len(repeats)), *repeats)
    return [tuple((*fresh(many), *axis) for axis, many in zip(axes, times, strict=True))]


@rule("repeat_interleave")
def interleaved(walk: Context, x: Seen, repeats: int, dim: int | None = None, **kwargs: Any) -> list[Axes]:
    """Elements of a dimension, or of all as one, each so many times."""
    if dim is None:
        return [(tuple(factor for axis in (*x.axes, fresh(repeats)) for factor in axis),)]
    d = dim % len(x.shape)
    return [tuple((*axis, *fresh(repeats)) if i == d else axis for i, axis in enumerate(x.axes))]


# ---- parts and concatenations


@rule("slice")
def _slice(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    return [_sliced(walk, x, *args, **kwargs)]


@rule("select")
def _select(walk: Context, x: Seen, dim: int, index: int) -> list[Axes]:
    return [_without(_sliced(walk, x, dim, index % x.shape[dim], index % x.shape[dim] + 1), dim)]


@rule("unbind")
def _unbind(walk: Context, x: Seen, dim: int = 0) -> list[Axes]:
    return [_without(_sliced(walk, x, dim, index, index + 1), dim) for index in range(x.shape[dim])]


@rule("split", "split_with_sizes", "unsafe_split", "chunk", "unsafe_chunk")
def _split(walk: Context, x: Seen, sizes: Any, dim: int = 0) -> list[Axes]:
    """Parts of sizes given one by one are independent. Where one number makes them all, they are cut alike."""
    total = x.shape[dim]
    if not isinstance(sizes, int):
        ends = list(accumulate(sizes))
        return [_sliced(walk, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]
    step = -(-total // sizes) if "chunk" in walk.name else sizes
    made = [_sliced(walk, x, dim, begin, begin + step) for begin in range(0, total, step)]
    for part in made[1:]:
        if total % step:
            walk.block([made[0][dim], part[dim]], "the last part is smaller")
        else:
            walk.unify(made[0][dim], part[dim])
    return made


def _without(axes: Axes, dim: int) -> Axes:
    return tuple(axis for d, axis in enumerate(axes) if d != dim % len(axes))


def _sliced(walk: Context, x: Seen, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Axes:
    """x[..., start:end:step, ...]: the part, of an axis that is a concatenation from now on.

    One of every `step` (0::2 and 1::2 of 8x2) is the major factor, from wherever in the first step it begins.
    """
    dim %= len(x.shape)
    size = x.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    axis = x.axes[dim]
    if end <= start:
        part: Axis = fresh(0)
    elif end - start == 1 < size:
        cut_out(axis, start, walk.why)
        part = ()
    elif step > 1 and start < step and len(range(start, end, step)) * step == size:
        part = every(axis, step, walk.why)
    else:
        if end < size:
            axis, _ = cut(axis, end, walk.why)
        if start > 0:
            _, axis = cut(axis, start, walk.why)
        part = every(axis, step, walk.why) if step > 1 else axis
    return tuple(part if d == dim else other for d, other in enumerate(x.axes))


@rule("cat")
def _cat(walk: Context, tensors: Sequence[Seen], dim: int = 0) -> list[Axes]:
    tensors = [seen for seen in tensors if seen.shape != (0,)]
    d = dim % len(tensors[0].shape)
    first, *others = tensors
    for seen in others:
        for i, axis in enumerate(seen.axes):
            if i != d:
                walk.unify(first.axes[i], axis)
    joined = concatenate([seen.axes[d] for seen in tensors])
    return [tuple(joined if i == d else axis for i, axis in enumerate(first.axes))]


@rule("stack")
def _stack(walk: Context, tensors: Sequence[Seen], dim: int = 0) -> list[Axes]:
    """One after the other: a list is not shorter on a rank."""
    axes = broadcast(walk, [seen.axes for seen in tensors], [seen.shape for seen in tensors])
    d = dim % (len(axes) + 1)
    return [(*axes[:d], concatenate([()] * len(tensors)), *axes[d:])]


@rule("constant_pad_nd")
def _pad(walk: Context, x: Seen, amounts: Sequence[int], value: float = 0) -> list[Axes]:
    """What comes before and after is whole on every rank."""
    axes = list(x.axes)
    for index in range(len(amounts) // 2):
        before, after = amounts[2 * index], amounts[2 * index + 1]
        d = len(axes) - 1 - index
        if before or after:
            axis = _sliced(walk, x, d, max(0, -before), x.shape[d] + min(0, after))[d]
            around = [unshardable(walk, (max(0, amount),))[0] for amount in (before, after)]
            axes[d] = concatenate([around[0], axis, around[1]])
    return [tuple(axes)]


# ---- picked by index


@rule("embedding")
def _embedding(walk: Context, table: Seen, indices: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    walk.contract(table.axes[0], lookup=True)
    return [(*indices.axes, table.axes[1])]


@rule("embedding_bag", "_embedding_bag")
def _bags(walk: Context, table: Seen, indices: Seen, offsets: Seen, *args: Any) -> list[Sequence[Axis | None]]:
    """Sums, means or largest of rows, column by column; the further results say which rows made a bag."""
    given = [item for item in args if isinstance(item, Seen)]
    walk.block([table.axes[0], *(axis for seen in (indices, offsets, *given) for axis in seen.axes)], "picked by index")
    return [(None, table.axes[1]), *((None,) * len(shape) for shape in walk.shapes[1:])]


@rule("index", "_unsafe_index")
def _index(walk: Context, x: Seen, indices: Sequence[Seen | None]) -> list[Axes] | None:
    picked = _picked(walk, x, indices)
    return None if picked is None else [picked]


def _picked(walk: Context, x: Seen, indices: Sequence[Seen | None]) -> Axes | None:
    """x[:, i, :]: indexed dimensions can't be cut, the others pass; the indices broadcast where the first one stands.

    None for a mask: it takes several dimensions, and as many rows as it likes.
    """
    given = [d for d, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors):
        return None
    if len(given) == 1 and tensors[0].numbers:
        return tuple(_listed(walk, x, d, tensors[0].numbers) if d in given else axis for d, axis in enumerate(x.axes))
    paired = [walk.paired(x.axes[d], index) for d, index in zip(given, tensors, strict=True)]
    walk.block([x.axes[d] for d, axes in zip(given, paired, strict=True) if axes is None], "picked by index")
    axes = [seen.axes if own is None else tuple(own) for seen, own in zip(tensors, paired, strict=True)]
    picked = broadcast(walk, axes, [seen.shape for seen in tensors])
    rest = [axis for d, axis in enumerate(x.axes) if d not in given]
    together = given == list(range(given[0], given[-1] + 1))
    place = given[0] if together else 0
    return (*rest[:place], *picked, *rest[place:])


def _listed(walk: Context, x: Seen, dim: int, numbers: Sequence[int]) -> Axis:
    """x[:, [2, -1], :]: one index after the other. What a number counts over, from its end, is as long on every rank.

    heads | k | v   picked by [-2]: v and k are whole, heads can be cut
    """
    size = x.shape[dim]
    parts = []
    for number in numbers:
        at = number % size
        part = _sliced(walk, x, dim, at, at + 1)[dim]
        counted = _sliced(walk, x, dim, 0, at) if number >= 0 else _sliced(walk, x, dim, at + 1, size)
        walk.block([part, counted[dim]], "counted by an index")
        parts.append(part)
    return concatenate(parts)


@rule("index_select")
def _index_select(walk: Context, x: Seen, dim: int, index: Seen) -> list[Axes]:
    d = dim % len(x.shape)
    paired = walk.paired(x.axes[d], index)
    walk.block([x.axes[d]] if paired is None else [], "picked by index")
    picked = () if not index.shape else index.axes[0] if paired is None else paired[0]
    return [tuple(picked if i == d else axis for i, axis in enumerate(x.axes))]


@rule("gather")
def _gather(walk: Context, x: Seen, dim: int, index: Seen, **kwargs: Any) -> list[Axes]:
    d = dim % len(x.shape)
    walk.block([x.axes[d]], "picked by index")
    _pair_others(walk, x, index, d)
    return [index.axes]


@rule(
    "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_", "index_add",
    "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
)  # fmt: skip
def _written(walk: Context, x: Seen, dim: int, index: Seen, source: Any = None, *args: Any, **kw: Any) -> Any:
    """Along one dimension. An index has the dimensions of x, or this one alone."""
    if not (x.shape and index.shape):
        return None
    d = dim % len(x.shape)
    for seen in (x, index, source):
        if isinstance(seen, Seen) and len(seen.shape) == len(x.shape):
            walk.block([seen.axes[d]], "written by index")
            _pair_others(walk, x, seen, d)
    if len(index.shape) < len(x.shape):
        walk.block(index.axes, "written by index")
    return [x.axes]


def _pair_others(walk: Context, x: Seen, index: Seen, dim: int) -> None:
    for i, (axis, other) in enumerate(zip(x.axes, index.axes, strict=True)):
        if i != dim:
            walk.unify(axis, other) if x.shape[i] == index.shape[i] else walk.block([axis, other])


@rule("index_put", "index_put_", "_index_put_impl_")
def _index_put(walk: Context, x: Seen, indices: Sequence[Seen | None], source: Seen, *args: Any) -> list[Axes] | None:
    """A rank that has some of the indices only would leave what the others write."""
    place = _picked(walk, x, indices)
    if place is None:
        return None
    broadcast(walk, [place, source.axes], [tuple(map(size_of, place)), source.shape])
    for d, index in enumerate(indices):
        if index is not None and walk.paired(x.axes[d], index) is None:
            walk.block(index.axes, "written by index")
    return [x.axes]


@rule("one_hot")
def _one_hot(walk: Context, x: Seen, classes: int = -1) -> list[Sequence[Axis | None]]:
    """Without a number of classes, the largest element tells it."""
    if classes < 0:
        walk.block(x.axes, "its largest element is looked for")
    return [(*x.axes, None)]


@rule("bucketize")
def _bucketize(walk: Context, values: Any, bounds: Seen, **kwargs: Any) -> list[Axes]:
    walk.block(bounds.axes)
    return [values.axes if isinstance(values, Seen) else ()]


@rule("searchsorted")
def _search(walk: Context, bounds: Seen, values: Any, *, sorter: Seen | None = None, **kwargs: Any) -> Any:
    """In one list, or for each row in one of its own."""
    if sorter is not None:
        return None
    if len(bounds.shape) == 1:
        return _bucketize(walk, values, bounds)
    for mine, its in zip(bounds.axes[:-1], values.axes[:-1], strict=True):
        walk.unify(mine, its)
    walk.block(bounds.axes[-1:], "searched along it")
    return [values.axes]


# ---- made from nothing


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def constant(walk: Context, *args: Any, **kwargs: Any) -> list[Axes]:
    """The same in every slice."""
    return [tuple(fresh(size) for size in walk.shapes[0])]


# ---- kinds of ops

RESHAPES = names(reshaped, squeezed)
COPIES = RESHAPES | {"to", "_to_copy", "alias", "contiguous", "clone", "detach"}
"""Ops that hand on the same numbers in the same order, if as many of them."""
PARTS = names(_slice, _select, _split)
MOVES = PARTS | names(permuted, expanded) | {"unbind", "unfold", "diagonal"}
CATS = names(_cat)
JOINS = CATS | names(_stack, _pad, repeated, interleaved) | {"flip", "roll"}

"""Rules of ops that compute nothing: views, parts, concatenations, lookups by index, constants."""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from autoshard.axes.axis import Axis, concatenate, cut, every, fresh, reshape
from autoshard.axes.rules import Axes, Context, Seen, aten, broadcast, lost, rule

# ---- the same elements in another shape


@rule("view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "squeeze", "unsqueeze", "squeeze_",
      "unsqueeze_", "_reshape_alias", "atleast_1d", "ravel", "reshape_as")  # fmt: skip
def _reshaped(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes] | None:
    if args and isinstance(args[0], torch.dtype):
        return None
    return [tuple(reshape(x.axes, walk.shapes[0], walk.why))]


@rule("permute", "movedim", "transpose", "t", "numpy_T", "swapaxes", "mT", "moveaxis", "transpose_", "t_")
def _permuted(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    order = torch.empty((*range(2, 2 + len(x.shape)),), device="meta")
    return [tuple(x.axes[size - 2] for size in getattr(aten, walk.name)(order, *args, **kwargs).shape)]


@rule("expand", "broadcast_to")
def _expanded(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    """New and spread dimensions hold the same in every slice: an axis of their own."""
    shape = walk.shapes[0]
    padded = (*((),) * (len(shape) - len(x.shape)), *x.axes)
    sizes = (*(1,) * (len(shape) - len(x.shape)), *x.shape)
    return [tuple(axis if old == new else fresh(new) for axis, old, new in zip(padded, sizes, shape, strict=True))]


@rule("repeat", "tile")
def _repeated(walk: Context, x: Seen, repeats: Sequence[int]) -> list[Axes]:
    axes = (*((),) * (len(repeats) - len(x.shape)), *x.axes)
    times = (*(1,) * (len(x.shape) - len(repeats)), *repeats)
    return [tuple((*fresh(many), *axis) for axis, many in zip(axes, times, strict=True))]


@rule("repeat_interleave")
def _interleaved(walk: Context, x: Seen, repeats: Any, dim: Any = None, **kwargs: Any) -> list[Axes] | None:
    if not isinstance(repeats, int) or dim is None:
        return None
    d = dim % len(x.shape)
    return [tuple((*axis, *fresh(repeats)) if i == d else axis for i, axis in enumerate(x.axes))]


@rule("meshgrid")
def _meshgrid(walk: Context, tensors: Sequence[Seen], indexing: str = "ij") -> list[Axes] | None:
    if indexing != "ij":
        return None
    axes = tuple(seen.axes[0] if seen.shape else () for seen in tensors)
    return [axes] * len(tensors)


@rule("broadcast_tensors")
def _broadcast_tensors(walk: Context, tensors: Sequence[Seen]) -> list[Axes] | None:
    return [broadcast(walk, [seen.axes for seen in tensors], [seen.shape for seen in tensors])] * len(tensors)


# ---- parts and concatenations


@rule("slice", "narrow", "slice_scatter", "select", "unbind", "split", "split_with_sizes", "chunk", "tensor_split",
      "unsafe_split", "unsafe_chunk", "hsplit")  # fmt: skip
def _parts(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes] | None:
    name = walk.name
    if name == "slice":
        return [_sliced(walk, x, *args, **kwargs)]
    if name == "narrow":
        dim, start, length = args
        return [_sliced(walk, x, dim, start, start + length)] if isinstance(start, int) else None
    if name == "select":
        dim, index = args[0] % len(x.shape), args[1] % x.shape[args[0]]
        part = _sliced(walk, x, dim, index, index + 1)
        return [tuple(axis for d, axis in enumerate(part) if d != dim)]
    if name == "unbind":
        dim = (args[0] if args else kwargs.get("dim", 0)) % len(x.shape)
        parts = [_sliced(walk, x, dim, index, index + 1) for index in range(x.shape[dim])]
        return [tuple(axis for d, axis in enumerate(part) if d != dim) for part in parts]
    if name in ("tensor_split", "hsplit", "slice_scatter"):
        return None
    sizes, dim = args[0], (args[1] if len(args) > 1 else kwargs.get("dim", 0)) % len(x.shape)
    if isinstance(sizes, int):
        step = -(-x.shape[dim] // sizes) if "chunk" in name else sizes
        sizes = [min(step, x.shape[dim] - begin) for begin in range(0, x.shape[dim], max(step, 1))]
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return [_sliced(walk, x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _sliced(walk: Context, x: Seen, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Axes:
    """x[..., start:end:step, ...]: the part, of an axis that is a concatenation from now on."""
    dim %= len(x.shape)
    size = x.shape[dim]
    start, end, _ = slice(start, end).indices(size)
    axis = x.axes[dim]
    if end <= start:
        part: Axis = fresh(0)
    else:
        if end < size:
            axis, _ = cut(axis, end, walk.why)
        if start > 0:
            _, axis = cut(axis, start, walk.why)
        part = every(axis, step, walk.why) if step > 1 else axis
    return tuple(part if d == dim else other for d, other in enumerate(x.axes))


@rule("cat", "concatenate", "concat")
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
    axes = broadcast(walk, [seen.axes for seen in tensors], [seen.shape for seen in tensors])
    d = dim % (len(axes) + 1)
    return [(*axes[:d], fresh(len(tensors)), *axes[d:])]


@rule("pad", "constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d")
def _pad(walk: Context, x: Seen, amounts: Sequence[int], mode: str = "constant", *args: Any) -> list[Axes] | None:
    """Zeros before and after are parts of their own; other modes repeat elements."""
    axes = list(x.axes)
    for index in range(len(amounts) // 2):
        before, after = amounts[2 * index], amounts[2 * index + 1]
        d = len(axes) - 1 - index
        if before == after == 0:
            continue
        if mode != "constant" or walk.name.startswith(("reflection", "replication")):
            walk.block([axes[d]], "padded with its own elements")
            axes[d] = lost(walk, (x.shape[d] + before + after,))[0]
            continue
        axis = _sliced(walk, x, d, max(0, -before), x.shape[d] + min(0, after))[d]
        axes[d] = concatenate([fresh(max(0, before)), axis, fresh(max(0, after))])
    return [tuple(axes)]


# ---- picked by index


@rule("embedding")
def _embedding(walk: Context, table: Seen, indices: Seen, *args: Any, **kwargs: Any) -> list[Axes]:
    walk.lookup(table.axes[0])
    return [(*indices.axes, table.axes[1])]


@rule("index", "_unsafe_index")
def _index(walk: Context, x: Seen, indices: Sequence[Seen | None]) -> list[Axes] | None:
    """x[:, i, :]: indexed dimensions are blocked, the others pass; the indices broadcast where the first one stands."""
    given = [d for d, index in enumerate(indices) if index is not None]
    tensors = [index for index in indices if index is not None]
    if any(
        tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors
    ):  # a mask takes several dimensions, and as many rows as it likes
        return None
    walk.block([x.axes[d] for d in given], "picked by index")
    picked = broadcast(walk, [seen.axes for seen in tensors], [seen.shape for seen in tensors])
    rest = [axis for d, axis in enumerate(x.axes) if d not in given]
    together = given == list(range(given[0], given[-1] + 1))
    place = given[0] if together else 0
    return [(*rest[:place], *picked, *rest[place:])]


@rule("index_select")
def _index_select(walk: Context, x: Seen, dim: int, index: Seen) -> list[Axes]:
    d = dim % len(x.shape)
    walk.block([x.axes[d]], "picked by index")
    return [tuple(index.axes[0] if i == d else axis for i, axis in enumerate(x.axes))]


@rule("gather", "take_along_dim")
def _gather(walk: Context, x: Seen, *args: Any, **kwargs: Any) -> list[Axes] | None:
    dim, index = args[:2] if isinstance(args[0], int) else (args[1] if len(args) > 1 else None, args[0])
    if dim is None:
        return None
    d = dim % len(x.shape)
    walk.block([x.axes[d]], "picked by index")
    _pair_others(walk, x, index, d)
    return [index.axes]


@rule("scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce", "scatter_reduce_")
def _scatter(
    walk: Context, x: Seen, dim: int, index: Seen, source: Any = None, *args: Any, **kwargs: Any
) -> list[Axes]:
    d = dim % max(len(x.shape), 1)
    walk.block([x.axes[d], index.axes[d]], "written by index")
    _pair_others(walk, x, index, d)
    if isinstance(source, Seen) and source.shape:
        walk.block([source.axes[d]])
        _pair_others(walk, source, index, d)
    return [x.axes]


def _pair_others(walk: Context, x: Seen, index: Seen, dim: int) -> None:
    for i, (axis, other) in enumerate(zip(x.axes, index.axes, strict=True)):
        if i != dim:
            walk.unify(axis, other) if x.shape[i] == index.shape[i] else walk.block([axis, other])


@rule("index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_")
def _index_add(walk: Context, x: Seen, dim: int, index: Seen, source: Any = None, **kwargs: Any) -> list[Axes]:
    d = dim % len(x.shape)
    walk.block([x.axes[d], *index.axes], "written by index")
    if isinstance(source, Seen) and source.shape:
        walk.block([source.axes[d]])
        for i, axis in enumerate(x.axes):
            if i != d:
                walk.unify(axis, source.axes[i])
    return [x.axes]


@rule("index_put", "index_put_", "_index_put_impl_")
def _index_put(walk: Context, x: Seen, indices: Sequence[Seen | None], source: Seen, *args: Any) -> list[Axes] | None:
    place = _index(walk, x, indices)
    if place is None:
        return None
    sizes = tuple(prod(factor.size for factor in axis) for axis in place[0])
    broadcast(walk, [place[0], source.axes], [sizes, source.shape])
    return [x.axes]


@rule("one_hot")
def _one_hot(walk: Context, x: Seen, *args: Any) -> list[Sequence[Axis | None]]:
    return [(*x.axes, None)]


@rule("bucketize", "searchsorted")
def _bucketize(walk: Context, *args: Any, **kwargs: Any) -> list[Axes]:
    first, second = args[:2]
    values, bounds = (first, second) if walk.name == "bucketize" else (second, first)
    walk.block(bounds.axes)
    return [values.axes]


# ---- made from nothing


@rule("zeros", "ones", "full", "empty", "new_zeros", "new_ones", "new_full", "new_empty", "scalar_tensor")
def _constant(walk: Context, *args: Any, **kwargs: Any) -> list[Axes]:
    """The same in every slice."""
    return [tuple(fresh(size) for size in walk.shapes[0])]

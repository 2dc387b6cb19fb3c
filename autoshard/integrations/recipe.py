"""From what was done to traced tensors to what is read where: regions of a model's tensor, each a view of a file's.

    experts.0.up [6, 4] ┐ stack           ┐ cat
    experts.1.up [6, 4] ┘ [2, 6, 4]       │ dim 1           gate_up [2, 12, 4]
    experts.0.gate ┐ stack                │                 region  [0:1, 0:6, 0:4]   experts.0.gate, unsqueezed
    experts.1.gate ┘ [2, 6, 4]            ┘                 region  [0:1, 6:12, 0:4]  experts.0.up, unsqueezed …

What can't be said so (sums, reshapes that mix regions, a second cast) is computed from whole tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.checkpoint.data import Piece, Source
from autoshard.integrations.traced import META, Call, Expression, Leaf, Traced, evaluate, leaves

aten = torch.ops.aten
Region = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """A region of a tensor: views of one tensor of the checkpoint. `strided` is that view, on meta."""

    entry: str
    views: tuple[tuple, ...]
    strided: torch.Tensor
    region: Region

    def viewed(self, name: str, *arguments: Any, region: Region) -> "_Part":
        made = getattr(self.strided, name)(*arguments)
        return _Part(self.entry, (*self.views, (name, *arguments)), made, region)


@dataclass(frozen=True, slots=True)
class _Layout:
    """A tensor made of parts that fill it; `cast`: to another dtype than the checkpoint has."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    cast: bool
    parts: tuple[_Part, ...]


class _NotPieces(Exception):
    """What was done can't be said in pieces."""


def sources_of(
    tensors: Mapping[str, Traced], described: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
) -> dict[str, Source]:
    """Say how each named traced tensor is made of a checkpoint whose tensors have these shapes and dtypes."""
    known: dict[int, _Layout | None] = {}

    def layout_of(expression: Expression) -> _Layout:
        found = known.get(id(expression))
        if found is None:
            if id(expression) in known:
                raise _NotPieces
            known[id(expression)] = None
            found = known[id(expression)] = _layout(expression, described, layout_of)
        return found

    return {name: _source(tensor, layout_of) for name, tensor in tensors.items()}


def _source(tensor: Traced, layout_of: Callable[[Expression], _Layout]) -> Source:
    expression, shape = tensor.expression, tuple(tensor.shape)
    try:
        layout = layout_of(expression)
        if (layout.shape, layout.dtype) != (shape, tensor.dtype):
            raise _NotPieces
    except _NotPieces:
        entries = leaves(expression)

        def compute(*values: torch.Tensor) -> torch.Tensor:
            return evaluate(expression, dict(zip(entries, values, strict=True)))

        return Source(shape=shape, dtype=tensor.dtype, compute=(entries, compute))
    whole = len(layout.parts) == 1
    pieces = [Piece(entry=part.entry, views=part.views, region=None if whole else part.region) for part in layout.parts]
    return Source(shape=shape, dtype=tensor.dtype, pieces=tuple(pieces))


def _layout(
    expression: Expression, described: Mapping[str, Any], layout_of: Callable[[Expression], _Layout]
) -> _Layout:
    if isinstance(expression, Leaf):
        shape, dtype = described[expression.name]
        strided = torch.empty(shape, dtype=dtype, device=META)
        return _Layout(shape, dtype, False, (_Part(expression.name, (), strided, _all(shape)),))
    rule = _RULES.get(expression.func)
    if rule is None or expression.written or not all(map(_is_known, expression.args)):
        raise _NotPieces
    return rule(layout_of, expression)


def _is_known(value: Any) -> bool:
    """Whether an argument is no tensor that came from elsewhere than the checkpoint."""
    return all(map(_is_known, value)) if isinstance(value, list | tuple) else not isinstance(value, torch.Tensor)


def _all(shape: tuple[int, ...]) -> Region:
    return tuple((0, size) for size in shape)


def _same(layout_of: Any, call: Call) -> _Layout:
    return layout_of(call.args[0])


def _convert(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    dtype = call.kwargs.get("dtype") or layout.dtype
    if dtype == layout.dtype:
        return layout
    if layout.cast:  # two roundings are not one
        raise _NotPieces
    return _Layout(layout.shape, dtype, True, layout.parts)


def _pad(layout_of: Any, call: Call) -> _Layout:
    if any(call.args[1]):
        raise _NotPieces
    return layout_of(call.args[0])


def _view(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    if len(layout.parts) > 1:
        raise _NotPieces
    size = torch.empty(layout.shape, device=META).view(call.args[1]).shape  # without -1
    try:
        part = layout.parts[0].viewed("view", *size, region=_all(size))
    except RuntimeError:  # its memory order does not allow it: the library made it contiguous before
        raise _NotPieces from None
    return _Layout(tuple(size), layout.dtype, layout.cast, (part,))


def _permute(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    order = list(range(len(layout.shape)))
    if call.func is aten.permute.default:
        order = [dim % len(order) for dim in call.args[1]]
    elif len(order) > 1:
        first, second = (0, 1) if call.func is aten.t.default else (dim % len(order) for dim in call.args[1:3])
        order[first], order[second] = order[second], order[first]

    def moved(values: Any) -> tuple:
        return tuple(values[dim] for dim in order)

    parts = [part.viewed("permute", *order, region=moved(part.region)) for part in layout.parts]
    return _Layout(moved(layout.shape), layout.dtype, layout.cast, tuple(parts))


def _slice(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    given = call.args[1:]
    dim, start, stop, step = given + (0, None, None, 1)[len(given) :]
    if step != 1:
        raise _NotPieces
    dim %= len(layout.shape)
    start, stop, _ = slice(start, stop).indices(layout.shape[dim])
    return _narrowed(layout, dim, start, max(0, stop - start))


def _split(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    dim = (call.args[2] if len(call.args) > 2 else call.kwargs.get("dim", 0)) % len(layout.shape)
    size, item = layout.shape[dim], call.item or 0
    if isinstance(call.args[1], int):
        start = call.args[1] * item
        return _narrowed(layout, dim, start, min(call.args[1], size - start))
    sizes = list(call.args[1])
    return _narrowed(layout, dim, sum(sizes[:item]), sizes[item])


def _narrowed(layout: _Layout, dim: int, start: int, length: int) -> _Layout:
    shape = (*layout.shape[:dim], length, *layout.shape[dim + 1 :])
    parts = []
    for part in layout.parts:
        begin, size = part.region[dim]
        low, high = max(start, begin), min(start + length, begin + size)
        if low >= high:
            continue
        region = (*part.region[:dim], (low - start, high - low), *part.region[dim + 1 :])
        if high - low == size:
            parts.append(_Part(part.entry, part.views, part.strided, region))
        else:
            parts.append(part.viewed("narrow", dim, low - begin, high - low, region=region))
    if not parts:  # of a size of 0
        raise _NotPieces
    return _Layout(shape, layout.dtype, layout.cast, tuple(parts))


def _select(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    if call.func is aten.unbind.int:
        dim, index = (call.args[1] if len(call.args) > 1 else 0), call.item
    else:
        dim, index = call.args[1:3]
    dim %= len(layout.shape)
    return _without(_narrowed(layout, dim, index % layout.shape[dim], 1), dim)


def _squeeze(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    dims = call.args[1] if len(call.args) > 1 else [dim for dim, size in enumerate(layout.shape) if size == 1]
    for dim in sorted({dim % len(layout.shape) for dim in ([dims] if isinstance(dims, int) else dims)}, reverse=True):
        layout = _without(layout, dim) if layout.shape[dim] == 1 else layout
    return layout


def _without(layout: _Layout, dim: int) -> _Layout:
    """Drop a dimension of size 1."""
    parts = [
        part.viewed("select", dim, 0, region=(*part.region[:dim], *part.region[dim + 1 :])) for part in layout.parts
    ]
    return _Layout((*layout.shape[:dim], *layout.shape[dim + 1 :]), layout.dtype, layout.cast, tuple(parts))


def _unsqueeze(layout_of: Any, call: Call) -> _Layout:
    layout = layout_of(call.args[0])
    return _with(layout, call.args[1] % (len(layout.shape) + 1))


def _with(layout: _Layout, dim: int) -> _Layout:
    """Add a dimension of size 1."""
    parts = [
        part.viewed("unsqueeze", dim, region=(*part.region[:dim], (0, 1), *part.region[dim:])) for part in layout.parts
    ]
    return _Layout((*layout.shape[:dim], 1, *layout.shape[dim:]), layout.dtype, layout.cast, tuple(parts))


def _join(layout_of: Any, call: Call) -> _Layout:
    """Put layouts side by side: `cat`, and `stack`, which adds the dimension first."""
    layouts = [layout_of(one) for one in call.args[0]]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    if call.func is aten.stack.default:
        dim %= len(layouts[0].shape) + 1
        layouts = [_with(layout, dim) for layout in layouts]
    dim %= len(layouts[0].shape)
    if len({(layout.dtype, len(layout.shape)) for layout in layouts}) > 1:
        raise _NotPieces
    parts, position = [], 0
    for layout in layouts:
        for part in layout.parts:
            start, size = part.region[dim]
            region = (*part.region[:dim], (position + start, size), *part.region[dim + 1 :])
            parts.append(_Part(part.entry, part.views, part.strided, region))
        position += layout.shape[dim]
    shape = (*layouts[0].shape[:dim], position, *layouts[0].shape[dim + 1 :])
    return _Layout(shape, layouts[0].dtype, any(layout.cast for layout in layouts), tuple(parts))


_RULES: dict[Any, Callable[[Any, Call], _Layout]] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.lift_fresh.default: _same,
    aten._to_copy.default: _convert,
    aten.constant_pad_nd.default: _pad,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.permute.default: _permute,
    aten.transpose.int: _permute,
    aten.t.default: _permute,
    aten.slice.Tensor: _slice,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split,
    aten.unbind.int: _select,
    aten.select.int: _select,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.cat.default: _join,
    aten.stack.default: _join,
}

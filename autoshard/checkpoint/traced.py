"""Tensors without values that note what is done to them, so that it can be done to others later, one at a time.

    traced("up.weight")[3].T  ──▶  TracedOp(transpose, (TracedOp(select, (TracedSource("up.weight"), 0, 3)), 0, 1))

A library's own conversion of a whole state dict is run on these; then each result says what it is made of and how.
`fill` writes such a result into memory, or a stretch of it, and needs nothing beyond what it writes where tensors are
only put side by side:

    cat(stack(gate.0, gate.1), stack(up.0, up.1))    ──▶    gate.1 is copied to its place in row 1, if that is asked for
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.common.schemas import schema_of
from autoshard.torch_private import not_overridden, wrapper

META = torch.device("meta")
aten = torch.ops.aten


@dataclass(frozen=True, slots=True, eq=False)
class TracedSource:
    """A tensor that a name stands for.

    Attributes:
        like: its shape and dtype, on meta.
        read: gives its values, for ops that look at some (are these two equal?); None: such ops are refused.
        missing: it stands for nothing: what is written into it is dropped.
    """

    name: str
    like: torch.Tensor
    read: Callable[[], torch.Tensor] | None = None
    missing: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class TracedOp:
    """The result of an ATen op; `item`: which one, of an op with several. Leaves and calls stand for tensors.

    Attributes:
        like: shape, strides and dtype of the result, on meta.
        written: something was written into it after the op, or into what it is a view of: it has no known values.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    like: torch.Tensor | None
    item: int | None = None
    written: bool = False


Expression = TracedSource | TracedOp
Read = Callable[[str], torch.Tensor]
"""Name of a leaf -> its values, which are only read."""


class TracedTensor(torch.Tensor):
    """Has shape, strides and dtype, says it is on the CPU, and knows its expression. Leaves can't be written to."""

    expression: Expression
    plain: torch.Tensor  # on meta

    __torch_function__ = not_overridden

    @staticmethod
    def __new__(cls, plain: torch.Tensor, expression: Expression) -> "TracedTensor":
        self = wrapper(cls, plain, torch.device("cpu"))
        self.plain, self.expression = plain, expression
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"TracedTensor({list(self.shape)}, {self.dtype}, {self.expression})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        schema = schema_of(func)
        if schema is None:
            raise NotImplementedError(f"torch can't say what {func} writes")
        if schema.is_mutable:
            return _written(func, args)
        known = _mapped(args, _expression)
        settings = {name: _mapped(value, _expression) for name, value in kwargs.items() if name != "device"}

        def call(like: torch.Tensor | None, item: int | None = None) -> TracedOp:
            return TracedOp(func=func, args=known, kwargs=settings, like=like, item=item)

        if not any("Tensor" in str(returned.type) for returned in schema.returns):
            return evaluate(call(None), None)
        shapes = {name: META if name == "device" else _mapped(value, _plain) for name, value in kwargs.items()}
        result = func(*_mapped(args, _plain), **shapes)
        if isinstance(result, torch.Tensor):
            return TracedTensor(result, call(result))
        if isinstance(result, (list, tuple)):
            return [TracedTensor(one, call(one, item)) for item, one in enumerate(result)]
        raise NotImplementedError(f"{func} returns {type(result).__name__}")


def leaf(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, read: "Callable[[], torch.Tensor] | None" = None
) -> TracedSource:
    """What stands for a contiguous tensor."""
    return TracedSource(name, torch.empty(shape, dtype=dtype, device=META), read)


def traced(one: TracedSource) -> TracedTensor:
    """A tensor to be."""
    return TracedTensor(one.like, one)


def missing(like: torch.Tensor) -> TracedTensor:
    """A tensor that stands for nothing: libraries may initialise it, to no effect."""
    return traced(TracedSource("", torch.empty_like(like, device=META), missing=True))


def leaves(expression: Expression) -> tuple[str, ...]:
    """Names that an expression needs values of, each once, in the order in which they come up."""
    return tuple(dict.fromkeys(one.name for one in _walk(expression) if isinstance(one, TracedSource)))


def bare(expression: Expression) -> Expression:
    """The same without what only copies, or takes all of a tensor."""
    while isinstance(expression, TracedOp) and _is_same(expression):
        expression = expression.args[0]
    return expression


def evaluate(expression: Expression, read: Read | None) -> torch.Tensor:
    """Do to the values that `read` gives what was done to the traced ones; the result may share their memory."""
    exact = any(isinstance(one, TracedOp) and one.func in _STRIDED for one in _walk(expression))

    def value(part: Any) -> Any:
        if isinstance(part, TracedSource):
            if read is None and part.read is None:
                raise NotImplementedError(f"the values of {part.name} are not known")
            return read(part.name) if read is not None else part.read()  # type: ignore[misc]
        if not isinstance(part, TracedOp):
            return part
        if part.written:
            raise NotImplementedError(f"what {part.func} returned was written to")
        if not exact and part.func in _COPIES:
            return value(part.args[0])
        # what was copied so that it can be viewed is not
        func = aten.reshape.default if not exact and part.func in _VIEWS else part.func
        result = func(*_mapped(part.args, value), **_mapped(part.kwargs, value))
        return result if part.item is None else result[part.item]

    return value(expression)


def fill(
    into: torch.Tensor, expression: Expression, read: Read, copy: Callable[[torch.Tensor, torch.Tensor], None],
    begin: tuple[int, ...] = (),
) -> None:  # fmt: skip
    """Write a box of what an expression gives into memory of its shape; `begin`: first index along each dimension.

    `copy(memory, values)` does the writing; values are cast to the dtype of the memory.
    """
    begin = begin or (0,) * into.dim()
    if isinstance(expression, TracedOp) and not expression.written:
        func, args = expression.func, expression.args
        if _is_same(expression) or (func is aten._to_copy.default and _dtype(expression) == into.dtype):
            return fill(into, args[0], read, copy, begin)
        if func in _TURNS:
            order = _TURNS[func](into.dim(), *args[1:])
            back = sorted(range(len(order)), key=order.__getitem__)
            return fill(into.permute(back), args[0], read, copy, tuple(begin[dim] for dim in back))
        if func in _JOINS and _are_alike(args[0]):
            for part, item, first in _joined(into, expression, begin):
                fill(part, item, read, copy, first)
            return None
    value = evaluate(expression, read)
    for dim, length in enumerate(into.shape):
        value = value.narrow(dim, begin[dim], length)
    copy(into, value)
    return None


def _joined(
    into: torch.Tensor, call: TracedOp, begin: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, Expression, tuple[int, ...]]]:
    """Yield (memory, what comes there, begin of the box of it) for `cat` and `stack`."""
    dim = (call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)) % into.dim()
    stacked = call.func is aten.stack.default
    start = 0
    for item in call.args[0]:
        size = 1 if stacked else item.like.shape[dim]
        low, high = max(begin[dim], start), min(begin[dim] + into.shape[dim], start + size)
        if low < high:
            part = into.narrow(dim, low - begin[dim], high - low)
            first = () if stacked else (low - start,)
            yield part.squeeze(dim) if stacked else part, item, (*begin[:dim], *first, *begin[dim + 1 :])
        start += size


def _dtype(expression: Expression) -> torch.dtype:
    assert expression.like is not None
    return expression.like.dtype


def _are_alike(items: Any) -> bool:
    """Whether what is put side by side has one dtype, and as many dimensions: torch leaves out what is empty."""
    known = all(isinstance(item, TracedSource | TracedOp) for item in items)
    return known and len({(_dtype(item), item.like.dim()) for item in items}) == 1


def _is_same(call: TracedOp) -> bool:
    """Whether a call gives the values of its first argument, all of them, in their dtype and shape."""
    if call.written or call.func in _COPIES:
        return not call.written
    if call.func not in (aten._to_copy.default, aten.slice.Tensor):
        return False
    like, given = call.like, call.args[0].like
    return like is not None and (like.dtype, like.shape) == (given.dtype, given.shape)


_COPIES = {
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.contiguous.default,
    aten.lift_fresh.default,
}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_JOINS = {aten.cat.default, aten.stack.default}
_STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.view.dtype}
"""Ops whose values depend on how their argument lies in memory."""


def _swapped(dims: int, first: int = 0, second: int = 1) -> list[int]:
    order = list(range(dims))
    if dims > 1:
        order[first % dims], order[second % dims] = order[second % dims], order[first % dims]
    return order


_TURNS: dict[Any, Callable[..., list[int]]] = {
    aten.permute.default: lambda dims, order: [dim % dims for dim in order],
    aten.transpose.int: _swapped,
    aten.t.default: _swapped,
}
"""Ops that reorder dimensions -> which of their argument's each dimension of the result is."""


def _written(func: Any, args: tuple) -> Any:
    """Note a write into the first argument, unless it stands for nothing. Raises `NotImplementedError` for a leaf."""
    expression = _expression(args[0])
    while isinstance(expression, TracedOp):
        expression.written = True
        if not any(returned.alias_info is not None for returned in schema_of(expression.func).returns):
            return args[0]
        expression = expression.args[0]
    if isinstance(expression, TracedSource) and expression.missing:
        return args[0]
    raise NotImplementedError(f"{func} writes into a tensor whose values come from elsewhere")


def _walk(value: Any) -> Iterator[Expression]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _walk(part)
    elif isinstance(value, TracedSource | TracedOp):
        yield value
        if isinstance(value, TracedOp):
            yield from _walk(value.args)
            yield from _walk(tuple(value.kwargs.values()))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(part, change) for part in value])
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return change(value)


def _plain(value: Any) -> Any:
    if isinstance(value, TracedTensor):
        return value.plain
    return value.to(META) if isinstance(value, torch.Tensor) else value


def _expression(value: Any) -> Any:
    return value.expression if isinstance(value, TracedTensor) else value

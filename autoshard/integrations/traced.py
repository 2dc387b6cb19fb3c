"""Tensors without values that note what is done to them, so that it can be done to others later, one at a time.

    traced("experts.weight")[3].T  ──▶  Call(transpose, (Call(select, (Leaf("experts.weight"), 0, 3)), 0, 1))

A library's own conversion of a whole state dict is run on these; then each result says what it is made of and how.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

META = torch.device("meta")


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """A tensor that a name stands for.

    Attributes:
        read: gives its values, for ops that look at some (are these two equal?); None: such ops are refused.
        missing: it stands for nothing: what is written into it is dropped.
    """

    name: str
    read: Callable[[], torch.Tensor] | None = None
    missing: bool = False


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
    """The result of an ATen op; `item`: which one, of an op with several. Leaves and calls stand for tensors.

    Attributes:
        written: something was written into it after the op, or into what it is a view of: it has no known values.
    """

    func: Any
    args: tuple
    kwargs: dict[str, Any]
    item: int | None = None
    written: bool = False


Expression = Leaf | Call


class Traced(torch.Tensor):
    """Has shape, strides and dtype, says it is on the CPU, and knows its expression. Leaves can't be written to."""

    expression: Expression
    plain: torch.Tensor  # on meta

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, plain: torch.Tensor, expression: Expression) -> "Traced":
        self = torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, plain.stride(), plain.storage_offset(), dtype=plain.dtype, device=torch.device("cpu")
        )
        self.plain, self.expression = plain, expression
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Traced({list(self.shape)}, {self.dtype}, {self.expression})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _written(func, args)
        known = _mapped(args, _expression)
        settings = {name: _mapped(value, _expression) for name, value in kwargs.items() if name != "device"}
        if not any("Tensor" in str(returned.type) for returned in func._schema.returns):
            return evaluate(Call(func=func, args=known, kwargs=settings), {})
        shapes = {name: META if name == "device" else _mapped(value, _plain) for name, value in kwargs.items()}
        result = func(*_mapped(args, _plain), **shapes)
        if isinstance(result, torch.Tensor):
            return Traced(result, Call(func=func, args=known, kwargs=settings))
        if isinstance(result, (list, tuple)):
            calls = [Call(func=func, args=known, kwargs=settings, item=item) for item in range(len(result))]
            return [Traced(one, call) for one, call in zip(result, calls, strict=True)]
        raise NotImplementedError(f"{func} returns {type(result).__name__}")


def traced(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], torch.Tensor] | None = None
) -> Traced:
    """A tensor to be, contiguous."""
    return Traced(torch.empty(shape, dtype=dtype, device=META), Leaf(name, read))


def missing(name: str, like: torch.Tensor) -> Traced:
    """A tensor that stands for nothing: libraries may initialise it, to no effect."""
    return Traced(torch.empty_like(like, device=META), Leaf(name, missing=True))


def leaves(expression: Expression) -> tuple[str, ...]:
    """Names that an expression needs values of, each once, in the order in which they come up."""
    return tuple(dict.fromkeys(one.name for one in _walk(expression) if isinstance(one, Leaf)))


def evaluate(expression: Expression, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Do to these values what was done to the traced ones."""
    if isinstance(expression, Leaf):
        if expression.name not in values and expression.read is not None:
            return expression.read()
        return values[expression.name]
    if expression.written:
        raise NotImplementedError(f"what {expression.func} returned was written to")

    def value(part: Any) -> Any:
        return evaluate(part, values) if isinstance(part, Leaf | Call) else part

    result = expression.func(*_mapped(expression.args, value), **_mapped(expression.kwargs, value))
    return result if expression.item is None else result[expression.item]


def lean(expression: Expression) -> Expression:
    """What gives the same values without copies on the way, and without making many pieces where one is wanted.

    split(clone(x), 512, 1)[3]  ──▶  slice(x, 1, 1536, 2048): of a large `x`, one piece after another costs little
    """
    if any(isinstance(one, Call) and (one.func in _STRIDED or one.written) for one in _walk(expression)):
        return expression
    return _lean(expression)


def _lean(expression: Any) -> Any:
    if not isinstance(expression, Call):
        return expression
    func, kwargs = expression.func, _mapped(expression.kwargs, _lean)
    args = _mapped(expression.args, _lean)
    if func in _COPIES:
        return args[0]
    if func in _VIEWS:  # of what was copied so that it can be viewed
        return Call(func=aten.reshape.default, args=args, kwargs=kwargs)
    if expression.item is not None and func in _PIECES and not kwargs:
        return _PIECES[func](expression.item, *args)
    return Call(func=func, args=args, kwargs=kwargs, item=expression.item)


def _slice(whole: Any, dim: int, begin: int, end: int) -> Call:
    return Call(func=aten.slice.Tensor, args=(whole, dim, begin, end), kwargs={})


def _piece_of_sizes(item: int, whole: Any, sizes: list[int], dim: int = 0) -> Call:
    return _slice(whole, dim, sum(sizes[:item]), sum(sizes[: item + 1]))


aten = torch.ops.aten
_COPIES = {aten.clone.default, aten.alias.default, aten.detach.default, aten.contiguous.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default}
_STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.view.dtype}
"""Ops whose values depend on how their argument lies in memory."""
_PIECES: dict[Any, Callable[..., Call]] = {
    aten.split.Tensor: lambda item, whole, size, dim=0: _slice(whole, dim, item * size, (item + 1) * size),
    aten.split_with_sizes.default: _piece_of_sizes,
    aten.unbind.int: lambda item, whole, dim=0: Call(func=aten.select.int, args=(whole, dim, item), kwargs={}),
}


def _written(func: Any, args: tuple) -> Any:
    """Note a write into the first argument, unless it stands for nothing. Raises `NotImplementedError` for a leaf."""
    expression = _expression(args[0])
    while isinstance(expression, Call):
        expression.written = True
        if not any(returned.alias_info is not None for returned in expression.func._schema.returns):
            return args[0]
        expression = expression.args[0]
    if isinstance(expression, Leaf) and expression.missing:
        return args[0]
    raise NotImplementedError(f"{func} writes into a tensor whose values come from elsewhere")


def _walk(value: Any) -> Iterator[Expression]:
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _walk(part)
    elif isinstance(value, Leaf | Call):
        yield value
        if isinstance(value, Call):
            yield from _walk(value.args)
            yield from _walk(tuple(value.kwargs.values()))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(part, change) for part in value])
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return change(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Traced):
        return value.plain
    return value.to(META) if isinstance(value, torch.Tensor) else value


def _expression(value: Any) -> Any:
    return value.expression if isinstance(value, Traced) else value

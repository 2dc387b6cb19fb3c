"""Autograd functions of the user's on a part of a tensor: right on a rank if they work on each element by itself.

No graph has what their backward does, so it is run here, on shapes alone: as the whole model calls the function, and as
a rank does. If both run the same ops with the same numbers, each on the elements at the same place, a rank's result and
its gradient are its parts of the whole ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoshard import nested
from autoshard.capture.tape import Ref, TapedCall
from autoshard.torch_private import DispatchMode

Described = Callable[[int], tuple[tuple[int, ...], torch.dtype]]
"""A value -> its shape and dtype."""
_AS_ELEMENTWISE = frozenset({
    "detach", "alias", "clone", "_to_copy", "copy_", "zeros_like", "ones_like", "full_like", "empty_like", "view_as",
})  # fmt: skip
"""Ops that keep every element in its place, and that torch does not list among the pointwise ones."""


class _Log(DispatchMode):
    """Notes ops: their names and all arguments, of tensors nothing but whether they are of the shape looked at."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.rows: list[Any] = []
        self.apart = True  # so far every op was one on single elements

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        tensors = nested.flat_tensors((args, kwargs, made))
        fit = all(tuple(tensor.shape) == self.shape or tensor.dim() == 0 for tensor in tensors)
        self.apart &= fit and bool(tensors) and (torch.Tag.pointwise in func.tags or name in _AS_ELEMENTWISE)
        rest = [leaf for _, leaf in nested.leaves_in((args, kwargs)) if not isinstance(leaf, torch.Tensor)]
        self.rows.append((func, rest))
        return made


def is_elementwise(
    called: TapedCall,
    shape_of: Callable[[int], tuple[tuple[int, ...], torch.dtype]],
    local: Mapping[int, Sequence[int]],
) -> bool:
    """Whether a call of an autograd function works on each element by itself, forward and backward, also on a rank.

    `shape_of`: a value -> its shape and dtype in the whole; `local`: shapes of values that are cut.
    """
    values = [leaf.value for _, leaf in nested.leaves_in((called.args, called.kwargs)) if isinstance(leaf, Ref)]
    wholes = {shape_of(value)[0] for value in values if shape_of(value)[0]}
    parts = {tuple(local[value]) for value in values if value in local}
    if len(wholes) != 1 or len(parts) != 1 or any(value not in local for value in values if shape_of(value)[0]):
        return False
    try:
        logs = [
            _run(called, wholes.pop(), lambda value: shape_of(value)[0], shape_of),
            _run(called, parts.pop(), lambda value: tuple(local.get(value, ())), shape_of),
        ]
    except Exception:  # what can't be run on shapes alone is not known to be so
        return False
    return all(log.apart for log in logs) and logs[0].rows == logs[1].rows


def _run(
    called: TapedCall, shape: Sequence[int], shape_for: Callable[[int], Sequence[int]], shape_of: Described
) -> _Log:
    """Call a function and its backward on tensors without values."""
    inputs: list[torch.Tensor] = []

    def tensor(value: int) -> torch.Tensor:
        dtype = shape_of(value)[1]
        made = torch.empty(shape_for(value), dtype=dtype, device="meta")
        inputs.append(made.requires_grad_(dtype.is_floating_point))
        return made

    args, kwargs = _filled((called.args, called.kwargs), tensor)
    log = _Log(shape)
    with torch.enable_grad(), log:
        made = [one for one in nested.flat_tensors(called.function.apply(*args, **kwargs)) if one.requires_grad]
        trained = [one for one in inputs if one.requires_grad]
        if made and trained:
            torch.autograd.grad(made, trained, [torch.empty_like(one) for one in made], allow_unused=True)
    return log


def _filled(value: Any, make: Callable[[int], torch.Tensor]) -> Any:
    if isinstance(value, Ref):
        return make(value.value)
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return type(value)(_filled(item, make) for item in value)
    if type(value) is dict:
        return {name: _filled(item, make) for name, item in value.items()}
    return value

"""Weights that take no memory and no time, for a proof that needs the code of a model and not its numbers.

    x [4, 8, 16384] @ W [16384, 53248]   ──▶   every row of x, folded or repeated until it is as long as the result's

A product with a weight makes every row of its result from one row of what it is given. Any cheap function that does so
serves as well where the question is which rows end up in which: all else of the model runs as it is. A stand-in is one
number, expanded to the shape of the weight.
"""

from functools import lru_cache
from typing import Any

import torch

from autoshard.nested import tensors_in
from autoshard.torch_private import DispatchMode

aten = torch.ops.aten
_PRODUCTS = {aten.mm.default, aten.bmm.default, aten.mv.default, aten._grouped_mm.default, aten.dot.default}
_SUMS = {aten.addmm.default, aten.baddbmm.default, aten.addmv.default}
_CONVOLUTIONS = {aten.convolution.default, aten._convolution.default}
_PICKS = {aten.index.Tensor, aten.index_select.default, aten.gather.default}


class StandIns(DispatchMode):
    """Computes with stand-ins: those it has made, and what is made of them."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.Tensor] = {}

    def make(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of any shape with one number in memory."""
        tensor = torch.full((), 0.02, dtype=dtype) if dtype.is_floating_point else torch.zeros((), dtype=dtype)
        self._storages[tensor.untyped_storage()._cdata] = tensor
        return tensor.expand(shape)

    def holds(self, value: Any) -> bool:
        """Whether a value is a stand-in."""
        return isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._storages

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        if not any(map(self.holds, tensors)):
            return func(*args, **kwargs)
        if func in _PRODUCTS:
            return self._product(args[0], args[1])
        if func in _SUMS:
            return self._product(args[1], args[2]) + args[0]
        if func in _CONVOLUTIONS and not self.holds(args[0]):
            return _convolved(func, args, kwargs)
        if func is aten.embedding.default and not self.holds(args[1]):
            return _looked_up(args[0], args[1])
        if func is aten.convolution_backward.default:
            return _convolved_back(*args)
        picked = func in _PICKS and self.holds(args[0])
        if picked or (all(map(self.holds, tensors)) and not _is_view(func)):
            made = func(*_on_meta(args), **{**_on_meta(kwargs), **({"device": "meta"} if "device" in kwargs else {})})
            return self.make(made.shape, made.dtype) if isinstance(made, torch.Tensor) else made
        return func(*args, **kwargs)

    def _product(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if self.holds(x) and self.holds(y):
            return self.make((*x.shape[:-1], *y.shape[-1:]), x.dtype)
        if self.holds(x):
            return _spread(y.transpose(-1, -2), x.shape[-2]).transpose(-1, -2)
        return _spread(x, y.shape[-1])


def _spread(x: torch.Tensor, width: int) -> torch.Tensor:
    """Make the last dimension so long, with every number of it in the result."""
    have = x.shape[-1]
    x = x * _wave(have, x.dtype, 1.0)
    if have > width:
        x = (torch.nn.functional.pad(x, (0, -have % width)) if have % width else x).unflatten(-1, (-1, width)).sum(-2)
    elif have < width:
        x = x.repeat(*[1] * (x.dim() - 1), -(-width // have))[..., :width]
    return x * _wave(width, x.dtype, 2.0)


@lru_cache(maxsize=32)
def _wave(length: int, dtype: torch.dtype, phase: float) -> torch.Tensor:
    return torch.sin(torch.arange(length, dtype=torch.float64) * 0.7 + phase).to(dtype)


def _convolved(func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    shape = func(*_on_meta(args), **_on_meta(kwargs)).shape
    return _spread(args[0].flatten(1), shape[1:].numel()).view(shape)


def _convolved_back(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, sizes: Any, *args: Any) -> Any:
    """The gradients of what goes into a convolution and of its bias; a stand-in has none."""
    wanted = args[-1]
    given = _spread(gradient.flatten(1), x.shape[1:].numel()).view(x.shape) if wanted[0] else None
    bias = gradient.transpose(0, 1).flatten(1).sum(1) if wanted[2] else None
    return given, None, bias


def _looked_up(table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Another row for every index."""
    return torch.sin(
        indices.to(table.dtype).unsqueeze(-1) * 1.3 + torch.arange(table.shape[1], dtype=table.dtype) * 0.7
    )


def _is_view(func: Any) -> bool:
    return any(
        argument.alias_info is not None and not argument.alias_info.is_write for argument in func._schema.arguments
    )


def _on_meta(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to("meta")
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_meta, value))
    return {name: _on_meta(item) for name, item in value.items()} if isinstance(value, dict) else value

"""Floating-point operations of composite ops, for which torch has no formulas: two for every product that is summed."""

import math
from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


def _linear(x: torch.Tensor, weight: torch.Tensor, *rest: Any, out_val: torch.Tensor, **options: Any) -> int:
    return 2 * out_val.numel() * weight.shape[-1]


def _matmul(left: torch.Tensor, right: torch.Tensor, *, out_val: torch.Tensor) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _convolution(x: torch.Tensor, weight: torch.Tensor, *rest: Any, out_val: torch.Tensor, **options: Any) -> int:
    return 2 * out_val.numel() * weight.shape[1:].numel()


def _transposed(x: torch.Tensor, weight: torch.Tensor, *rest: Any, out_val: torch.Tensor, **options: Any) -> int:
    return 2 * x.numel() * weight.shape[1:].numel()


def _attention(query: torch.Tensor, key: torch.Tensor, *rest: Any, out_val: torch.Tensor, **options: Any) -> int:
    return 2 * (query.numel() + out_val.numel()) * key.shape[-2]


def _einsum(equation: str, tensors: list[torch.Tensor], *, out_val: torch.Tensor, **options: Any) -> int:
    """Of two tensors: every element of the result is a sum over the letters that are not in it."""
    if len(tensors) < 2:
        return 0
    left, arrow, right = equation.replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for term, tensor in zip(left.split(","), tensors, strict=True):
        before, _, after = term.partition("...")
        sizes.update(zip(before, tensor.shape, strict=False))
        sizes.update(zip(reversed(after), reversed(tensor.shape), strict=False))
    kept = right if arrow else "".join(letter for letter in sizes if left.count(letter) == 1)
    return 2 * out_val.numel() * math.prod(size for letter, size in sizes.items() if letter not in kept)


COMPOSITE_FLOPS: dict[Any, Callable[..., int]] = {
    aten.linear: _linear,
    aten.matmul: _matmul,
    aten.einsum: _einsum,
    aten.scaled_dot_product_attention: _attention,
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d), _convolution),
    **dict.fromkeys((aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d), _transposed),
}
"""By op packet, called as the formulas of torch are: with the op's arguments and `out_val`."""

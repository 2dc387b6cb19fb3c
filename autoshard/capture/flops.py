"""Floating-point operations of ops for which torch has no formulas: two for every product that is summed."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten


def _matmul(left: torch.Tensor, *rest: Any, out_val: torch.Tensor, **options: Any) -> int:
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


def _attention_kernel(query: torch.Tensor, key: torch.Tensor, *rest: Any, out_val: Any, **options: Any) -> int:
    return _attention(query, key, out_val=out_val[0])


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *rest: Any, out_val: Any, **options: Any
) -> int:
    """The scores again, and the gradients of query, key, scores and value."""
    return 2 * (3 * query.numel() + 2 * gradient.numel()) * key.shape[-2]


def _grouped(left: torch.Tensor, right: torch.Tensor, *rest: Any, out_val: torch.Tensor, **options: Any) -> int:
    """Every row of the left goes through one of the matrices; two flat ones meet group by group."""
    return 2 * left.numel() * right.shape[-1]


def _matrix_vector(*args: Any, out_val: torch.Tensor, **options: Any) -> int:
    return 2 * max(item.numel() for item in args if isinstance(item, torch.Tensor))


def _rows_by_matrices(x: torch.Tensor, given: Iterable[Any]) -> int:
    """Every row of the first meets every matrix."""
    matrices = (item for item in given if isinstance(item, torch.Tensor) and item.dim() == 2)
    return 2 * x.shape[:-1].numel() * sum(matrix.numel() for matrix in matrices)


def _recurrent_layers(x: torch.Tensor, *args: Any, out_val: Any, **options: Any) -> int:
    """Weights are the last list among the arguments."""
    return _rows_by_matrices(x, [arg for arg in args if isinstance(arg, (list, tuple))][-1])


def _encoder(x: torch.Tensor, *args: Any, out_val: Any, **options: Any) -> int:
    """A whole encoder layer or attention: every row meets every matrix, and every other row twice."""
    if x.is_nested:
        return 0
    return _rows_by_matrices(x, args) + 4 * x.numel() * x.shape[-2]


COMPOSITE_FLOPS: dict[Any, Callable[..., int]] = {
    aten.linear: _matmul,
    aten.matmul: _matmul,
    aten.einsum: _einsum,
    aten.scaled_dot_product_attention: _attention,
    **dict.fromkeys((aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu), _recurrent_layers),
    **dict.fromkeys((aten.conv1d, aten.conv2d, aten.conv3d), _convolution),
    **dict.fromkeys((aten.conv_transpose1d, aten.conv_transpose2d, aten.conv_transpose3d), _transposed),
}
KERNEL_FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention_kernel,
    aten._scaled_dot_product_fused_attention_overrideable: _attention_kernel,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    aten._grouped_mm: _grouped,
    aten._transformer_encoder_layer_fwd: _encoder,
    aten._native_multi_head_attention: _encoder,
    aten.mkldnn_rnn_layer: lambda x, *args, **options: _rows_by_matrices(x, args[:2]),
    **dict.fromkeys((aten.mv, aten.addmv, aten.dot, aten.vdot), _matrix_vector),
}


def formulas(composite: bool) -> dict[Any, Callable[..., int]]:
    """Return formulas by op packet, torch's and these; each takes the op's arguments and `out_val`."""
    return {**flop_registry, **KERNEL_FLOPS, **(COMPOSITE_FLOPS if composite else {})}

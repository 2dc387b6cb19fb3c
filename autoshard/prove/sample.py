"""A block with random values, and random arguments for it: what a proof runs on.

Real weights prove less than random ones: fresh models have biases of zero and norms of one, which hide a bias added
twice or a norm left out.
"""

import copy
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn

from autoshard.capture.observe import TensorSpec, fill_specs
from autoshard.nested import flat_tensors, tensors_in


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A block of our own with random values, and arguments of some of its calls."""

    block: nn.Module
    calls: tuple[tuple[tuple, dict[str, Any]], ...]


def sample_block(
    module: nn.Module, calls: Iterable[tuple[tuple, dict[str, Any]]], tracked: Iterable[Container[str]],
    trained: Container[str],
) -> Sample:  # fmt: skip
    """Copy a block with random values in place of its own; `calls` are arguments with `TensorSpec` for tensors.

    `tracked`: for each call, the paths of the arguments that a gradient may reach in the model; `trained`: the names of
    the parameters that have gradients in this block or in one like it. Raises whatever copying raises: a block that
    can't be copied can't be proved.
    """
    block = random_copy(module)
    for name, parameter in block.named_parameters():
        parameter.requires_grad_(parameter.requires_grad or name in trained)
    generator = torch.Generator().manual_seed(0)
    made = tuple(fill_specs(call, lambda spec: _tensor(spec, generator)) for call in calls)
    for call, paths in zip(made, tracked, strict=False):
        for path, tensor in tensors_in(call):
            tensor.requires_grad_(path in paths and (tensor.is_floating_point() or tensor.is_complex()))
    return Sample(block=block, calls=made)


def random_copy(module: nn.Module, dtype: torch.dtype | None = None, *, keep_buffers: bool = False) -> nn.Module:
    """Copy a module with random values in place of its own, in one floating-point type if it is given.

    `keep_buffers`: buffers, and tensors in attributes, keep values that they have.
    """
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {}

    def add(tensor: torch.Tensor, known: bool) -> None:
        if id(tensor) not in memo:
            made = own_copy(tensor) if known and not tensor.is_meta else random_like(tensor, generator)
            if dtype is not None and made.is_floating_point():
                made.data = made.data.to(dtype)
            memo[id(tensor)] = made

    for parameter in module.parameters():
        add(parameter, known=False)
    for part in module.modules():
        for tensor in flat_tensors(list(vars(part).values())):  # buffers, and what a forward left somewhere
            add(tensor, known=keep_buffers)
    return copy.deepcopy(module, memo)


def on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where proofs run; one without values stays as it is."""
    return tensor if tensor.is_meta else tensor.cpu()


def own_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor with its values, where proofs run."""
    made = on_cpu(tensor.detach())
    return made.clone() if made.device == tensor.device else made


def random_like(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values that matter: matrices scaled by their fan-in, the rest around one half; integers as they are."""
    known = not tensor.is_meta and type(tensor) in (torch.Tensor, nn.Parameter)
    if not tensor.is_floating_point():
        values = own_copy(tensor) if known else torch.zeros(tensor.shape, dtype=tensor.dtype)
    else:
        noise = torch.randn(tensor.shape, generator=generator)
        fan_in = max(1, prod(tensor.shape[1:]))
        values = noise / fan_in**0.5 if tensor.dim() > 1 else 0.5 + 0.25 * noise.abs()
        if tensor.dtype is torch.float64:
            values = values.double()
    if not isinstance(tensor, nn.Parameter):
        return values
    made = nn.Parameter(values, requires_grad=tensor.requires_grad and values.is_floating_point())
    made.__dict__.update(own_copies(tensor))
    return made


def own_copies(tensor: torch.Tensor) -> dict[str, Any]:
    """Copies of a tensor's attributes, such as the state of a quantised weight; themselves where that fails."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        with suppress(Exception):  # something in there can't be copied
            return copy.deepcopy(vars(tensor))
    return dict(vars(tensor))


def _tensor(spec: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """An argument: known values as they were, random floats where they are not known, in single precision or double."""
    if spec.value is not None:
        value = spec.value.clone()
        return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
    if spec.dtype.is_floating_point:
        values = torch.randn(spec.shape, generator=generator)
        return values.double() if spec.dtype is torch.float64 else values
    if spec.dtype.is_complex:
        values = torch.randn(spec.shape, generator=generator, dtype=torch.complex64)
        return values.to(torch.complex128) if spec.dtype is torch.complex128 else values
    return torch.zeros(spec.shape, dtype=spec.dtype)

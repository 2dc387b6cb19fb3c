"""Copies of modules without values, on which a rank's code is run on shapes alone."""

import copy
from typing import Any

import torch
from torch import nn

from autoshard.capture.fake import SMALL_FLOATS
from autoshard.packed import is_packed
from autoshard.torch_private import FakeTensorMode, fake_from_meta

Arguments = tuple[tuple, dict[str, Any]]


def on_meta(block: nn.Module) -> nn.Module:
    """Copy a block with its parameters and buffers on meta; small buffers keep their values, which code may ask."""
    memo: dict[int, Any] = {}
    for tensor in (*block.parameters(), *block.buffers()):
        kept_values = not isinstance(tensor, nn.Parameter) and tensor.numel() <= SMALL_FLOATS
        if is_packed(tensor):  # its class decides which ops run: shared, since nothing cuts it
            memo[id(tensor)] = tensor
        if id(tensor) not in memo and not tensor.is_meta and not kept_values:
            made = torch.empty_like(tensor, device="meta")
            memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    return copy.deepcopy(block, memo)


def elements_of(block: nn.Module) -> int:
    """Elements of all parameters and buffers, tied ones once."""
    return sum(tensor.numel() for tensor in {id(t): t for t in (*block.parameters(), *block.buffers())}.values())


def as_fake(block: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Replace what is on meta by fake CPU tensors, in place: code that asks for a device sees the CPU."""
    made: dict[int, torch.Tensor] = {}
    for module in block.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        fake = fake_from_meta(mode, tensor.detach())
                        made[id(tensor)] = nn.Parameter(fake) if isinstance(tensor, nn.Parameter) else fake
                    table[name] = made[id(tensor)]  # type: ignore[assignment]
    return block

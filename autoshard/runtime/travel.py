"""The way of gradients back from copies, whose bytes are shared and whose history is not.

x on cuda:0   ──copy──▶  x' on cuda:1      every module call is given an alias of its own
              ◀─────────  gradient          when autograd comes to the alias
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.runtime.devices import send


class Travel(torch.autograd.Function):
    """Hand out an alias of a copy (given in a tuple, unseen by autograd) whose gradient goes to the source."""

    takes_any_device = True

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, copy: tuple[torch.Tensor]) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.device = source.device
        # Holding the source would keep its memory until backward. A parameter is held anyway, and torch refuses to
        # convert one that someone refers to weakly.
        ctx.find_source = (lambda: source) if isinstance(source, nn.Parameter) else weakref.ref(source)
        ctx.versions = source._version, copy[0]._version
        return copy[0].detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        # `.to` would make an expanded gradient dense, and the kernels after it would choose another way to compute
        return None if gradient is None else send(gradient, ctx.device), None


def travels(source: torch.Tensor) -> bool:
    """Whether copies of a tensor have a way back; function transforms and sparse tensors are left to torch's own."""
    return (
        source.requires_grad
        and torch.is_grad_enabled()
        and source.layout is torch.strided
        and not torch_private.are_functions_transformed()
    )


def travel(source: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
    """Return an alias of `copy`, with history: its gradient goes to `source`."""
    return Travel.apply(source, (copy,))


def source_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a tensor with history was copied from, if that is still there as it was; else the tensor."""
    node = tensor.grad_fn
    find: Callable[[], torch.Tensor | None] | None = getattr(node, "find_source", None)
    source = None if find is None else find()
    if source is None or (source._version, tensor._version) != node.versions:  # type: ignore[union-attr]
        return tensor
    return source

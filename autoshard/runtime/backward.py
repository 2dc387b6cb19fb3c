"""Functions of a tensor that have a backward of their own."""

from collections.abc import Callable
from typing import Any

import torch

Change = Callable[[Any], torch.Tensor]


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
        ctx.of_gradient = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.of_gradient(gradient), None, None


def with_backward(tensor: torch.Tensor, forward: Change, backward: Change) -> torch.Tensor:
    """Return `forward(tensor)`; the gradient of the tensor is `backward(gradient of the result)`.

    `backward` is kept until then, with what it refers to. Gradients of gradients go through it, too.
    """
    return _WithBackward.apply(tensor, forward, backward)

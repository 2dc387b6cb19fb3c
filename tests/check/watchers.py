"""Blocks in which somebody beside the ops is given tensors that a rank has a part of."""

import torch
from torch import nn

from tests.check.leaks import Wide


class Tripled(torch.autograd.Function):
    """Elementwise, forward and backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * gradient * (x == x)


class ByLength(torch.autograd.Function):
    """Its backward divides by how many units there are."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 48 / gradient.shape[-1]


class ByNorm(torch.autograd.Function):
    """Its backward divides by the norm of what a rank has a part of."""

    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm().clamp(min=1e9) * 1e9


def through(function):
    """A block whose hidden units go through an autograd function."""

    class Through(Wide):
        def between(self, hidden):
            return function.apply(hidden)

    return Through


class Keeping(Wide):
    """Keeps its hidden units for the next forward."""

    def between(self, hidden):
        self.last = hidden
        return hidden


class KeepingSum(Wide):
    """Keeps what all ranks have alike."""

    def forward(self, x):
        self.last = super().forward(x)
        return self.last


class WithGradients(Wide):
    """Divides by how many units there are in training only."""

    def between(self, hidden):
        return hidden / hidden.shape[-1] if torch.is_grad_enabled() else hidden / 48


class Long(nn.Module):
    """Attention with a temperature that `kind` makes of the length and the number of heads."""

    def __init__(self, kind):
        super().__init__()
        self.heads, self.kind = 4, kind
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        scores = q @ k.transpose(-1, -2) / self.kind(x, self.heads)
        return x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

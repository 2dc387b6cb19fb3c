"""Gradients of a placed model are those of one device but for rounding: copies have a way back."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.runtime import apply_device_map
from tests.runtime.models import D


class Cross(nn.Module):
    """A key and a value made of one memory by a layer elsewhere; the memory is used before and after it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, memory):
            return torch.tanh(self.key(memory)) * self.value(memory)

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layer, self.head = nn.Linear(D, D), self.Layer(), nn.Linear(D, D)

    def forward(self, x):
        memory = self.encoder(x)
        start = memory * memory.abs()
        found = self.layer(memory).cpu()
        return (self.head(memory) + found.to(memory.device)) * start, memory


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(tuple(range(x.dim() - 1)))


class Custom(nn.Module):
    """A function with a backward of its own, given tensors of two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(D, D), nn.Parameter(torch.randn(D)), nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        return self.b(Doubled.apply(h, self.scale) + h) + h


class Moving(nn.Module):
    """The model itself moves its tensors: on one device that makes nothing, and no gradient dense."""

    def __init__(self) -> None:
        super().__init__()
        self.update, self.head = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.head(x)
        tokens = self.update(h[:, :5]).to(h.device)
        return self.head(torch.cat([tokens, h], 1))


def gradients(model, x):
    output = model(x)
    terms = output if isinstance(output, tuple) else (output,)
    sum(term.cpu().square().sum() for term in terms).backward()
    return [None if p.grad is None else p.grad.detach().cpu().clone() for p in model.parameters()]


def built(make):
    torch.manual_seed(0)
    return make()


CROSS = {"encoder": "cpu:0", "layer": "cpu:1", "head": "cpu:0"}


@pytest.mark.parametrize(
    "make, device_map",
    [
        (Cross, CROSS),
        (Custom, {"a": "cpu:0", "scale": "cpu:1", "b": "cpu:2"}),
        (Moving, {"update": "cpu:1", "head": "cpu:0"}),
    ],
    ids=["cross", "custom", "moving"],
)
def test_equal_to_rounding(make, device_map):
    x = torch.randn(5, 7, D)
    expected = gradients(built(make), x)
    with autoshard.simulate("3x1MiB"):
        found = gradients(apply_device_map(built(make), device_map), x)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6 * float(left.abs().max()))


def test_function_transforms_run_through_a_placed_model():
    model = built(lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, 1)))
    x = torch.randn(3, D)
    expected = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
    apply_device_map(model, {"0": "cpu:0", "1": "cpu:1"})  # without simulation: both are the plain CPU
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x), expected)

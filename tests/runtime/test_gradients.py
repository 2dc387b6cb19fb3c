"""Gradients of a placed model are those of one device but for rounding: copies have a way back."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import autoshard
from autoshard import torch_private
from autoshard.runtime import apply_device_map
from autoshard.runtime.travel import source_of, travel
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
    """A function with a backward of its own, given tensors of two devices; the forward may be checkpointed."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.a, self.scale, self.reentrant = nn.Linear(D, D), nn.Parameter(torch.randn(D)), reentrant
        self.b = nn.Linear(D, D)

    def inside(self, h):
        return self.b(Doubled.apply(h, self.scale) + h) + h

    def forward(self, x):
        h = self.a(x)
        return self.inside(h) if self.reentrant is None else checkpoint(self.inside, h, use_reentrant=self.reentrant)


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
CUSTOM = {"a": "cpu:0", "scale": "cpu:1", "b": "cpu:2"}


@pytest.mark.parametrize(
    "make, device_map",
    [
        (Cross, CROSS),
        (Custom, CUSTOM),
        (lambda: Custom(False), CUSTOM),
        (lambda: Custom(True), CUSTOM),
        (Moving, {"update": "cpu:1", "head": "cpu:0"}),
    ],
    ids=["cross", "custom", "checkpoint", "reentrant", "moving"],
)
def test_equal_to_rounding(make, device_map):
    x = torch.randn(5, 7, D)
    expected = gradients(built(make), x)
    apply_function = torch.autograd.Function.apply
    with autoshard.simulate("3x1MiB"):
        found = gradients(apply_device_map(built(make), device_map), x)
    for left, right in zip(expected, found, strict=True):
        torch.testing.assert_close(right, left, rtol=1e-5, atol=1e-6 * float(left.abs().max()))
    assert torch.autograd.Function.apply == apply_function


def test_copies_share_their_bytes_and_not_their_history():
    with autoshard.simulate("2x1MiB") as devices:
        source = torch.randn(4, 3, device="cpu:0", requires_grad=True) * 2
        with torch.no_grad():
            copy = source.to("cpu:1")
        live = devices.memory("cpu:1")[0]
        first = travel(source, copy)
        second = travel(source, copy)
        assert devices.memory("cpu:1")[0] == live and second.data_ptr() == copy.data_ptr()
        assert source_of(first) is source_of(second) is source and first.grad_fn is not second.grad_fn
        first.add_(1)  # a copy that was written has history of its own
        assert source_of(first) is first and torch.equal(second.cpu(), copy.cpu())
        gone = weakref.ref(source)
        gc.disable()
        try:
            del source
            assert gone() is None and source_of(second) is second  # the history does not hold the source's memory
        finally:
            gc.enable()


def test_gradients_keep_their_layout_on_the_way():
    with autoshard.simulate("2x1MiB") as devices:
        leaf = torch.randn(4, 64, device="cpu:0", requires_grad=True)
        seen = []
        source = leaf * 1
        source.register_hook(lambda gradient: seen.append((gradient.stride(), gradient.untyped_storage().nbytes())))
        with torch.no_grad():
            copy = source.to("cpu:1")
        devices.reset_peak()
        travel(source, copy).sum().backward()
        assert seen == [((0, 0), 4)]


def test_function_transforms_run_through_a_placed_model():
    model = built(lambda: nn.Sequential(nn.Linear(D, D), nn.Linear(D, 1)))
    x = torch.randn(3, D)
    expected = torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x)
    apply_device_map(model, {"0": "cpu:0", "1": "cpu:1"})  # without simulation: both are the plain CPU
    assert torch.equal(torch.func.vmap(torch.func.grad(lambda row: model(row).sum()))(x), expected)


def test_private_torch_that_this_needs():
    """Fails here, and says so, when torch moves one of them."""
    seen = []

    class Asks(torch_private.Interceptor):
        def apply(self, function, apply, args, kwargs):
            if not function.__name__.startswith("_"):  # torch 2.11 has one for checkpoints that are not reentrant
                seen.append(function)
            return apply(*args, **kwargs)

        def recompute(self, function):
            seen.append("recompute")
            return function

    assert not torch_private.are_functions_transformed()
    assert torch.func.vmap(lambda x: x * torch_private.are_functions_transformed())(torch.ones(2)).tolist() == [1, 1]
    asks = Asks()
    torch_private.intercept(asks)
    try:
        x, weight = torch.ones(2, 2, requires_grad=True), torch.ones(2, requires_grad=True)
        Doubled.apply(x, weight)
        for reentrant in (False, True):
            checkpoint(torch.sin, x, use_reentrant=reentrant).sum().backward()
    finally:
        torch_private.release(asks)
    assert seen == [Doubled, "recompute", CheckpointFunction]
    Doubled.apply(x, weight)
    assert len(seen) == 3

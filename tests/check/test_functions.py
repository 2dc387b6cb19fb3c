"""A batch is divided around a user's autograd function if its backward keeps samples apart and is linear."""

import pytest
import torch
from torch import nn

from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload


def function(backward, forward=lambda ctx, x, *more: x * 1):
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type("Custom", (torch.autograd.Function,), members)


def rounded(x):
    return x.round()


def keep_input(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def written(ctx, grad):
    grad = grad.clone()
    grad[:, 0] = 1.0
    return grad


Straight = function(lambda ctx, grad: grad * (ctx.saved_tensors[0].abs() < 1), rounded)
Straight.setup_context = staticmethod(keep_input)
APART = {
    "reversed": function(lambda ctx, grad: -0.5 * grad),
    "the input itself": function(lambda ctx, grad: grad, lambda ctx, x: x),
    "straight through": Straight,
    "masked": function(
        lambda ctx, grad: torch.where(torch.ones(6) > 0, grad / 2, 0.0) + grad.masked_fill(torch.ones(6) > 1, 0)
    ),
    "once": function(torch.autograd.function.once_differentiable(lambda ctx, grad: grad.view(-1, 2, 3).view(-1, 6))),
}
MIXED = {
    "clipped": function(lambda ctx, grad: grad.clamp(-1e-3, 1e-3)),
    "sign": function(lambda ctx, grad: grad.sign()),
    "whole numbers": function(lambda ctx, grad: grad.to(torch.int64).to(grad.dtype)),
    "centred": function(lambda ctx, grad: grad - grad.mean(0)),
    "constant": function(lambda ctx, grad: torch.ones_like(grad)),
    "shifted": function(lambda ctx, grad: grad + 1),
    "squared": function(lambda ctx, grad: grad * grad),
    "written": function(written),
    "decided by values": function(lambda ctx, grad: grad * 2 if grad.norm() > 1 else grad),
    "unable": function(lambda ctx, grad: grad * ctx.nothing),
    "other samples": function(lambda ctx, grad: grad.flip(0)),
}


class Net(nn.Module):
    def __init__(self, custom, weight=None):
        super().__init__()
        self.first, self.last, self.custom, self.weight = nn.Linear(6, 6), nn.Linear(6, 1), custom, weight

    def forward(self, x):
        x = self.first(x)
        x = self.custom.apply(x) if self.weight is None else x @ self.custom.apply(self.weight)
        return self.last(x.tanh()).square().mean()


@pytest.mark.parametrize("name", APART)
def test_backwards_that_keep_samples_apart(name):
    assert find_batch_axis(Net(APART[name]), torch.randn(8, 6), Workload(mode="training")).size == 8


@pytest.mark.parametrize("name", MIXED)
def test_backwards_that_do_not(name):
    with pytest.raises(PlanError, match="can't be divided"):
        find_batch_axis(Net(MIXED[name]), torch.randn(8, 6), Workload(mode="training"))


def test_gradients_of_a_weight_are_of_all_samples():
    """It may bend them: those of parts would be bent one by one."""
    net = Net(APART["reversed"], nn.Parameter(torch.ones(6, 6)))
    with pytest.raises(PlanError, match="calls Custom, whose backward may mix its rows"):
        find_batch_axis(net, torch.randn(8, 6), Workload(mode="training"))

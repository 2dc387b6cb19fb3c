"""The joint record of forward and backward: gradients, what autograd saves, checkpoints, custom functions."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError
from autoshard.plan.workload import Workload
from tests.capture.helpers import bitwise, measured_peak, own_answer, predicted_peak
from tests.replay import replay

TRAINING = Workload(mode="training")
aten = torch.ops.aten


def check_training(model, inputs):
    graph = capture(model, inputs, workload=TRAINING)
    outputs, gradients = replay(graph, model, inputs)
    expected, own = own_answer(model, inputs, training=True)
    assert all(map(bitwise, outputs, expected)) and len(outputs) == len(expected)
    assert gradients.keys() == own.keys()
    assert all(bitwise(gradients[name], own[name]) for name in own)
    assert predicted_peak(graph) == measured_peak(model, inputs, training=True)
    return graph


class Mlp(nn.Module):
    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.mode = mode

    def middle(self, x):
        return self.b(torch.nn.functional.gelu(x)) * x

    def forward(self, x):
        x = self.a(self.norm(x))
        if self.mode:
            x = checkpoint(self.middle, x, use_reentrant=self.mode == "reentrant")
        else:
            x = self.middle(x)
        return self.c(x.relu_())


def test_forward_and_backward():
    graph = check_training(Mlp(), torch.randn(3, 4))
    assert graph.training and graph.phases[1] == ("backward", graph.backward_begin, len(graph.ops))
    assert all(op.backward == (op.index >= graph.backward_begin) for op in graph.ops)
    names = dict(graph.gradients)
    assert set(names) == {tensor.name for tensor in graph.tensors if tensor.trainable}
    end = len(graph.ops)
    for value in names.values():
        storage = graph.storages[graph.values[value].storage]
        assert storage.born >= graph.backward_begin and storage.died == end


@pytest.mark.parametrize("mode", ["reentrant", "plain"])
def test_checkpoints_are_recomputed_in_backward(mode):
    model, inputs = Mlp(mode), torch.randn(3, 4)
    graph = check_training(model, inputs)
    again = [call for call in graph.calls if call.backward]
    assert [call.path for call in again] == ["b"]
    assert all(op.backward for op in graph.ops[again[0].begin : again[0].end])


class Factors(nn.Module):
    """The gradients of both tables are sparse, and rows of one are what those of the other are multiplied with."""

    def __init__(self):
        super().__init__()
        self.users, self.items = nn.Embedding(9, 4, sparse=True), nn.Embedding(7, 4, sparse=True)

    def forward(self, users, items):
        return (self.users(users) * self.items(items)).sum(1)


def test_sparse_gradients():
    graph = capture(Factors(), (torch.randint(0, 9, (5,)), torch.randint(0, 7, (5,))), workload=TRAINING)
    assert {name for name, _ in graph.gradients} == {"users.weight", "items.weight"}


def test_nothing_to_train():
    model = nn.Linear(4, 4).requires_grad_(False)
    with pytest.raises(CaptureError, match="can't be trained"):
        capture(model, torch.randn(3, 4), workload=TRAINING)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(scale)
        return x.tan() * scale

    @staticmethod
    def backward(ctx, grad):
        return grad.sinh() * ctx.saved_tensors[0], None


class Places(nn.Module):
    """Results and inputs that are saved, ops in place, on views too, and what autograd doesn't see one by one."""

    def __init__(self):
        super().__init__()
        self.table, self.scale = nn.Embedding(5, 4), nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, ids):
        x = checkpoint(torch.cos, self.table(ids), use_reentrant=True)
        y = x.exp() * x
        y = y.clone().div_(x.sigmoid())
        y[1:].tanh_()
        return Scaled.apply(y, self.scale).logsumexp(0)


def test_each_op_of_a_backward_belongs_to_the_op_whose_gradient_it_computes():
    graph = check_training(Places(), torch.tensor([0, 3, 1]))
    found = {(op.target, graph.ops[op.forward].target) for op in graph.ops if op.backward and op.forward >= 0}
    assert {
        (aten.embedding_dense_backward.default, aten.embedding.default), (aten.div.Tensor, aten.div_.Tensor),
        (aten.tanh_backward.default, aten.tanh_.default), (aten.sigmoid_backward.default, aten.sigmoid.default),
        (aten.sinh.default, aten.mul.Tensor),
    } <= found  # fmt: skip
    saved = [(graph.values[save.value].op, save.op) for save in graph.saves]
    saved = [(graph.ops[made].target, graph.ops[op].target) for made, op in saved if 0 <= made < graph.backward_begin]
    exp, mul, logsumexp = aten.exp.default, aten.mul.Tensor, aten.logsumexp.default
    assert (exp, exp) in saved and (exp, mul) in saved  # what one saves as its result, the other saves as an input
    assert (logsumexp, logsumexp) in saved and (aten.sigmoid.default, aten.sigmoid.default) in saved

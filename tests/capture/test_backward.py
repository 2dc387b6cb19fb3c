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

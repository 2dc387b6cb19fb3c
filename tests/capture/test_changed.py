"""Inputs that a run writes are named, with what writes them; such a model is not cut."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.capture import capture
from autoshard.capture.changed import changed_inputs


class Held:
    """An object that holds a tensor, as caches do."""

    def __init__(self, kept):
        self.kept = kept


@dataclass
class Batch:
    x: torch.Tensor


class Inner(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.up, self.down, self.write = nn.Linear(8, 64), nn.Linear(64, 8), write

    def forward(self, x, more):
        self.write(x, more)
        return self.down(self.up(x).relu())


class Net(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.inner = Inner(write)

    def forward(self, x, more=None):
        return self.inner(x, more)


X, MORE = torch.ones(2, 8), torch.ones(2, 8)
WRITES = {
    "the tensor": (lambda x, more: x.mul_(2), None, "mul_ in inner changes input x in place"),
    "a view": (lambda x, more: x[0].view(2, 4).zero_(), None, "zero_ in inner changes input x in place"),
    "an index": (lambda x, more: x.detach().__setitem__((0, 1), 3.0), None, "changes input x in place"),
    "in a list": (lambda x, more: more[0].add_(1), [MORE], "add_ in inner changes input more.0 in place"),
    "in a dataclass": (lambda x, more: more.x.add_(1), Batch(MORE), "add_ in inner changes input more.x in place"),
    "in an object": (lambda x, more: more.kept.add_(1), Held(MORE), "a tensor inside an object that is an input"),
    "as out=": (lambda x, more: torch.exp(x.clone(), out=more), MORE, "in inner changes input more in place"),
}


@pytest.mark.parametrize("name", WRITES)
def test_inputs_that_are_written_are_named(name):
    write, more, said = WRITES[name]
    inputs = {"x": X} if more is None else {"x": X, "more": more}
    (found,) = changed_inputs(capture(Net(write), inputs))
    assert said in str(found)
    with pytest.raises(autoshard.PlanError, match=r"can't be cut.*in inner changes"):
        autoshard.plan(Net(write), ["cpu:0", "cpu:1"], inputs=inputs, strategy="column-parallel")
    assert (X == 1).all() and (MORE == 1).all()


def test_writes_that_only_training_makes_are_found_too():
    model = Net(lambda x, more: x.mul_(2) if torch.is_grad_enabled() else None)
    workload = autoshard.Workload(mode="training")
    with pytest.raises(autoshard.PlanError, match="mul_ in inner changes input x in place"):
        autoshard.plan(model, ["cpu:0", "cpu:1"], inputs={"x": X}, strategy="column-parallel", workload=workload)

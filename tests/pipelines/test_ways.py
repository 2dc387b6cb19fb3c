"""Values that decide what runs: parts that go another way are recorded too, and what can't be known is an error.

Processes run `other_ways` in `test_training.py`.
"""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.capture import record_forward
from autoshard.capture.stages import divide
from autoshard.errors import PlanError
from autoshard.pipelines.programs import write_value_guards
from autoshard.pipelines.steps import find_steps
from tests.pipelines.plans import plan_of
from tests.pipelines.rank_checks import unlike


class Masked(nn.Module):
    """Leaves the mask out where nothing is masked; one of the layers has a backward of its own, one has none."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        x = self.first(x)
        if not mask.all():
            x = x * mask.unsqueeze(-1)
        x = self.second(Doubled.apply(torch.tanh(x)))
        with torch.no_grad():
            scale = x.abs().mean(dim=(1, 2), keepdim=True)
        return self.third(x / (1 + scale))


class Doubled(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class Decides(nn.Module):
    """Runs other ops for other activations."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        return self.second(x if x.sum() > 0 else -x)


class Reads(nn.Module):
    """Asks the same of positions, which are always the same, of a buffer, and of what an input was written into."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("order", torch.arange(3))

    def forward(self, x, mask):
        written = torch.arange(3)
        written[1:] = mask[0, 1:] + 1
        for positions in (torch.arange(3), self.order, written):
            if (positions.diff() == 1).all():
                x = x + 1
        return self.layer(x)


def masked():
    torch.manual_seed(0)
    mask = torch.ones(8, 3, dtype=torch.bool)
    mask[5, :2] = False
    return Masked(), {"x": torch.randn(8, 3, 4), "mask": mask}


def squares(output):
    return output.square().mean()


def other_ways():
    """On each of two ranks: parts go their own way, gradients are kept as they are; and what decides is refused."""
    model, inputs = masked()
    reference = model(**inputs)
    squares(reference).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    autoshard.apply(model, plan_of(model, [["first"], ["second", "third"]], 2, inputs, parts=4))
    output = autoshard.schedule(model, squares).step(**inputs)
    own = {name: parameter.grad for name, parameter in model.named_parameters() if not parameter.is_meta}
    assert not unlike("gradient", own.items(), [(name, wanted[name]) for name in own])
    assert output is None or not unlike("output", [("", output)], [("", reference)])
    model, inputs = Decides(), {"x": torch.randn(4, 2, 4)}
    autoshard.apply(model, plan_of(model, [["first"], ["second"]], 2, inputs))
    with pytest.raises(PlanError, match="decides by values that it computes"):
        autoshard.schedule(model, squares).step(**inputs)


def test_what_is_the_same_in_every_run_is_not_read_again():
    model, (_, inputs) = Reads(), masked()
    graph, call_log = record_forward(model, (), inputs, grad=True)
    found = find_steps(graph, call_log, divide(graph, [["layer"], ["order"]]))
    program, value_guards = write_value_guards(found, model, torch.device("cpu"))
    assert sum(one.function is not None for one in call_log.value_guards) == 3
    assert [bool(one.result) for one in value_guards] == [True, False]
    assert [bool(value) for value in program.run((), tuple(inputs.values()))] == [True, False]

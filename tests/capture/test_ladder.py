"""Levels: what stops one, what the next does, and what errors say."""

import importlib
import re

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.call_log import Opaque
from autoshard.capture.capture import capture, record_forward
from autoshard.errors import CaptureError, SpecError
from tests.capture.helpers import bitwise, measured_peak, predicted_peak
from tests.models import by_name
from tests.replay import replay


class Branches(nn.Module):
    """Takes a branch on the value of a float."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x):
        x = self.layer(x)
        if x.sum() > 0:
            x = x * 2
        return x


BRANCH = Branches.forward.__code__.co_firstlineno + 2


@pytest.mark.parametrize("sign", [-1, 1])
def test_real_when_a_float_decides(sign):
    model = Branches()
    nn.init.eye_(model.layer.weight)
    inputs = sign * torch.ones(2, 4) * 3
    graph = capture(model, inputs)
    assert graph.level == "real"
    assert f"{__file__}:{BRANCH}" in graph.notes[0] and "level fake stopped" in graph.notes[0]
    multiplied = [op for op in graph.ops if op.target is torch.ops.aten.mul.Tensor]
    assert len(multiplied) == (sign > 0)
    assert bitwise(replay(graph, model, inputs)[0][0], model(inputs))
    assert predicted_peak(graph) == measured_peak(model, inputs, training=False)


@pytest.mark.parametrize("training", [False, True])
def test_within_autocast_nothing_is_run_for_real(training):
    """Torch keeps what it cast of the parameters, which have no values here, until autocast ends."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        workload = autoshard.Workload(mode="training", optimizer="sgd") if training else None
        graph = autoshard.capture(model, torch.ones(2, 4), workload=workload)
        assert graph.level == "fake"
        assert graph.values[graph.outputs[0]].dtype == model(torch.ones(2, 4)).dtype == torch.bfloat16


def test_invented_where_there_are_no_values():
    with torch.device("meta"):
        model = Branches()
    graph = capture(model, torch.ones(2, 4))
    assert graph.level == "invented" and model.layer.weight.is_meta
    assert any("not known was taken to be" in note and str(BRANCH) in note for note in graph.notes)
    with pytest.raises(CaptureError, match="invented"):
        replay(graph, model, torch.ones(2, 4))
    with pytest.raises(CaptureError, match="needs a model with values"):
        capture(model, torch.ones(2, 4), level="real")


def test_a_level_can_be_forced():
    model, inputs = nn.Linear(4, 4), torch.ones(2, 4)
    graphs = [capture(model, inputs, level=level) for level in ("fake", "real", "invented")]
    assert [graph.level for graph in graphs] == ["fake", "real", "invented"]
    assert len({tuple(op.target for op in graph.ops) for graph in graphs}) == 1
    assert len({predicted_peak(graph) for graph in graphs}) == 1
    with pytest.raises(CaptureError, match=re.escape(f"{__file__}:{BRANCH}")):
        capture(Branches(), inputs, level="fake")
    with pytest.raises(SpecError, match="unknown capture level"):
        capture(model, inputs, level="guess")


@pytest.mark.parametrize(
    "inputs, said",
    [
        (torch.ones(2, 5), "shapes cannot be multiplied"),
        ((), "missing 1 required positional argument"),
        ({"y": torch.ones(2, 4)}, "unexpected keyword argument 'y'"),
        (3, "must be a tensor, a tuple"),
    ],
    ids=["shape", "none", "name", "type"],
)
def test_inputs_that_do_not_fit(inputs, said):
    with pytest.raises(CaptureError) as error:
        capture(Branches(), inputs)
    message = str(error.value)
    assert said in message and "Branches" in message and "\n" not in message and len(message) < 800


class Force(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(5, 1)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).tanh().sum(), x)


def test_a_forward_that_differentiates():
    assert capture(Force(), torch.ones(2, 5)).level == "fake"
    with pytest.raises(CaptureError, match="can be placed"):
        capture(Force(), torch.ones(2, 5), composite=True)


@pytest.mark.parametrize("failing", [False, True])
def test_a_run_that_stops_in_a_module_with_hooks_keeps_none_of_its_tensors(failing):
    """Torch calls the forward of such a module in a closure that has the arguments while there is a traceback."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 4) if failing else Branches())
    model[1].register_forward_hook(lambda module, args, output: output)
    if not failing:
        assert capture(model, torch.ones(2, 4)).level == "real"
        return
    with pytest.raises(CaptureError, match="shapes cannot be multiplied") as refused:
        capture(model, torch.ones(2, 4))
    assert any("in forward" in note for note in refused.value.__cause__.__notes__)


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_scripts_are_refused():
    scripted = torch.jit.trace(nn.Linear(5, 5), torch.ones(2, 5))
    with pytest.raises(CaptureError, match="1 is TorchScript"):
        capture(nn.Sequential(nn.Linear(5, 5), scripted), torch.ones(2, 5))


class Routed(nn.Module):
    """Each token goes to two of four experts, which run only if somebody comes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 4)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x):
        chosen = self.router(x).topk(2).indices
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).any(-1).nonzero().squeeze(1)
            if len(rows):
                out[rows] += expert(x[rows])
        return out


def test_invented_routing_is_even():
    with torch.device("meta"):
        model = Routed(1 << 15)  # 16 GiB
    graph = capture(model, torch.ones(8, 1 << 15))
    assert graph.level == "invented" and any("even" in note for note in graph.notes)
    loads = [graph.values[call.inputs[0]].shape[0] for call in graph.calls if call.path.startswith("experts")]
    assert loads == [4, 4, 4, 4]
    assert capture(Routed(4), torch.randn(8, 4)).level == "real"


def test_arguments_that_take_nothing_but_tensors_are_recorded():
    case = by_name("recurrent")  # its cells hand on a PackedSequence
    graph, call_log = record_forward(case.model(), (), case.example(), grad=False, real=True)
    assert graph.level == "real" and any(isinstance(call.args, Opaque) for call in call_log.calls.values())


class Scan(nn.Module):
    """A layer that takes a sequence token by token."""

    def forward(self, x):
        state = x[:, 0]
        for token in range(1, x.shape[1]):
            state = state * 0.5 + x[:, token]
        return x + state[:, None]


def test_loops_over_tokens_that_take_too_long_are_refused_by_the_first_of_them(monkeypatch):
    model, inputs = nn.Sequential(*[Scan() for _ in range(4)]), torch.ones(2, 100, 8)
    ops = len(capture(model, inputs).ops)
    monkeypatch.setattr(importlib.import_module("autoshard.capture.run"), "MOST_OPS", ops)
    assert len(capture(model, inputs).ops) == ops
    monkeypatch.setattr(importlib.import_module("autoshard.capture.run"), "MOST_OPS", ops // 2)
    refused = (
        rf"^0 runs {ops // 4} ops by itself, .* and 4 modules are of its kind: more than .* at most 50% of the length"
    )
    with pytest.raises(SpecError, match=refused):
        capture(model, inputs)
    with pytest.raises(SpecError, match="by itself"):
        autoshard.plan(model, "2xT4", inputs=inputs)

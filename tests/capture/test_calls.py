"""Who is told of calls of modules: hooks, which the model must neither see nor feel."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from autoshard.capture.capture import capture
from autoshard.errors import CaptureError
from autoshard.plan.workload import Workload
from tests.capture.helpers import bitwise
from tests.replay import replay


def calls(graph):
    """Of each call, in order, its path, the names of the ops that it runs itself, and the shapes of what it returns."""
    return [
        (
            call.path,
            [op.target.overloadpacket.__name__ for op in graph.ops if op.call == call.index and not op.backward],
            len(call.outputs),
        )
        for call in graph.calls
    ]


class Block(nn.Module):
    """Calls its two layers as it is told to."""

    def __init__(self, forward) -> None:
        super().__init__()
        self.first, self.second, self.way = nn.Linear(4, 4), nn.Linear(4, 4), forward

    def forward(self, x):
        return self.way(self, x)


def plain(self, x):
    return self.second(self.first(x))


LINEAR = ["t", "addmm"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_what_hooks_of_users_compute_belongs_to_the_call(mode):
    model = Block(plain)
    model.first.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
    model.first.register_forward_hook(lambda module, args, kwargs, output: output.cos(), with_kwargs=True)
    model.register_forward_pre_hook(lambda module, args: (args[0].tan(),), prepend=True)
    x = torch.randn(2, 4)
    graph = capture(model, x, workload=Workload(mode=mode))
    assert calls(graph)[:2] == [("", calls(graph)[0][1], 1), ("first", ["sin", *LINEAR, "cos"], 1)]
    assert calls(graph)[0][1][0] == "tan"
    (first,) = [call for call in graph.calls if call.path == "first"]
    assert graph.ops[first.end - 1].outputs == first.outputs
    assert bitwise(replay(graph, model, x)[0][0], model(x))


def caught(self, x):
    try:
        return self.first(x.sin())
    except ValueError:
        return self.second(x.cos())


def nested(self, x):
    try:
        raise KeyError("another")
    except KeyError:
        return caught(self, x)


@pytest.mark.parametrize("way", [caught, nested])
@pytest.mark.parametrize("where", ["hook", "pre_hook"])
def test_a_call_ends_with_the_error_that_the_model_catches(way, where):
    def fail(*_):
        raise ValueError("no")

    model = Block(way)
    if where == "hook":
        model.first.register_forward_hook(fail)
    else:
        model.first.register_forward_pre_hook(fail)
    expected = [("", ["sin", "cos"], 1), ("first", LINEAR if where == "hook" else [], 0), ("second", LINEAR, 1)]
    assert calls(capture(model, torch.randn(2, 4))) == expected


class Stop(BaseException):
    """What no hook is told of."""


def stopped(self, x):
    try:
        return self.first(x)
    except Stop:
        return self.second(x)


def test_an_error_that_no_hook_is_told_of_is_refused():
    def stop(*_):
        raise Stop

    model = Block(stopped)
    model.first.register_forward_hook(stop)
    with pytest.raises(CaptureError, match="first raises an error that the model catches and that is no Exception"):
        capture(model, torch.randn(2, 4))


def copied(self, x):
    other = copy.deepcopy(self.first)
    with torch.no_grad():
        other.weight.mul_(2)
    return other(self.first(x))


def recursive(self, x):
    return self.second(x) if x.shape[0] == 1 else torch.cat([self(x[:1]), self.first(x[1:])])


def direct(self, x):
    return self.second.forward(self.first(x))


@pytest.mark.parametrize(("way", "paths"), [
    (copied, ["", "first"]),
    (recursive, ["", "", "second", "first"]),
    (direct, ["", "first"]),
])  # fmt: skip
def test_calls_of_a_modules_own_and_of_no_others(way, paths):
    model, x = Block(way), torch.randn(2, 4)
    with torch.no_grad():
        expected = model(x)
        graph = capture(model, x)
        assert [path for path, _, _ in calls(graph)] == paths
        assert bitwise(replay(graph, model, x)[0][0], expected)


class Looks(Block):
    """Does something else if it or a layer of it has hooks."""

    def forward(self, x):
        hooked = any(module._forward_hooks or module._forward_pre_hooks for module in self.modules())
        return super().forward(x.sin() if hooked else x)


@pytest.mark.parametrize("composite", [False, True])
def test_code_that_looks_for_hooks_finds_those_of_the_user_alone(composite):
    model = Looks(plain)
    graph = capture(model, torch.randn(2, 4), composite=composite)
    assert [path for path, _, _ in calls(graph)] == ["", "first", "second"]
    assert torch.ops.aten.sin.default not in {op.target for op in graph.ops}
    model.second.register_forward_hook(lambda module, args, output: None)
    graph = capture(model, torch.randn(2, 4), composite=composite)
    assert torch.ops.aten.sin.default in {op.target for op in graph.ops}


@pytest.mark.parametrize("fused", [True, False])
def test_encoder_layers_take_the_path_that_they_take_in_eval_mode(fused):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval().requires_grad_(False)
    model = nn.Sequential(layer, nn.Linear(8, 8))
    if not fused:
        layer.linear1.register_forward_hook(lambda module, args, output: None)
    graph, forward = capture(model, torch.randn(2, 3, 8)), torch.ops.aten._transformer_encoder_layer_fwd.default
    assert (forward in {op.target for op in graph.ops}) == fused
    assert {"", "0", "1"} <= {call.path for call in graph.calls}
    assert any(call.path == "0.self_attn" for call in graph.calls) != fused


@pytest.mark.parametrize("width", [8, 9], ids=["works", "fails"])
def test_hooks_of_the_user_are_all_that_is_left(width):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model = nn.Sequential(layer, nn.Linear(width, 8))
    handle = model[1].register_forward_pre_hook(lambda module, args: None)
    with nullcontext() if width == 8 else pytest.raises(CaptureError, match=r"\(in 1\)"):
        capture(model, torch.randn(2, 3, 8))
    assert list(model[1]._forward_pre_hooks) == [handle.id]
    handle.remove()
    for module in model.modules():
        tables = (getattr(module, name) for name in vars(nn.Module()) if "hook" in name)
        assert not any(isinstance(table, dict) and table for table in tables) and "forward" not in vars(module)


def test_no_class_of_torch_calls_in_another_way_meanwhile():
    original = nn.Module.__call__

    def looks(self, x):
        assert nn.Module.__call__ is original
        return plain(self, x)

    assert calls(capture(Block(looks), torch.randn(2, 4)))

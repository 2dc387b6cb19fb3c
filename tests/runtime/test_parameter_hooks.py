"""Hooks of the user's on the gradients of parameters: they run as on the original, or are refused."""

import copy

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ApplyError
from autoshard.plan.workload import Workload
from tests.hooks import is_hooked

TRAINING = Workload(mode="training")


def hooked(seen):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    model[2].weight.register_hook(lambda gradient: gradient / gradient.norm())
    model[2].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad.norm())))
    return model


def gradients(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return [copy.deepcopy(parameter.grad).cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", ["placed", "pipeline", "data-parallel"])
def test_hooks_run_once_on_the_whole_gradient(strategy):
    x, expected_calls, calls = torch.randn(8, 8), [], []
    expected = gradients(hooked(expected_calls), x)
    model = hooked(calls)
    with autoshard.simulate("2x64MiB") as devices:
        plan = {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"}
        if strategy != "placed":
            parts = {"num_microbatches": 2} if strategy == "pipeline" else {}
            asked = {"strategy": strategy, "objective": "throughput", "workload": TRAINING}
            plan = autoshard.plan(model, devices, inputs=x, **asked, **parts)
        autoshard.apply(model, plan)
        torch.testing.assert_close(gradients(model, x), expected)
        assert calls == pytest.approx(expected_calls)
        autoshard.remove(model)
    torch.testing.assert_close(gradients(model, x), expected)
    assert len(calls) == 2


def test_a_hook_on_a_cut_parameter_is_refused():
    x, model = torch.randn(8, 8), hooked([])
    before = [parameter.clone() for parameter in model.parameters()]
    with autoshard.simulate("2x64MiB") as devices:
        plain = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        plan = autoshard.plan(plain, devices, inputs=x, strategy="column-parallel", objective="memory")
        assert plan.cuts
        with pytest.raises(ApplyError, match=r"2\.weight has a hook on its gradient"):
            autoshard.apply(model, plan)
    assert not autoshard.runtime.is_applied(model)
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


def test_nothing_stays_where_apply_fails_after_the_move(monkeypatch):
    x, model = torch.randn(8, 8), hooked([])

    def fail(*given):
        raise RuntimeError("no page-locked memory")

    with autoshard.simulate("2x64MiB"):
        monkeypatch.setattr("autoshard.runtime.streaming.Streams.pin", fail)
        with pytest.raises(RuntimeError, match="page-locked"):
            autoshard.apply(model, {"0": "cpu:0", "1": "cpu:0", "2": "cpu:1"})
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert not is_hooked(model)
    model(x)

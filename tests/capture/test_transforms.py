"""Modules that are called inside transforms of `torch.func`: recorded, placed and cut as elsewhere."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.plan.workload import Workload
from tests.replay import replay

DEVICES = {"cpu:0": "1MiB", "cpu:1": "1MiB"}


class Ensemble(nn.Module):
    """All members at once, by `vmap` over their stacked parameters."""

    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(3))

    def forward(self, x):
        tables = [dict(member.named_parameters()) for member in self.members]
        stacked = {name: torch.stack([table[name] for table in tables]) for name in tables[0]}
        return vmap(lambda own: functional_call(self.members[0], own, (x,)))(stacked).mean(0)


class Forces(nn.Module):
    """The derivative of what a module gives, in the forward."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return vmap(grad(lambda row: self.energy(row).sum()))(x)


def test_calls_inside_vmap_are_recorded():
    for model in (Ensemble(), Forces()):
        x = torch.randn(4, 6)
        graph = autoshard.capture(model, x)
        (found,), _ = replay(graph, model, {"x": x})
        torch.testing.assert_close(found, model(x), rtol=0, atol=0)
    assert any(call.path == "energy.0" for call in graph.calls)


def test_members_on_several_devices():
    torch.manual_seed(0)
    model, x = Ensemble(), torch.randn(4, 6)
    expected = model(x).detach()
    for placed in ({"members.0.0": "cpu:1", "members.0.2": "cpu:0", "members.1": "cpu:1", "members.2": "cpu:0"}, None):
        plan = placed or autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
        with autoshard.simulate(DEVICES):
            autoshard.apply(model, plan)
            torch.testing.assert_close(model(x).detach().cpu(), expected)
            autoshard.remove(model)


def test_rows_of_an_ensemble():
    """Who mixes rows is looked for among modules whose outputs may live only inside of a transform."""
    assert find_batch_axis(Ensemble(), torch.randn(4, 6), Workload())

    class Mixed(Ensemble):
        def forward(self, x):
            return super().forward(x) - x.mean(0)

    with pytest.raises(autoshard.PlanError, match="mixes its rows"):
        find_batch_axis(Mixed(), torch.randn(4, 6), Workload())

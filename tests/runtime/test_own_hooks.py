"""Hooks of the user's own on modules that are cut: they see what they would see of the whole model."""

import pytest
import torch
from torch import nn

import autoshard

DEVICES = {"cpu:0": "1MiB", "cpu:1": "1MiB"}


class Kept(nn.Module):
    """A forward hook keeps what an inner layer made, and a later layer is given it."""

    def __init__(self, change):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)
        self.kept = {}
        self.first.register_forward_hook(lambda layer, args, output: self.kept.update(first=output))
        self.second.register_forward_hook(lambda layer, args, output: change(output))

    def forward(self, x):
        made = self.second(self.first(x).relu())
        return self.last(torch.cat([self.kept["first"], made], -1))


@pytest.mark.parametrize(
    "change", [lambda out: None, lambda out: 2 * out, lambda out: out.flip(-1), lambda out: out.T.T]
)
def test_a_hook_that_keeps_or_changes_the_output_of_a_cut_layer(change):
    torch.manual_seed(0)
    model, x = Kept(change), torch.randn(3, 8)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert {path for cut in plan.cuts for path in cut.blocks} >= {"first", "last"}
    expected = model(x).detach()
    with autoshard.simulate(DEVICES):
        autoshard.apply(model, plan)
        found = model(x).detach().cpu()
        autoshard.remove(model)
    torch.testing.assert_close(found, expected)

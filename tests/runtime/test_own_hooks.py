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
        self.first.register_forward_hook(self.keep)
        self.second.register_forward_hook(lambda layer, args, output: change(output))

    def keep(self, layer, args, output):
        self.kept["first"] = output

    def forward(self, x):
        made = self.second(self.first(x).relu())
        return self.last(torch.cat([self.kept["first"], made], -1))


@pytest.mark.parametrize("change", [lambda out: 2 * out, lambda out: out.flip(-1)], ids=["doubled", "flipped"])
def test_a_hook_that_keeps_or_changes_the_output_of_a_cut_layer(change):
    torch.manual_seed(0)
    model, x = Kept(change), torch.randn(3, 8)
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    cut = {f"{block}.{shard.name}".lstrip(".") for cut in plan.cuts for block in cut.blocks for shard in cut.shards}
    assert cut & {"first.weight", "second.weight", "last.weight"}
    expected = model(x).detach()
    with autoshard.simulate(DEVICES):
        autoshard.apply(model, plan)
        found = model(x).detach().cpu()
        autoshard.remove(model)
    torch.testing.assert_close(found, expected)


def test_what_a_hook_keeps_in_another_object_than_its_model_is_not_cut():
    """A rank is followed on a copy of the model; what a closure fills is not in it, so nothing can be said of it."""
    model, x = Kept(lambda out: None), torch.randn(3, 8)
    kept = model.kept
    model.first._forward_hooks.clear()
    model.first.register_forward_hook(lambda layer, args, output: kept.update(first=output))
    plan = autoshard.plan(model, DEVICES, inputs=x, strategy="column-parallel", objective="memory")
    assert not plan.cuts

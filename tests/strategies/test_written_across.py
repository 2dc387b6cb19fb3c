"""Stages of models that write over their boundaries run in one process."""

import copy

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Workload
from autoshard.errors import PlanError

WORKLOAD = Workload(batch_size=8)


class Rescales(nn.Module):
    """Writes weights of its blocks in its first call, from outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.rescaled = False

    def forward(self, x):
        if not self.rescaled:
            for number, block in enumerate(self.blocks):
                block.weight.detach().div_(2**number)
            self.rescaled = True
        for block in self.blocks:
            x = block(x).relu()
        return x


class Adds(nn.Module):
    """Adds what its last block makes to what its first one made, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        first = self.first(x)
        second = self.second(first).relu()
        first += self.third(second)
        return first, second


@pytest.mark.parametrize("kind", [Rescales, Adds])
def test_stages_write_into_what_other_stages_have(kind):
    model, inputs = kind().eval(), (torch.randn(8, 8),)
    original = copy.deepcopy(model)
    if kind is Rescales:
        with pytest.raises(PlanError, match=r"writes into blocks\.0\.weight.*call the model before"):
            autoshard.plan(model, "2x16MiB", inputs=inputs, strategy="pipeline", num_microbatches=4)
        model(*inputs)  # the copy does so in its own first call
    sizes = {"cpu:0": "16MiB", "cpu:1": "16MiB"}
    options = {"inputs": inputs, "strategy": "pipeline", "num_microbatches": 4, "workload": WORKLOAD}
    plan = autoshard.plan(model, sizes, **options)
    assert len(set(plan.placements.values())) == 2
    with autoshard.simulate("2x16MiB"), torch.no_grad():
        autoshard.apply(model, plan)
        for _ in range(2):
            torch.testing.assert_close(model(*inputs), original(*inputs))
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor.cpu(), original.state_dict()[name], rtol=0, atol=0)

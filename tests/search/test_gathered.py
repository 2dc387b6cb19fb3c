"""Which layers of a plan for processes are gathered as one."""

import torch
from torch import nn

import autoshard
from autoshard.plan.workload import Workload
from tests.blocks import Block


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts, self.layers = nn.ModuleList(Block(8) for _ in range(3)), nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return sum(expert(x) for expert in self.experts)


def test_what_may_be_skipped_is_not_gathered_on_its_own():
    plan = autoshard.plan(
        Experts(), {"cpu:0": "1GiB", "cpu:1": "1GiB"}, inputs={"x": torch.randn(4, 8)}, launch="processes",
        mesh="fsdp=2", workload=Workload(mode="training"),
    )  # fmt: skip
    assert plan.gathered == ("layers.0", "layers.1")

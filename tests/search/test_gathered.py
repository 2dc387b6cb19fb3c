"""Which layers of a plan for processes are gathered as one, and which inputs say how many samples there are."""

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


class Shared(nn.Module):
    """Layers of which all but the first have a matrix in common."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block(8) for _ in range(4))
        for layer in self.layers[2:]:
            layer.up = self.layers[1].up

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Sorted(Shared):
    """Rows are sorted, taken apart by groups, and put back."""

    def forward(self, x):
        x = super().forward(x)
        order = x.sum(1).argsort()
        parts = [part * (place + 1) for place, part in enumerate(x[order].split(2))]
        return torch.zeros_like(x).index_add(0, order, torch.cat(parts))


def plan_of(model, **wishes):
    return autoshard.plan(
        model, {"cpu:0": "1GiB", "cpu:1": "1GiB"}, inputs={"x": torch.randn(4, 8)}, launch="processes",
        mesh="fsdp=2", workload=Workload(mode="training"), **wishes,
    )  # fmt: skip


def test_what_may_be_skipped_is_not_gathered_on_its_own():
    assert plan_of(Experts()).gathered == ("layers.0", "layers.1")


def test_layers_that_share_a_module_are_not_gathered_on_their_own():
    assert plan_of(Shared()).gathered == ("layers.0",)


def test_a_batch_that_is_taken_apart_is_priced():
    assert plan_of(Sorted(), assume_independent_rows=True).mesh.data == 2

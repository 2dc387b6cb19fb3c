"""Which layers of a plan for processes are gathered as one, and which inputs say how many samples there are."""

from unittest import mock

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload
from autoshard.search.asked import completed
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


class Listed(nn.Module):
    """Layers that are lists of modules, given in a dict; beside its output there is a number."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList((nn.Linear(8, 16), nn.Linear(16, 8))) for _ in range(3))

    def forward(self, given):
        x = given["x"]
        for up, down in self.layers:
            x = x + down(up(x).relu())
        return {"x": x, "layers": len(self.layers)}


def plan_of(model, mesh="fsdp=2", inputs=None, **wishes):
    return autoshard.plan(
        model, {"cpu:0": "1GiB", "cpu:1": "1GiB"}, inputs=inputs or {"x": torch.randn(4, 8)}, launch="processes",
        mesh=mesh, workload=Workload(mode="training"), **wishes,
    )  # fmt: skip


def test_a_list_of_modules_is_not_gathered_since_nobody_calls_it():
    assert plan_of(Listed(), inputs={"given": {"x": torch.randn(4, 8)}}).gathered == ()


def test_a_small_last_matrix_does_not_decide_how_many_ranks_there_may_be():
    """Three columns of the last matrix are no even shares; of a model without layers it is a part of the one block."""
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    assert plan_of(model, "tp=2", {"input": torch.randn(4, 8)}).mesh.tp == 2


def test_what_may_be_skipped_is_not_gathered_on_its_own():
    assert plan_of(Experts()).gathered == ("layers.0", "layers.1")


def test_layers_that_share_a_module_are_not_gathered_on_their_own():
    assert plan_of(Shared()).gathered == ("layers.0",)


def test_a_batch_that_is_taken_apart_is_priced():
    assert plan_of(Sorted(), assume_independent_rows=True).mesh.data == 2


class Written(Shared):
    """A forward writes into a parameter, or into a buffer, which is not made of samples."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layers = kind, nn.ModuleList(Block(8) for _ in range(4))
        self.decayed = nn.Parameter(torch.ones(8), requires_grad=False)
        self.register_buffer("counted", torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            (self.decayed if self.kind == "parameter" else self.counted).mul_(0.9)
        return super().forward(x) * self.decayed * self.counted.clone()


@pytest.mark.parametrize("mesh", ["fsdp=2", "tp=2", "pp=2"])
def test_a_forward_that_writes_into_a_parameter_is_refused(mesh):
    """Processes gather what they train for its use, and let go of it; parts of a batch would write several times."""
    with pytest.raises(PlanError, match="mul_ in the model itself writes into decayed: processes shard"):
        plan_of(Written("parameter"), mesh)


def test_micro_batches_of_stages_write_no_buffer():
    model, inputs = Written("buffer"), {"x": torch.randn(4, 8)}
    assert plan_of(model).mesh.data == 2
    plan = plan_of(model, "pp=2", micro_batch=1)
    assert plan.num_microbatches == 4
    with (
        mock.patch("autoshard.runtime.launched.count_processes", lambda: 2),
        pytest.raises(PlanError, match="the forward writes into counted, and each part of the batch would"),
    ):
        completed(model, plan, inputs)

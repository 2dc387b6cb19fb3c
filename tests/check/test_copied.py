"""Models that keep tensors with a history, which proofs copy and run several times."""

import pytest
import torch
from torch import nn

from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload


class Keeping(nn.Module):
    """Keeps what its layers made, with its history, in a dict of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.kept = {"made": []}

    def forward(self, x):
        self.kept["made"] = []
        for layer in self.layers:
            x = layer(x).tanh()
            self.kept["made"].append(x)
        return x


def test_a_model_that_kept_what_it_made_with_gradients():
    model, x = Keeping(), torch.randn(4, 6)
    kept = model(x)  # only leaves can be copied deeply
    with pytest.raises(PlanError, match=r"kept\.made\.0 in the model itself is set by every forward"):
        find_batch_axis(model, x, Workload())
    assert model.kept["made"][-1] is kept


class Cached(nn.Module):
    """Makes a table of a parameter at its first forward in eval mode, and keeps it."""

    def __init__(self):
        super().__init__()
        self.biases, self.layer, self.table = nn.Parameter(torch.randn(6)), nn.Linear(6, 6), None

    def forward(self, x):
        if self.training or self.table is None:
            self.table = self.biases.exp()
        return self.layer(x) + self.table


def test_a_history_that_two_forwards_share_is_told():
    model, x = Cached(), torch.randn(4, 6)
    assert find_batch_axis(model.eval(), x, Workload())
    with pytest.raises(PlanError, match="table in the model itself is set by every forward"):
        find_batch_axis(model.train(), x, Workload(mode="training"))
    model = Cached().eval()
    with pytest.raises(PlanError, match="table in the model itself is set by every forward"):
        find_batch_axis(model, x, Workload(mode="training"))

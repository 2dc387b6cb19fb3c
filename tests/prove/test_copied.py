"""The copy of a model that a proof runs."""

import torch
from torch import nn

from autoshard.prove.batch import find_batch_axis
from autoshard.workload import Workload


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
    expected = find_batch_axis(model, x, Workload())
    kept = model(x)  # only leaves can be copied deeply
    assert find_batch_axis(model, x, Workload()) == expected
    assert model.kept["made"][-1] is kept

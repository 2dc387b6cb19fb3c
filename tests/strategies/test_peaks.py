"""What intervals of units hold at most: as the exact estimate says of every placement."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.profile.units import find_units
from autoshard.strategies.peaks import find_peaks
from autoshard.strategies.placing import check
from autoshard.strategies.problem import make_problem
from autoshard.strategies.solve import solve
from autoshard.strategies.units import chain_from_profile
from autoshard.workload import Workload


class Loop(nn.Module):
    """A residual block called twice, a value that is read far from where it is made, and a result that goes home."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.block = nn.Linear(8, 64), nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64))
        self.last = nn.Linear(64, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        begun = self.first(x)
        h = begun + self.block(begun)
        return self.last(h + self.block(h) * begun)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("names", [("cpu:0", "cpu:1", "cpu:2"), ("cuda:0", "cpu", "cuda:1")])
def test_peaks_are_those_of_the_exact_estimate(mode: str, names: tuple[str, ...]) -> None:
    profile = autoshard.profile(Loop(), torch.zeros(32, 8), workload=Workload(batch_size=32, mode=mode))
    cluster, units = parse_devices(dict.fromkeys(names, "1GiB")), find_units(profile)
    chain = chain_from_profile(profile, cluster, units=units)
    peaks, problem, some = find_peaks(profile, cluster.devices, units), make_problem(chain), solve(chain)
    assert some is not None and problem is not None and problem.size == 4
    for one in range(1, 4):
        for other in range(one, 4):
            stages = [(0, one, 0), (one, other, 1), (other, 4, 2)]
            assignment = problem.assignment(stages)
            found = check(profile, cluster, units, chain, replace(some, assignment=assignment), "memory")
            for low, high, at in stages:
                row = found.estimate.devices[at]
                if low < high:
                    held = peaks.table(at, problem.position)[0][low, high]
                    assert held == row.peak_bytes - row.overhead_bytes, (stages, at)

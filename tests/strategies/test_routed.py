"""Experts in a list: a run calls those that its tokens were sent to, and the price is that of any tokens."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import price
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile

WIDTH, INNER, EXPERTS, CHOSEN, LAYERS = 1024, 4096, 16, 2, 2


class Mixture(nn.Module):
    """Experts as modules of their own, each called with the rows that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).topk(CHOSEN)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if row.numel():
                out.index_add_(0, row, expert(x[row]) * weight[row, place, None])
        return out


@pytest.fixture(scope="module")
def profile() -> Profile:
    with torch.device("meta"):
        model = nn.Sequential(*(Mixture() for _ in range(LAYERS)))
    return autoshard.profile(model, torch.randn(1, WIDTH), workload=Workload())


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    cluster = parse_devices("1xRTX4090,cpu=16GiB")
    alone = {"overhead_bytes": 0, "launch_seconds": 3e-6}  # with little host time of the ops between experts
    return replace(cluster, devices=tuple(replace(device, **alone) for device in cluster.devices))


def placed(profile: Profile, cluster: Cluster, on_cpu: list[int]) -> float:
    """Seconds of the CPU where it has these experts of the first layer."""
    placements = {"": "cuda:0", **{f"0.experts.{i}": "cpu" for i in on_cpu}}
    plan = Plan(
        strategy="draft", objective="latency", workload=profile.workload, devices=(), placements=placements
    )  # fmt: skip
    figures = price(plan, profile, cluster)
    return next(device.compute_seconds for device in figures.devices if device.name == "cpu")


def test_every_expert_costs_the_same_whichever_was_called(profile: Profile, cluster: Cluster) -> None:
    whole = placed(profile, cluster, list(range(EXPERTS)))
    half = [placed(profile, cluster, numbers) for numbers in ([*range(8)], [*range(8, 16)], [*range(0, 16, 2)])]
    assert half == pytest.approx([whole / 2] * 3, rel=0.01)
    assert placed(profile, cluster, [3]) == pytest.approx(whole / EXPERTS, rel=0.01)  # rows are weighted where they are

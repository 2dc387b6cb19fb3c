"""Models that decide by values of their activations are cut as the same model without values is; others stay whole."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from tests.check.leaks import Stack


class Expert(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24))


class Experts(nn.Module):
    """Each expert is a module, called with the tokens that chose it, if any did."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(24, 4), nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        made = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == number)
            if len(rows):
                made.index_add_(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return made.view(x.shape)


class Fused(nn.Module):
    """All experts are computed by one module: how often it calls matmul is decided by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.proj = nn.Linear(24, 4), nn.Linear(24, 24)
        self.up, self.down = (nn.Parameter(torch.randn(4, *shape) / 6) for shape in ((24, 48), (48, 24)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.proj(x).flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1, keepdim=True)
        made = torch.zeros_like(tokens)
        for number in range(4):
            mine = chosen[:, 0] == number
            if mine.any():
                made[mine] = F.relu(tokens[mine] @ self.up[number]) @ self.down[number] * weight[mine]
        return made.view(x.shape)


@pytest.mark.parametrize("kind", [pytest.param(Experts, marks=pytest.mark.slow), Fused])
def test_experts_that_few_tokens_leave_out(kind):
    model = Stack(kind).eval()
    calls = [torch.randn(2, length, 24) for length in (9, 1, 2, 30)]
    with torch.no_grad():
        expected = [model(call) for call in calls]
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    plan = autoshard.plan(model, devices, inputs=calls[0], strategy="column-parallel", objective="memory")
    cut = {shard.name for one in plan.cuts for shard in one.shards}
    whole = {name: one.reason for one in plan.whole for name in one.names}
    if kind is Experts:
        assert {"experts.3.0.weight", "experts.3.2.weight"} <= cut
    else:
        assert cut and "blocks.0 picks elements by their values" in whole["up"]
    autoshard.apply(model, plan)
    with torch.no_grad():
        for call, wanted in zip(calls, expected, strict=True):
            torch.testing.assert_close(model(call), wanted, rtol=1e-5, atol=1e-5)

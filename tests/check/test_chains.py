"""Random chains of ops on a batch: what is divided gives the same in parts, also for other numbers of samples."""

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autoshard.check.batch import find_batch_axis
from autoshard.errors import AutoshardError
from autoshard.plan.batching import of_size
from autoshard.plan.workload import Workload
from autoshard.runtime.chunks import split
from autoshard.runtime.merging import merge

W = torch.randn(64, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
STEPS = [
    lambda x, n: x @ W[: x.shape[-1], : x.shape[-1]],
    lambda x, n: x.flatten(0, 1),
    lambda x, n: x.unflatten(0, (-1, 4)),
    lambda x, n: x.reshape(n, -1, x.shape[-1]),
    lambda x, n: x.reshape(-1, n, x.shape[-1]),
    lambda x, n: x.transpose(0, 1),
    lambda x, n: x.transpose(-1, -2),
    lambda x, n: x + W[: x.shape[-2], : x.shape[-1]],
    lambda x, n: x + W[:n, 0].view(-1, *[1] * (x.dim() - 1)),
    lambda x, n: x * W[:4, 0].repeat(n).view(-1, *[1] * (x.dim() - 1)),
    lambda x, n: x.sum(1),
    lambda x, n: x.sum(),
    lambda x, n: x.mean(),
    lambda x, n: x - x.mean(0),
    lambda x, n: x.softmax(-1),
    lambda x, n: x.cumsum(1),
    lambda x, n: torch.cat([x, 2 * x]),
    lambda x, n: torch.cat([x, W[:1, :1].expand(1, x.shape[-1])]),
    lambda x, n: x.chunk(2)[1],
    lambda x, n: x[::2],
    lambda x, n: x[:n],
    lambda x, n: x[n:],
    lambda x, n: x[:-1],
    lambda x, n: x[:, 1:],
    lambda x, n: x.unsqueeze(1).expand(x.shape[0], n, *x.shape[1:]),
    lambda x, n: x.expand(n, *x.shape),
    lambda x, n: x[torch.arange(n) % x.shape[0]],
    lambda x, n: x[torch.arange(0, len(x), 2)],
    lambda x, n: x[torch.arange(len(x)).repeat_interleave(2)],
    lambda x, n: x[torch.arange(len(x)), x.flatten(1)[:, 0].gt(0).long()],
    lambda x, n: x[torch.arange(n), torch.arange(n) % 2],
    lambda x, n: torch.zeros_like(x).index_copy_(1, torch.arange(x.shape[1]), x),
    lambda x, n: F.pad(x, (0, 0, 1, 1)),
    lambda x, n: x.repeat(2, *[1] * (x.dim() - 1)),
    lambda x, n: x.squeeze(),
    lambda x, n: x / n,
    lambda x, n: x.masked_fill(torch.ones_like(x).tril().bool(), 0.5),
]


class Chain(nn.Module):
    def __init__(self, steps) -> None:
        super().__init__()
        self.linear, self.steps = nn.Linear(6, 6).double(), steps

    def forward(self, x):
        made = self.linear(x)
        for step in self.steps:
            made = step(made, len(x))
        return {"y": made}


QUICK = (0, 1, 2, 3, 4, 17, 20)
MORE = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(40) if seed not in QUICK]


@pytest.mark.parametrize("seed", [*QUICK, *MORE])
def test_parts_are_the_whole(seed):
    torch.manual_seed(seed)
    drawn = random.Random(seed)
    made = 0
    for _ in range(30):
        model = Chain([drawn.choice(STEPS) for _ in range(drawn.randint(1, 4))])
        shape = drawn.choice([(6,), (4, 6), (2, 6)])
        try:
            model(torch.randn(4, *shape, dtype=torch.float64))
        except (RuntimeError, IndexError):  # such an op is not for such a tensor
            continue
        made += 1
        try:
            batch = find_batch_axis(model, {"x": torch.randn(4, *shape, dtype=torch.float64)}, Workload())
        except AutoshardError:
            continue
        if batch.inputs[0].dim == 0:
            for parts in ((1, 3), (2, 2), (3, 4), (2, 3, 7)):
                check(model, batch, torch.randn(sum(parts), *shape, dtype=torch.float64), parts)
        if made > 2:
            return


def check(model, batch, x, parts):
    batch = of_size(batch, len(x))
    whole = model(x)["y"]
    pieces = split(batch, model, (), {"x": x}, parts)
    found = merge(batch, [model(*piece.args, **piece.kwargs) for piece in pieces], pieces)["y"]
    torch.testing.assert_close(found, whole, equal_nan=True)

"""The profile of a part of the batch equals that of a run with so many rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.cluster.parse import parse_devices
from autoshard.engine.pricer import price
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis, BatchInput
from autoshard.plan.workload import Workload
from autoshard.profile.part import part_of_batch


class Decoder(nn.Module):
    """A mask that is made inside, a table that is expanded over the batch, and a loss over all tokens."""

    def __init__(self):
        super().__init__()
        self.table, self.places = nn.Embedding(50, 32), nn.Embedding(16, 32)
        self.mix, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids, labels):
        rows, length = ids.shape
        at = torch.arange(length, device=ids.device).expand(rows, length)
        x = self.table(ids) + self.places(at)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        mask = torch.full((length, length), -1e9).triu(1)[None, None].expand(rows, 1, length, length)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Queries(nn.Module):
    """Learned queries, the same for every row, which look at it."""

    def __init__(self):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(40, 16))
        self.norm, self.ask, self.see = nn.LayerNorm(16), nn.Linear(16, 16), nn.Linear(10, 16)

    def forward(self, x):
        asked = self.ask(self.norm(self.queries.expand(len(x), -1, -1)))
        return F.scaled_dot_product_attention(asked, *[self.see(x)] * 2)


class Relative(nn.Module):
    """A table of places that is put beside itself for every row: its heads and the rows are one dimension."""

    def __init__(self):
        super().__init__()
        self.places, self.see = nn.Parameter(torch.randn(200, 16)), nn.Linear(10, 16)

    def forward(self, x):
        heads = self.places.unflatten(-1, (4, 4)).transpose(0, 1).contiguous()
        own = self.see(x).unflatten(-1, (4, 4)).transpose(1, 2).flatten(0, 1)
        return torch.bmm(own, heads.repeat(len(x), 1, 1).transpose(1, 2)).mean(-1)


def decoder(rows):
    return {"ids": torch.randint(0, 50, (rows, 6)), "labels": torch.randint(0, 50, (rows, 6))}


def sequences(rows):
    return {"x": torch.randn(rows, 3, 10)}


def figures(profile):
    cluster = parse_devices("1x80GiB")
    plan = Plan(
        strategy="balanced", objective="latency", workload=profile.workload, devices=(),
        placements={"": cluster.names[0]},
    )  # fmt: skip
    return price(plan, profile, cluster, lower_bound_seconds=0.0).devices[0]


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("kind, make", [(Decoder, decoder), (Queries, sequences), (Relative, sequences)])
def test_a_part_costs_what_a_run_with_as_many_rows_costs(kind, make, mode):
    model, workload = kind(), Workload(mode=mode)
    batch = BatchAxis(
        size=16, inputs=tuple(BatchInput(path=name, dim=0, axis="*16") for name in make(1)), outputs=()
    )  # fmt: skip
    part = figures(part_of_batch(autoshard.profile(model, make(16), workload=workload), batch, 4))
    own = figures(autoshard.profile(model, make(4), workload=workload))
    assert part.peak_bytes == pytest.approx(own.peak_bytes, rel=2e-3)
    assert part.compute_seconds == pytest.approx(own.compute_seconds, rel=1e-3)
    for name in ("parameter_bytes", "optimizer_bytes"):
        assert getattr(part, name) == getattr(own, name)


def test_a_gradient_as_large_as_a_weight_is_divided():
    """16 rows of 2 tokens are as many as a layer reads: the gradient of what it reads is as large as its matrix's."""
    model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(3)], nn.Linear(32, 8))
    workload = Workload(mode="training", optimizer="none")
    batch = BatchAxis(size=16, inputs=(BatchInput(path="input", dim=0, axis="*16"),), outputs=())
    part = figures(part_of_batch(autoshard.profile(model, torch.randn(16, 2, 32), workload=workload), batch, 2))
    own = figures(autoshard.profile(model, torch.randn(2, 2, 32), workload=workload))
    assert part.peak_bytes == own.peak_bytes

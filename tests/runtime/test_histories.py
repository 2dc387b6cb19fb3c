"""Whatever is applied, taken off, trained, frozen, loaded and copied in whatever order: as the model on one device."""

import copy
from functools import cache

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import autoshard
from autoshard import Workload

DEVICES = {"cpu:0": "64MiB", "cpu:1": "64MiB"}
PLANS = {
    "placed": {"strategy": "balanced"},
    "cut": {"strategy": "column-parallel", "objective": "memory"},
    "replicated": {"strategy": "data-parallel"},
    "staged": {"strategy": "pipeline", "num_microbatches": 2},
}
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # in float64: sums over devices have another order


class Heads(nn.Module):
    """Attention whose heads share a norm, so that each rank has a part of its gradient; the head is the table."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(11, 16), nn.Linear(16, 11, bias=False)
        self.head.weight = self.table.weight
        self.query, self.pair, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(16, 32), nn.Linear(32, 16)
        self.first = nn.LayerNorm(16)

    def forward(self, ids):
        x = self.table(ids)
        inner = self.first(x)
        parts = (self.query(inner), *self.pair(inner).chunk(2, -1))
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(self.norm(query), self.norm(key), value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        words = self.head(x + self.down(self.up(x).relu()))
        return F.cross_entropy(words.flatten(0, 1), ids.flatten())


def ids(seed, rows=4):
    return torch.randint(11, (rows, 6), generator=torch.Generator().manual_seed(seed))


@cache
def plan(name):
    return autoshard.plan(
        Heads().double(), DEVICES, inputs=ids(0), workload=Workload(mode="training"),
        **PLANS[name],
    )  # fmt: skip


def train(model, seed):
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1)
    model.zero_grad()
    model(ids(seed)).backward()
    autoshard.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()


def freeze(model, seed):
    for index, one in enumerate(model.parameters()):
        one.requires_grad_(index == 0 or bool((seed + index) % 3))


def load(model, seed):
    torch.manual_seed(seed)
    model.load_state_dict(Heads().double().state_dict())


def copied(model, seed):
    return copy.deepcopy(model)


CHANGES = {"train": train, "freeze": freeze, "load": load, "copy": copied}
"""What is done to the model and to the one that it is compared with."""
STEP = st.tuples(st.sampled_from([*PLANS, "cut", ""]), st.sampled_from([*CHANGES, "train", "train"]), st.integers(0, 9))
"""What is applied ("": taken off), what is done then, and a seed."""


@settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)  # fmt: skip
@given(st.lists(STEP, min_size=3, max_size=6))
def test_any_history_is_that_of_one_device(history):
    torch.manual_seed(0)
    model = Heads().double()
    original, before = copy.deepcopy(model), ""
    with autoshard.simulate(DEVICES):
        for name, change, seed in history:
            if before and (not name or "cut" in (name, before)):
                autoshard.remove(model)
            if name:
                autoshard.apply(model, plan(name))
            model, original = (CHANGES[change](one, seed) or one for one in (model, original))
            with torch.no_grad():
                rows = ids(seed + 20, rows=1 + seed % 5)
                torch.testing.assert_close(model(rows).cpu(), original(rows), **TOLERANCE)
            before = name
        found = {name: one.cpu() for name, one in model.state_dict().items()}
        torch.testing.assert_close(found, original.state_dict(), **TOLERANCE)

"""How figures grow: two profiles foretell a third, ops that only some batches need included."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.profile.scaling import align, find_scaling, other_size
from autoshard.workload import Workload


class Attention(nn.Module):
    """Attention with a mask of the sequence's square; a batch of more than one takes one copy more."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.ones(ids.shape[1], ids.shape[1]).tril().log().to(x.dtype)
        weights = F.softmax(q @ k.transpose(-1, -2) + mask, -1)
        if ids.shape[0] > 1:
            weights = weights.clone()
        return self.out((weights @ v).transpose(1, 2).flatten(2))[:, :-1]


def profiled(batch: int, length: int, mode: str = "inference"):
    workload = Workload(batch_size=batch, sequence_length=length, mode=mode)
    model = Attention().train(mode == "training")
    return autoshard.profile(model, torch.zeros(batch, length, dtype=torch.long), workload=workload)


@pytest.mark.parametrize("mode", ["inference", "training"])
@pytest.mark.parametrize("base", [(1, 8), (2, 8)])
def test_two_profiles_foretell_a_third(mode, base):
    one = profiled(*base, mode)
    other = other_size(one.workload)
    assert (other.batch_size, other.sequence_length) == (3 * base[0], 4)
    scaling = find_scaling(one, profiled(other.batch_size, other.sequence_length, mode))
    assert scaling.guessed == 0 and bool(scaling.extra) == (base[0] == 1)
    third = profiled(5, 24, mode)
    at = scaling.at(5, 24, 24)
    moved = at[scaling.moved].sum() + sum(at[extra.moved] for extra in scaling.extra)
    made = at[scaling.storage].sum() + sum(at[number] for extra in scaling.extra for number, _ in extra.made)
    assert moved == sum(third.op_bytes)
    assert made == sum(storage.nbytes for storage in third.graph.storages)
    assert at[scaling.flops].sum() == sum(op.flops for op in third.graph.ops)
    assert np.array_equal(scaling.at(*scaling.sizes)[scaling.moved], one.op_bytes)


def test_models_that_run_other_ops_are_not_compared():
    class Loop(nn.Module):
        def forward(self, x):
            for _ in range(x.shape[0] ** 2):
                x = torch.cat([x, x.sin(), x.cos()])[: x.shape[0]]
            return x

    def profile(batch):
        return autoshard.profile(Loop(), torch.zeros(batch, 2), workload=Workload(batch_size=batch))

    assert find_scaling(profile(1), profile(3)) is None


def test_aligning():
    assert align("abcd" * 4, "abXcd" + "abcd" * 3)[:5] == [(0, 0), (1, 1), (-1, 2), (2, 3), (3, 4)]
    assert align("abcdefghij", "qrstuvwxyz" * 5) is None
    assert align("abc", "abcX") == [(0, 0), (1, 1), (2, 2), (-1, 3)]
    assert align("", "") == []


def test_nothing_to_vary():
    assert other_size(Workload()) is None

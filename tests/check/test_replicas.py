"""Losses that are a replica's own, as code for many GPUs has them, but are not put together of those of parts."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.check.batch import find_batch_axis
from autoshard.errors import PlanError
from autoshard.plan.workload import Workload
from autoshard.search.asked import in_size
from autoshard.search.traced import trace, why_undivided

CLASSES, SAMPLES, TOKENS = 6, 4, 5
WORK = Workload(mode="training")


class Net(nn.Module):
    """Classes of tokens; `loss`: of their logits and of two labels per token."""

    def __init__(self, loss):
        super().__init__()
        self.embed, self.head, self.loss = nn.Embedding(CLASSES, 8), nn.Linear(8, CLASSES), loss
        self.register_buffer("share", torch.rand(CLASSES))

    def forward(self, ids, labels, others):
        logits = self.head(self.embed(ids))
        return self.loss(self, logits, labels, others)


def entropy(logits, labels, **options):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


OWN = {
    "two labels": lambda net, x, a, b: entropy(x, a) + 0.3 * entropy(x.flip(-1), b),
    "mean of two": lambda net, x, a, b: torch.stack([entropy(x, a), entropy(x, b)]).mean(),
    "bounded labels": lambda net, x, a, b: entropy(x, a.clamp(0, CLASSES), ignore_index=CLASSES),
    "size of logits": lambda net, x, a, b: entropy(x, a) + 0.1 * x.logsumexp(-1).square().mean(),
    "classes weigh": lambda net, x, a, b: entropy(x, a, weight=net.share),
    "samples weigh": lambda net, x, a, b: (entropy(x, a, reduction="none") * b.flatten()).sum() / b.sum(),
    "share of what counts": lambda net, x, a, b: (
        (F.l1_loss(x, x + 1, reduction="none").mean(-1) * b).sum() / (b.sum() + 1)
    ),
    "squeezed": lambda net, x, a, b: F.mse_loss(x.mean((1, 2)).unsqueeze(1).squeeze(), a[:, 0].float()),
}
PUT_TOGETHER = {
    "from nought": lambda net, x, a, b: sum(entropy(x[:, i : i + 1], a[:, i : i + 1], reduction="sum") for i in (0, 1)),
    "the same labels": lambda net, x, a, b: entropy(x, a) + entropy(x.flip(-1), a.view(-1, TOKENS)),
    "elements weigh": lambda net, x, a, b: (F.mse_loss(x, x.detach() + 1, reduction="none").mean(-1) * b).mean(),
    "shares of classes": lambda net, x, a, b: F.cross_entropy(x.flatten(0, 1), x.detach().flatten(0, 1).softmax(-1)),
    "distances": lambda net, x, a, b: F.triplet_margin_loss(x[:, 0], x[:, 1], x.flip(-1)[:, 0], swap=True),
    "angles": lambda net, x, a, b: F.cosine_embedding_loss(x[:, 0], x[:, 1], 2 * (a[:, 0] > b[:, 0]).float() - 1),
}
MIXED = {
    "a root of a mean": lambda net, x, a, b: F.mse_loss(x, x.detach() + 1).sqrt(),
    "a product of means": lambda net, x, a, b: entropy(x, a) * x.square().mean(),
    "distances from others": lambda net, x, a, b: F.triplet_margin_loss(x[:, 0], x[:, 1], x[:, 1].roll(1, 0)),
    "margins of classes": lambda net, x, a, b: F.multi_margin_loss(x[:, 0].T, torch.arange(x.shape[-1])),
    "of all samples": lambda net, x, a, b: entropy(x - x.max(), a),
    "contrast": lambda net, x, a, b: F.cross_entropy(x.mean(1) @ x.mean(1).T, torch.arange(len(x))),
}


def reasons(loss):
    """Why replicas can't have their own samples, and why the batch can't be divided in one process."""
    ids = torch.randint(0, CLASSES, (SAMPLES, TOKENS))
    inputs, net = {"ids": ids, "labels": ids.clone(), "others": ids.clone()}, Net(loss)
    try:
        find_batch_axis(net, inputs, WORK)
        alone = ""
    except PlanError as error:
        alone = str(error)
    return why_undivided(trace(net, inputs, WORK)), alone


@pytest.mark.parametrize("name", OWN)
def test_a_replica_has_a_loss_of_its_own(name):
    replicas, alone = reasons(OWN[name])
    assert not replicas and "can't be divided" in alone


@pytest.mark.parametrize("name", PUT_TOGETHER)
def test_losses_that_are_put_together(name):
    assert reasons(PUT_TOGETHER[name]) == ("", "")


def test_a_loss_without_a_rule_is_named():
    replicas, _ = reasons(lambda net, x, a, b: F.multi_margin_loss(x[:, 0], a[:, 0]))
    assert "no rule says what multi_margin_loss does" in replicas


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_are_mixed(name):
    assert all("can't be divided" in why for why in reasons(MIXED[name]))


class TimeFirst(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(CLASSES, 8), layer, nn.Linear(8, CLASSES)

    def forward(self, ids, labels):
        made = self.layer(self.embed(ids))
        return entropy(self.head(made[0] if isinstance(made, tuple) else made), labels)


@pytest.mark.parametrize("layer", [nn.LSTM(8, 8, 2), nn.TransformerEncoderLayer(8, 2, 16)])
def test_samples_may_be_in_the_second_dimension(layer):
    """As torch's layers have them, unless they are told otherwise."""
    ids = torch.randint(0, CLASSES, (TOKENS, SAMPLES))
    traced = trace(TimeFirst(layer), {"ids": ids, "labels": ids.clone()}, replace(WORK, batch_size=4 * SAMPLES))
    assert (traced.batch_dim, traced.samples, traced.work.tokens) == (1, 4 * SAMPLES, TOKENS)
    assert not why_undivided(traced)
    mixed = TimeFirst(nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(8), nn.Unflatten(0, (TOKENS, SAMPLES)), layer))
    assert "can't be divided" in why_undivided(trace(mixed, {"ids": ids, "labels": ids.clone()}, WORK))


def test_inputs_of_another_batch_are_repeated_where_samples_are():
    x, net = torch.randn(5, 3, 8), nn.LSTM(8, 8)
    assert in_size(net, x, Workload(batch_size=7))[0].shape == (5, 7, 8)


def test_one_process_divides_the_second_dimension_of_a_loss():
    ids = torch.randint(0, CLASSES, (TOKENS, SAMPLES))
    found = find_batch_axis(TimeFirst(nn.LSTM(8, 8)), {"ids": ids, "labels": ids.clone()}, WORK)
    assert found.size == SAMPLES and {item.dim for item in found.inputs} == {1}


@pytest.mark.parametrize("layer, shape, k", [(nn.Conv2d(4, 6, 3), (2, 4, 9, 7), 36), (nn.LSTM(4, 6), (9, 2, 4), 40)])
def test_products_that_are_no_matrices_are_priced_by_their_channels(layer, shape, k):
    (op,) = (op for block in trace(layer, torch.randn(shape), WORK).work.blocks for op in block.ops if op.flops)
    assert (op.n, op.k) == (6, k) and op.flops == 2 * op.m * op.n * op.k


class Packed(nn.Module):
    """Images are cut into patches that stand one after the other, and put where tokens ask for them."""

    def __init__(self):
        super().__init__()
        self.embed, self.vision, self.head = nn.Embedding(CLASSES, 8), nn.Linear(12, 8), nn.Linear(8, CLASSES)

    def forward(self, ids, patches, labels):
        asked = ids == 0
        if asked.sum() != len(patches):
            raise ValueError("not a place for each patch")
        asked = asked.unsqueeze(-1).expand(*ids.shape, 8)
        return entropy(self.head(self.embed(ids).masked_scatter(asked, self.vision(patches))), labels)


def test_packed_patches_are_divided_on_the_users_word_alone():
    ids = torch.tensor([[0, 0, 0, 1, 2]]).repeat(SAMPLES, 1)
    inputs = {"ids": ids, "patches": torch.randn(3 * SAMPLES, 12), "labels": ids.clone()}
    settings = {"inputs": inputs, "workload": WORK, "launch": "processes", "mesh": {"fsdp": 2}}
    with pytest.raises(PlanError, match=r"packed one after the other.*assume_independent_rows=True plans it unchecked"):
        autoshard.plan(Packed(), "2xH100-80GB", **settings)
    assert autoshard.plan(Packed(), "2xH100-80GB", **settings, assume_independent_rows=True).mesh.fsdp == 2


def test_what_replicas_would_take_is_said():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3)).to("meta")
    images = torch.empty(256, 3, 64, 64, device="meta")
    plan = autoshard.plan(model, "8xH100-80GB", inputs=images, workload=WORK, launch="processes")
    said = [line for line in plan.reasons if "--assume-independent-rows" in line]
    assert plan.mesh.data == 1 and len(said) == 1 and "as dp=8" in said[0]

"""What a value was made of says nothing once something else was written into it: models that look sound but for that.

Their first inputs hide it: nothing is padded, or what is written is what stood there.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.check.test_sound import EXPERTS, Model, loop, refused, rows, ways


def labelled():
    return {"x": rows(), "labels": torch.randint(0, 6, (4, 8), generator=torch.Generator().manual_seed(1))}


def masked():
    return {"x": rows(), "mask": torch.ones(4, 6, dtype=torch.bool)}


def _loss(change):
    def by(self, x, labels):
        return F.cross_entropy(self.linear(x), change(labels), ignore_index=-100)

    return by


def _in_place(labels):
    labels = labels.clone()
    labels[labels == 0] = -100
    return labels


def _filled(labels):
    return labels.clone().masked_fill_(labels == 0, -100)


def test_labels_that_are_no_longer_those_of_an_input():
    assert ways(Model(_loss(lambda labels: labels.clone())), labelled()) == {"": "weighted"}
    for change in (_in_place, _filled):
        assert "those of parts can't be put together (cross_entropy_loss" in refused(Model(_loss(change)), labelled())


def _per_label(change):
    def by(self, x, labels):
        counts = labels != -100
        change(counts)
        losses = F.cross_entropy(self.linear(x), labels, reduction="none")
        return (losses * counts).sum() / counts.sum()

    return by


def test_counts_of_labels_of_which_some_were_taken_away():
    assert ways(Model(_per_label(lambda counts: counts)), labelled()) == {"": "weighted"}
    refusal = refused(Model(_per_label(lambda counts: counts[:, 0].zero_())), labelled())
    assert "those of parts can't be put together (div" in refusal


def test_a_sum_of_what_was_filled_afterwards():
    def by(self, x):
        shares = x[:, 0].softmax(0)[:, 0]
        total = shares.sum()
        shares.fill_(1.0)
        return self.linear(x).sum() / total

    assert "can't be divided" in refused(Model(by), rows())


@pytest.mark.parametrize("part", [lambda x: x.diagonal(), lambda x: x.transpose(0, 1).diagonal()[0]])
def test_places_of_the_batch_that_are_written_through_a_view(part):
    def by(self, x):
        made = self.linear(x).clone()
        part(made)[:] = 0
        return made

    assert "can't be divided" in refused(Model(by), rows())


def _first_does_not_count(mask):
    mask = mask.clone()
    mask[:, 0] = True
    return mask.all()


def _or_without_the_first(mask):
    answer = mask.all()
    answer |= mask[:, 1:].all()
    return answer


@pytest.mark.parametrize("question", [_first_does_not_count, _or_without_the_first])
def test_questions_about_a_mask_that_are_answered_otherwise(question):
    """A row whose first place is masked is read as a whole one alone, and masked beside another that is."""

    def by(self, x, mask):
        made = self.linear(x)
        return made if question(mask) else made * mask[..., None]

    assert "can't be divided" in refused(Model(by), masked())


def _needs_three(mask):
    hits = mask.sum((1, 2)) > 0
    hits &= mask.sum((1, 2)) > 2
    return hits.nonzero()


def _lessened(mask):
    return (mask.sum((1, 2)).sub_(2).clamp_(min=0) > 0).nonzero()


def _next(self, entries, k, turn):
    k.add_((entries[:, 0] > 0).sum()).remainder_(EXPERTS)
    return entries * (1 + float(k))


@pytest.mark.parametrize("by", [loop(hits=_needs_three), loop(hits=_lessened), loop(_next)])
def test_numbers_of_experts_that_are_written(by):
    assert "can't be divided" in refused(Model(by), rows())


@pytest.mark.parametrize(
    "loss",
    [
        lambda x, y: F.poisson_nll_loss(x, y.abs()),
        lambda x, y: F.kl_div(x, y.sigmoid(), reduction="sum"),
        lambda x, y: F.hinge_embedding_loss(x, y.sign().detach()),
        lambda x, y: F.triplet_margin_loss(x[:, None], y[None, :, None], y[None, :, None] + 1),
    ],
)
def test_losses_that_compare_each_row_with_each(loss):
    """A column against a line: torch spreads both."""

    def by(self, x):
        made = self.linear(x).mean((1, 2))
        return loss(made[:, None], x[:, 0, 0])

    assert "can't be divided" in refused(Model(by), rows())

"""Dividing calls along the batch and putting outputs together: every row comes back where it was."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from autoshard.errors import PlanError
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.runtime.chunks import count_rows, split, split_rows
from autoshard.runtime.merging import merge


class Takes(nn.Module):
    """A forward with arguments of all kinds."""

    def forward(self, ids, mask=None, *more, scale=1.0, **others):
        raise AssertionError("only its signature is looked at")


@dataclass
class Output:
    logits: torch.Tensor
    states: tuple
    name: str = "out"


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


def axis_of(*inputs, outputs=(), whole=(), size=8, plain=()):
    """A batch axis from (path, dim, axis) of inputs."""
    rows = tuple(BatchInput(path=path, dim=dim, axis=axis) for path, dim, axis in inputs)
    return BatchAxis(size=size, inputs=rows, outputs=tuple(outputs), whole=whole, plain=plain)


IDS = ("ids", 0, "*8")


def cat(path, axis="*8", dim=0):
    return BatchOutput(path=path, how="cat", dim=dim, axis=axis)


def test_nested_inputs_are_divided_and_whole_ones_are_not():
    ids, image, table = torch.arange(8), torch.arange(48).view(24, 2), torch.arange(5)
    batch = axis_of(IDS, ("others.images.0", 0, "*8x3"), whole=("more.0",), plain=("others.flags.on=True",))
    parts = split(batch, Takes(), (ids, None, table), {"images": [image], "flags": {"on": True}}, [5, 3])
    assert torch.equal(torch.cat([part.kwargs["images"][0] for part in parts]), image)
    assert [part.kwargs["images"][0].shape[0] for part in parts] == [15, 9]
    assert all(part.args[1] is None and part.args[2] is table for part in parts)
    assert all(part.kwargs["flags"] == {"on": True} for part in parts)


def test_rows_are_counted_where_only_a_multiple_is_given():
    assert count_rows(axis_of(("ids", 0, "*8x3")), {"ids": torch.zeros(12, 2)}) == 4
    assert count_rows(axis_of(("ids", 1, "*8"), ("mask", 0, "5x*8")), {"ids": torch.zeros(7, 6), "mask": None}) == 6
    with pytest.raises(PlanError, match="ids has 4, mask has 2"):
        split(axis_of(IDS, ("mask", 0, "*8")), Takes(), (torch.zeros(4), torch.zeros(2)), {}, 2)


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.sampled_from(["*{}", "*{}x3", "3x*{}", "2x*{}x2", "(*{}x2|*{})"]),
    st.integers(0, 1),
)
def test_what_was_divided_comes_back(shares, form, dim):
    """Any axis, any shares, another number of rows than at planning."""
    planned, rows = form.replace("{}", "8"), sum(shares)
    tensor = torch.arange(len_of(form, rows) * 2)
    tensor = tensor.view(-1, 2) if dim == 0 else tensor.view(2, -1)
    batch = axis_of(IDS, ("mask", dim, planned), outputs=[cat("", planned, dim)])
    parts = split(batch, Takes(), (torch.zeros(rows), tensor), {}, shares)
    pieces = [part.args[1] for part in parts]
    assert [piece.shape[dim] for piece in pieces] == [len_of(form, share) for share in shares]
    assert torch.equal(merge(batch, pieces, parts), tensor)


def len_of(form, rows):
    return {"*{}": 1, "*{}x3": 3, "3x*{}": 3, "2x*{}x2": 4, "(*{}x2|*{})": 3}[form] * rows


def test_outputs_are_nested_as_before():
    batch = axis_of(IDS, outputs=[cat("logits"), cat("states.0.0"), cat("states.0.1", "*8x2"), cat("states.1")])
    parts = split(batch, Takes(), (torch.zeros(4),), {}, 2)
    outputs = []
    for part in range(2):
        own = torch.full((2, 3), float(part))
        outputs.append(Output(own, (Pair(own + 2, torch.zeros(4)), own)))
    merged = merge(batch, outputs, parts)
    assert type(merged) is Output and type(merged.states[0]) is Pair and merged.name == "out"
    assert merged.logits.tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert merged.states[1] is merged.logits, "one tensor became two"
    assert merged.states[0].right.shape == (8,)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_and_its_gradient_are_those_of_the_whole_batch(reduction):
    logits = torch.randn(5, 7, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 11, (5, 7))
    labels[labels % 3 == 0] = -100
    labels[4] = -100  # a part without any
    how = "weighted" if reduction == "mean" else "sum"
    batch = axis_of(
        ("ids", 0, "*8"), ("others.labels", 0, "*8"),
        outputs=[BatchOutput(path="loss", how=how, weights="others.labels", skipped=1), cat("logits")],
    )  # fmt: skip

    def forward(values, labels):
        shifted = values[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return {"loss": cross_entropy(*shifted, reduction=reduction), "logits": values}

    whole = forward(logits, labels)["loss"]
    (wanted,) = torch.autograd.grad(whole, logits)
    parts = split(batch, Takes(), (logits,), {"labels": labels}, [2, 2, 1])
    merged = merge(batch, [forward(part.args[0], part.kwargs["labels"]) for part in parts], parts)
    (found,) = torch.autograd.grad(merged["loss"], logits)
    torch.testing.assert_close(merged["loss"], whole, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-15)


def test_a_loss_without_any_label_is_nan_as_in_torch():
    batch = axis_of(IDS, outputs=[BatchOutput(path="", how="weighted", weights="ids")])
    parts = split(batch, Takes(), (torch.full((4, 2), -100),), {}, 2)
    assert merge(batch, [torch.tensor(float("nan"))] * 2, parts).isnan()


def test_a_mean_is_weighted_by_rows_in_float32():
    batch = axis_of(IDS, outputs=[BatchOutput(path="", how="mean")])
    parts = split(batch, Takes(), (torch.zeros(5),), {}, 2)
    merged = merge(batch, [torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(2.0, dtype=torch.bfloat16)], parts)
    assert merged.dtype == torch.bfloat16 and merged == torch.tensor(1.4).bfloat16()


def test_targets_are_divided_as_the_rows_are():
    batch = axis_of(IDS)
    parts = split(batch, Takes(), (torch.zeros(5),), {}, [3, 2])
    first, second = split_rows({"classes": torch.arange(10), "none": None}, parts, "target")
    assert first["classes"].tolist() == [0, 1, 2, 3, 4, 5] and second["classes"].tolist() == [6, 7, 8, 9]
    with pytest.raises(PlanError, match=r"target has the shape \[3\], and the batch has 5 rows"):
        split_rows(torch.zeros(3), parts, "target")


@pytest.mark.parametrize(
    ("args", "kwargs", "parts", "words"),
    [
        ((torch.zeros(3),), {}, 4, "3 rows can't be divided into 4 parts"),
        ((torch.zeros(4), torch.zeros(4)), {}, 2, "the plan was made without the argument mask"),
        ((torch.zeros(4),), {"labels": nn.Identity()}, 2, "nobody knows how to divide others.labels, a Identity"),
        ((torch.zeros(4),), {"scale": 2.0}, 2, "was made with no other value, and this call has scale=2.0"),
        ((None,), {}, 2, "divided along ids, others.pixels, of which this call gives none"),
        ((torch.zeros(4),), {"pixels": torch.zeros(13)}, 2, "others.pixels has 13 in its dimension 0"),
        ((torch.tensor(1.0),), {}, 2, r"ids has the shape \[\]"),
        ((torch.zeros(4),), {}, [3, 2], r"4 rows, and its parts should have \[3, 2\]: 5"),
    ],
)
def test_what_can_not_be_divided_is_said(args, kwargs, parts, words):
    batch = axis_of(IDS, ("others.pixels", 0, "*8x3"))
    with pytest.raises(PlanError, match=words):
        split(batch, Takes(), args, kwargs, parts)


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        ([{"more": torch.zeros(2)}] * 2, "the output more was not there at planning"),
        ([torch.zeros(2), (torch.zeros(2),)], "can't be put together: one is a"),
        ([(torch.zeros(2), "a"), (torch.zeros(2), "b")], "1 is 'a' in one and something else"),
        ([(torch.zeros(2), 2)] * 2, "1 is 2, which may be that of the rows of a part"),
        ([(torch.zeros(2), {2}), (torch.zeros(2), {2})], "1 is a set, in which nobody knows"),
        (
            [torch.zeros(4), torch.zeros(4)],
            "the output of the model has .4, 4. in dimension 0 for parts of .2, 2. rows",
        ),
        ([torch.zeros(2, 3), torch.zeros(2, 4)], r"along dimension 0: they have the shapes \[2, 3\], \[2, 4\]"),
    ],
)
def test_outputs_nobody_knows_are_refused(outputs, words):
    batch = axis_of(IDS, outputs=[cat(""), cat("0")])
    parts = split(batch, Takes(), (torch.zeros(4),), {}, 2)
    with pytest.raises(PlanError, match=words):
        merge(batch, outputs, parts)

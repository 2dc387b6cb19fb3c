"""The algebra of axes against index arithmetic: sizes, order of what is learnt, and which index has which slice."""

import itertools
import time

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from autoshard.axes.axis import (
    Cat,
    Factor,
    concatenate,
    covers,
    cut,
    cut_out,
    describe,
    every,
    factors_of,
    fresh,
    make_unshardable,
    reshape,
    resolve,
    size_of,
    unify,
)
from autoshard.axes.walk import AxisWalk
from autoshard.capture.capture import capture
from autoshard.plan.sharding import coordinates_of, even_shares, kept

SIZES = st.sampled_from([6, 8, 12, 16, 24, 36, 48])


def divisors(size):
    return [d for d in range(1, size + 1) if size % d == 0]


@st.composite
def events(draw, kinds=("view", "cut", "pair")):
    """What ops may tell about a few axes of one size: seen as a product, cut in two, paired with each other."""
    size, count = draw(SIZES), draw(st.integers(1, 3))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        kind, which = draw(st.sampled_from(kinds)), draw(st.integers(0, count - 1))
        if kind == "view":
            major = draw(st.sampled_from(divisors(size)))
            middle = draw(st.sampled_from(divisors(size // major)))
            found.append((kind, which, (major, middle, size // major // middle)))
        elif kind == "cut":
            found.append((kind, which, draw(st.integers(1, size - 1))))
        else:
            found.append((kind, which, draw(st.integers(0, count - 1))))
    return size, count, found, draw(st.permutations(found))


def learnt(size, count, found):
    """The axes after some events."""
    axes = [fresh(size) for _ in range(count)]
    for kind, which, what in found:
        if kind == "view":
            parts = reshape([axes[which]], what, "a view")
            assert tuple(map(size_of, parts)) == what
        elif kind == "cut":
            before, after = cut(axes[which], what, "a part")
            assert (size_of(before), size_of(after)) == (what, size - what)
        else:
            unify(axes[which], axes[what], "a sum")
        assert [size_of(resolve(axis)) for axis in axes] == [size] * count
    return [resolve(axis) for axis in axes]


def divided(axes):
    """How every leaf that can be cut divides the indices of all axes: the same whatever the tree looks like."""
    found = dict.fromkeys(factor for axis in axes for factor in factors_of(axis) if not factor.unshardable)
    return {tuple(tuple(coordinates_of(describe(axis, factor))) for axis in axes) for factor in found}


def unshardable(axes):
    return any(factor.unshardable for axis in axes for factor in factors_of(axis))


@given(events(kinds=("view", "pair")))
def test_views_may_be_seen_in_any_order(case):
    size, count, found, shuffled = case
    assert divided(learnt(size, count, found)) == divided(learnt(size, count, shuffled))


@given(events(kinds=("cut", "pair")))
def test_parts_may_be_seen_in_any_order(case):
    size, count, found, shuffled = case
    axes = learnt(size, count, found)
    assert divided(axes) == divided(learnt(size, count, shuffled))
    assert not unshardable(axes)


@given(events())
def test_views_and_parts_may_be_seen_in_any_order(case):
    """Where no part cuts through the minor factor of a view: that loses both, in some orders."""
    size, count, found, shuffled = case
    axes, others = learnt(size, count, found), learnt(size, count, shuffled)
    if not unshardable(axes) and not unshardable(others):
        assert divided(axes) == divided(others)


@given(events())
def test_paired_axes_are_the_same_or_lost(case):
    size, count, found, _ = case
    axes = learnt(size, count, found)
    first, second = axes[0], fresh(size)
    unify(first, second)
    first, second = resolve(first), resolve(second)
    for factor in [factor for factor in factors_of(first) if not factor.unshardable]:
        assert describe(first, factor) == describe(second, factor)


@st.composite
def trees(draw, depth=2):
    """An axis, its leaves, and for every leaf the slice that each index is in, -1 where it is in none."""
    if depth == 0 or draw(st.integers(0, 2)) == 0:
        factor = Factor(draw(st.integers(2, 3 if depth == 0 else 5)))
        return (factor,), {factor: list(range(factor.size))}
    parts = [draw(trees(depth - 1)) for _ in range(draw(st.integers(2, 3)))]
    sizes = [size_of(axis) for axis, _ in parts]
    slices = {}
    if draw(st.booleans()):  # a product
        for place, (_, known) in enumerate(parts):
            for factor, where in known.items():
                slices[factor] = [where[index[place]] for index in itertools.product(*map(range, sizes))]
        return tuple(factor for axis, _ in parts for factor in axis), slices
    for place, (_, known) in enumerate(parts):
        for factor, where in known.items():
            slices[factor] = [-1] * sum(sizes[:place]) + where + [-1] * sum(sizes[place + 1 :])
    return (Cat([axis for axis, _ in parts]),), slices


@given(trees())
def test_an_axis_as_text_tells_the_slice_of_every_index(tree):
    axis, slices = tree
    for factor, where in slices.items():
        assert coordinates_of(describe(axis, factor)).tolist() == where
        assert covers(axis, factor) == (-1 not in where)


@given(trees(), st.data())
def test_parts_put_together_are_the_whole_bit_for_bit(tree, data):
    axis, slices = tree
    factor = data.draw(st.sampled_from(list(slices)))
    text = describe(axis, factor)
    ends = sorted(data.draw(st.lists(st.integers(0, factor.size), min_size=1, max_size=3)))
    shares = tuple(end - begin for begin, end in zip([0, *ends], [*ends, factor.size], strict=True))
    whole = torch.randn(size_of(axis), 3)
    merged = torch.full_like(whole, torch.nan)
    owners = numpy.zeros(size_of(axis), dtype=int)
    for rank in range(len(shares)):
        indices = kept(text, shares, rank)
        assert (numpy.diff(indices) > 0).all()
        owners[indices] += 1
        merged[indices] = whole[indices]
    assert torch.equal(merged, whole)
    assert owners.tolist() == [len(shares) if where < 0 else 1 for where in slices[factor]]


@given(trees(), st.data())
def test_a_part_of_an_axis_has_the_slices_of_its_indices(tree, data):
    axis, slices = tree
    at = data.draw(st.integers(1, size_of(axis) - 1))
    before, after = cut(axis, at)
    check_parts(axis, [before, after], [slice(0, at), slice(at, None)], slices)


@given(trees(), st.data())
def test_every_other_index_of_an_axis_has_their_slices(tree, data):
    axis, slices = tree
    step = data.draw(st.sampled_from(divisors(size_of(axis))[1:]))
    check_parts(axis, [every(axis, step)], [slice(None, None, step)], slices)


def check_parts(axis, parts, where, slices):
    """What can still be cut divides the indices of the parts as those of the whole."""
    for part, at in zip(parts, where, strict=True):
        assert size_of(part) == len(range(size_of(axis))[at])
        for factor in [factor for factor in factors_of(part) if not factor.unshardable]:
            expected = coordinates_of(describe(axis, factor))[at].tolist()
            assert coordinates_of(describe(part, factor)).tolist() == expected
    for factor in slices:  # what was not touched is as it was
        if factor.bound is None and not factor.unshardable:
            assert coordinates_of(describe(axis, factor)).tolist() == slices[factor]


@given(trees(), trees())
def test_axes_in_line(left, right):
    joined = concatenate([left[0], fresh(0), right[0]])
    assert size_of(joined) == size_of(left[0]) + size_of(right[0])
    for factor, where in left[1].items():
        assert coordinates_of(describe(joined, factor)).tolist() == where + [-1] * size_of(right[0])


def test_an_empty_tensor_in_another_shape_keeps_its_other_axes():
    (rows, *_, width) = given = [fresh(2), fresh(0), fresh(64)]
    made = reshape(given, (2, 1, 0, 64))
    assert made[0] == rows and made[-1] == width and list(map(size_of, made)) == [2, 1, 0, 64]
    assert list(map(size_of, reshape([fresh(0)], (2, 3, 0)))) == [2, 3, 0]


def test_what_cannot_be_divided_anew_takes_nothing_with_it():
    """Tokens that are padded and then divided into chunks, beside heads."""
    tokens, heads = concatenate([fresh(12), fresh(4)]), fresh(6)
    axes = reshape([fresh(2), tokens, heads], (2, 2, 8, 6))
    assert [[factor.unshardable != "" for factor in factors_of(axis)] for axis in axes] == [
        [False],
        [True],
        [True],
        [False],
    ]
    assert axes[-1] == heads


def test_paired_axes_lose_only_what_does_not_match():
    left, right = (*fresh(4), *fresh(9), *fresh(5)), (*fresh(6), *fresh(6), *fresh(5))
    unify(left, right, "a sum")
    assert resolve(left)[-1] is resolve(right)[-1] and not list(factors_of(left))[-1].unshardable


def test_a_split_is_known_wherever_the_leaf_is():
    rows = fresh(512)
    seen = (*fresh(2), *rows)
    heads, width = reshape([rows], (8, 64))
    assert repr(resolve(seen)[1:]) == "(8, 64)"
    assert describe(seen, heads[0]) == "2x*8x64"
    assert describe(rows, width[0]) == "8x*64"


def test_a_sequence_taken_token_by_token_is_resolved_however_long():
    axis = rest = fresh(2000)
    for _ in range(1999):
        _, rest = cut(rest, 1)
    (whole,) = resolve(axis)
    assert isinstance(whole, Cat) and len(whole.segments) == 2000


def test_elements_taken_out_by_a_loop_take_time_for_each_however_many():
    """20,000 took minutes: each cut looked at all parts that there were."""
    axis, behind = fresh(20_000), fresh(3)
    joined = concatenate([axis, behind])
    begin = time.perf_counter()
    for place in range(size_of(axis)):
        cut_out(axis, place)
        assert place % 1000 or size_of(resolve(joined)) == 20_003
    assert time.perf_counter() - begin < 10
    (whole,) = resolve(joined)
    assert whole.segments == (*[()] * 20_000, behind)


def test_a_few_elements_taken_out_leave_the_others_together():
    axis = fresh(64)
    for place in (0, 5, 63, 5):
        cut_out(axis, place)
    assert repr(resolve(axis)) == "((1|4|1|57|1),)"


def test_what_is_lost_stays_lost_when_it_is_split_or_paired():
    axis, other = fresh(12), fresh(12)
    make_unshardable(axis, "because")
    major, _ = reshape([axis], (4, 3))
    unify(axis, other)
    assert {factor.unshardable for factor in (*factors_of(major), *factors_of(other))} == {"because"}


def test_axes_without_common_parts_are_lost():
    left, right = (*fresh(4), *fresh(9)), (*fresh(6), *fresh(6))
    unify(left, right, "a sum")
    top, *rest = factors_of(left)
    assert top.size == 2 and not top.unshardable, "4 x 9 and 6 x 6 have their major 2 in common"
    assert all(factor.unshardable.startswith("a sum: sizes") for factor in (*rest, *list(factors_of(right))[1:]))


@pytest.mark.parametrize(
    "act",
    [
        lambda batch, unshardable: cut((*batch, *fresh(4)), 4),
        lambda batch, unshardable: every(batch, 2),
        lambda batch, unshardable: reshape([(*batch, *fresh(4))], (2, 12)),
        lambda batch, unshardable: unify(batch, unshardable),
        lambda batch, unshardable: unify(unshardable, batch),
        lambda batch, unshardable: unify((*batch, *fresh(4)), (*fresh(4), *batch)),
        lambda batch, unshardable: unify(batch, concatenate([fresh(2), fresh(4)])),
        lambda batch, unshardable: unify((Factor(6, rigid=True),), batch),
    ],
)
def test_a_rigid_factor_stays_one_and_is_lost_where_it_could_not(act):
    batch, unshardable = (Factor(6, rigid=True),), fresh(6)
    make_unshardable(unshardable, "it is a table")
    act(batch, unshardable)
    assert batch[0].unshardable and batch[0].bound is None and unshardable[0].bound is None


def test_a_rigid_factor_is_what_uniform_ones_become():
    batch, other = (Factor(6, rigid=True),), fresh(12)
    unify((*batch, *fresh(2)), other)
    assert resolve(other)[0] is batch[0] and not batch[0].unshardable
    assert reshape([other], (6, 2))[0] == batch


def test_an_axis_against_itself_moved_by_one_is_lost_however_long():
    tokens = fresh(5000)
    all_but_last, _ = cut(tokens, 4999)
    unify(tokens, concatenate([fresh(1), all_but_last]))
    assert any(factor.unshardable for factor in factors_of(tokens)) and size_of(tokens) == 5000
    assert all(factor.unshardable or factor.size < 2 for factor in factors_of(tokens))


@pytest.mark.parametrize(
    "text", ["", "*", "x2", "2x", "2**3", "(2", "2)", "(2|)", "(|2)", "()", "a", "2 x 3", "-1", "2|3"]
)
def test_what_is_not_an_axis_is_refused(text):
    with pytest.raises(ValueError, match="axis"):
        coordinates_of(text)


def test_shares_are_as_even_as_they_go():
    assert even_shares(7, 3) == (3, 2, 2)
    assert kept("(*4x2|1)", (1, 3), 0).tolist() == [0, 1, 8]
    assert kept("(*4x2|1)", (1, 3), 1).tolist() == [2, 3, 4, 5, 6, 7, 8]


def test_values_with_a_factor_are_found_anew_when_more_is_walked():
    layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    graph = capture(layers, torch.ones(2, 4), composite=True)
    walk = AxisWalk(graph)
    for op in graph.ops:
        walk.run(op)
        for factor in {factor for axes in walk.axes.values() for axis in axes for factor in factors_of(axis)}:
            found = {value for value, axes in walk.axes.items() if any(factor in factors_of(axis) for axis in axes)}
            assert walk.values_with(factor) == found
            assert all(bool(walk.cut_dims(value, factor)) == (value in found) for value in walk.axes)

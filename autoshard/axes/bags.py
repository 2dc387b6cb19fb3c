"""Bags of words: sums, means or largest of lines of a table, of which a bag belongs to one sample. Sound by argument.

    words    [2, 3]   0 0 0 | 1 1 1     one after the other: [6]
    offsets  [2]      0       3         where each bag begins

Argument: an element of a bag is made of lines of the table that its words choose, and of nothing else. Where the bags
are rows of as many words each, in the run with one sample more as well, a bag has the words that it would have alone.
Any other offsets, of which a bag may reach into the next sample's words, are not followed.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from autoshard.axes.sample_indices import Contents
from autoshard.axes.samples import MIXED, Samples, all_of, combine, reduce, samples
from autoshard.capture.graph import Op, name_of

if TYPE_CHECKING:
    from autoshard.axes.sample_walk import SampleWalk

_FREQUENCIES, _WEIGHTS, _LAST_OFFSET = 3, 6, 7
"""Places of arguments: divide gradients by how often a word is there, weights of words, offsets have an end."""


def bags(walk: "SampleWalk", op: Op, given: Sequence[Samples]) -> list[Samples] | None:
    """The samples of what an op makes of bags that are rows; None for any other op."""
    if name_of(op) not in ("embedding_bag", "_embedding_bag") or op.node is None:
        return None
    arguments: list[Any] = [*op.node.args, *[None] * _LAST_OFFSET]
    if op.node.kwargs or arguments[_FREQUENCIES] or arguments[_LAST_OFFSET] or not given[0].shared:
        return None
    mine, other = _row(walk.rules.contents, op), _row(Contents(walk.other), walk.other.ops[op.index])
    if not mine or mine != other:
        return None
    words = combine([given[1], *([given[3]] if arguments[_WEIGHTS] is not None else [])], given[1].shape)
    owner = reduce(words.full().reshape(-1, mine), [1])
    shapes = [walk.graph.values[value].shape for value in op.outputs]
    return [samples(shapes[0], owner, (any(words.varies), True)), *(all_of(shape, MIXED) for shape in shapes[1:])]


def _row(contents: Contents, op: Op) -> int:
    """How many words each bag has; 0 if they are not rows of as many."""
    offsets, words = contents.of(op.inputs[2]), contents.shape(op.inputs[1])[0]
    if offsets is None or not len(offsets) or words % len(offsets):
        return 0
    row = words // len(offsets)
    return row if torch.equal(offsets, torch.arange(len(offsets)) * row) else 0

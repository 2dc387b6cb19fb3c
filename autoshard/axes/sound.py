"""What keeps samples apart though the rules of ops alone do not see it. Each entry has its argument where it stands.

entries         tokens sorted by expert, or elements that a mask chooses, are worked on one by one, and put back
hits            loops over what any element of a mask chooses, experts say
same_places     places that hold the same for every sample, as those of class tokens
batch_merges    sums and means over samples, which are put together of those of parts
questions       questions about each element, which are only asked to raise an error
scattered       features in the places of their tokens, where every part asks whether it has as many of both
switches        both branches of a question whether any row is masked give a row without padding the same
bags            sums, means or largest of lines of a table, of which a bag of words belongs to one sample

    words    [2, 3]   0 0 0 | 1 1 1     one after the other: [6]
    offsets  [2]      0       3         where each bag begins

An element of a bag is made of lines of the table that its words choose, and of nothing else. Where the bags are rows of
as many words each, in the run with one sample more as well, a bag has the words that it would have alone. Any other
offsets, of which a bag may reach into the next sample's words, are not followed.
"""

from typing import Any

import torch

from autoshard.axes.axis import Axis, reshape
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.contents import Contents
from autoshard.axes.entries import Entries
from autoshard.axes.hits import Hits
from autoshard.axes.rules import broadcast
from autoshard.axes.same_places import SamePlaces
from autoshard.axes.scattered import Scattered
from autoshard.capture.graph import ModelGraph, Op, name_of


class Sound:
    """The entries that say what an op makes, for one walk."""

    def __init__(self, walk: BatchAxes) -> None:
        self.walk = walk
        self.entries = Entries(walk)
        self.hits = Hits(walk)
        self.places = SamePlaces(walk)
        self.scattered = Scattered(walk, self.entries)

    def results(self, op: Op) -> list[State] | None:
        """The states of the results of an op by an entry, with their axes; None if none of them is about it."""
        made = self.places.results(op)
        if made is None:
            made = self.hits.results(op)
        if made is None:
            made = self.scattered.results(op)
        if made is not None:
            return made
        return self.entries.results(op) or bags(self.walk, op)


_FREQUENCIES, _WEIGHTS, _LAST_OFFSET = 3, 6, 7
"""Places of arguments: divide gradients by how often a word is there, weights of words, offsets have an end."""


def bags(walk: BatchAxes, op: Op) -> list[State] | None:
    """The states of what an op makes of bags that are rows; None for any other op."""
    if name_of(op) not in ("embedding_bag", "_embedding_bag") or op.node is None:
        return None
    arguments: list[Any] = [*op.node.args, *[None] * _LAST_OFFSET]
    if op.node.kwargs or arguments[_FREQUENCIES] or arguments[_LAST_OFFSET] or walk.state(op.inputs[0]) != "shared":
        return None
    graphs = zip(walk.contents, (walk.graph, walk.other), strict=True)
    mine, other = (_row(contents, graph, graph.ops[op.index]) for contents, graph in graphs)
    words = [op.inputs[1], *([op.inputs[3]] if arguments[_WEIGHTS] is not None else [])]
    states = [walk.state(value) for value in words]
    if not mine or mine != other or "mixed" in states:
        return None
    made: list[Axis] = []
    shape = walk.graph.values[words[0]].shape

    def divide() -> None:
        (axis,) = broadcast(walk.walk, [walk.axes(value) for value in words], [shape] * len(words))
        made.extend(reshape([axis], [shape[0] // mine, mine]))

    if walk.mixes(divide):
        return None
    for value in op.outputs:
        walk.give(value, {0: made[0]} if value == op.outputs[0] else {})
    return [walk.made("apart" in states, op.outputs[0]), *["mixed"] * (len(op.outputs) - 1)]  # type: ignore[list-item]


def _row(contents: Contents, graph: ModelGraph, op: Op) -> int:
    """How many words each bag has; 0 if they are not rows of as many."""
    offsets, words = contents.of(op.inputs[2]), graph.values[op.inputs[1]].shape[0]
    if offsets is None or not len(offsets) or words % len(offsets):
        return 0
    row = words // len(offsets)
    return row if torch.equal(offsets, torch.arange(len(offsets)) * row) else 0

"""Loops over what any element of a mask chooses: experts that any token goes to. Sound by argument.

    mask [E, …]                        which tokens an expert has
    mask.sum((1, 2)) > 0               which experts have any
    for e in (…).nonzero():            the loop runs for those
        places = where(mask[e])        e's entries, which are put back in their own places (see `entries`)

Argument: an expert without tokens has no entries, and putting none back changes nothing. So a loop over those that any
token chose gives what a loop over all of them would, which works on each token alone. For that, leaving an expert out
must do no more than leave out what it puts back: runs in which few experts are chosen must compute the same, op by op,
as the run with all of them does without what the others put back. What is counted, or done to all tokens in each turn,
shows there. The numbers of experts may be used to take parts of the mask and of weights, and Python may read them,
or compare them with a given number.
"""

from dataclasses import dataclass
from typing import Any

import torch

from autoshard.axes.axis import times
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.given import reads_bits
from autoshard.axes.reshaping import COPIES, MOVES, RESHAPES
from autoshard.capture.graph import FOUND, ModelGraph, Op, name_of, sole_maker

_PARTS = ("index", "index_select", "_unsafe_index")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_COUNTS = ("sum", "any", "count_nonzero", "amax")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """One element of what was found: the expert `number`, of those of `mask`."""

    op: int
    mask: int
    number: int


class Hits:
    """The hits of a walk. `found`: what was found by ops (nonzero), by the mask that it is about."""

    def __init__(self, walk: BatchAxes) -> None:
        self.walk = walk
        self.found: dict[int, int] = {}
        self.lists, self._named = named_hits(walk.graph)

    def results(self, op: Op) -> list[State] | None:
        """The states of what an op makes of hits; None if it is no such op."""
        walk = self.walk
        if op.outputs and self.lists.get(op.outputs[0]) == op.index:
            mask = hit_mask(walk.graph, op.inputs[0])
            if mask is None or not walk.is_of_samples(mask) or times(walk.axes(mask)[0], walk.batch):
                return None
            self.found[op.index] = mask
            return ["mixed"] * len(op.outputs)
        if op.outputs and all(self.lists.get(value) in self.found or self.known(value) for value in op.outputs):
            return ["mixed"] * len(op.outputs)
        if name_of(op) in _PARTS and len(op.inputs) == 2 and self.known(op.inputs[1]):
            return self._part(op)
        return None

    def tells(self, value: int) -> bool:
        """Whether a value is a hit, or lists hits, or compares a hit with a given number."""
        op = sole_maker(self.walk.graph, value)
        if op is not None and name_of(op) in _COMPARISONS and len(op.inputs) == 1:
            value = op.inputs[0]
        return self.known(value) is not None or self.lists.get(value) in self.found

    def known(self, value: int) -> Hit | None:
        """The hit that a value is."""
        hit = self._named.get(value)
        return hit if hit is not None and hit.op in self.found else None

    def _part(self, op: Op) -> list[State] | None:
        """The part of a mask, or of weights, that an expert has."""
        assert op.node is not None
        walk, x, made = self.walk, op.inputs[0], op.outputs[0]
        index: Any = op.node.args[1]
        first = isinstance(index, (list, tuple)) and index[0] is not None and len(index) == 1
        if not first and not (name_of(op) == "index_select" and index == 0):
            return None
        axes = walk.axes(x)
        if walk.state(x) == "mixed" or walk.longer(x)[0] or times(axes[0]):
            return None
        picked = len(walk.graph.values[made].shape) - len(axes) + 1  # dimensions of the number
        walk.give(made, dict(enumerate(axes[1:], picked)))
        return [walk.state(x)]

    def tied(self, mask: int) -> Hit | None:
        """The hit of whose entries a mask tells; None if it is no part of a mask of experts."""
        graph = self.walk.graph
        while (op := sole_maker(graph, mask)) is not None:
            assert op.node is not None
            name, source = name_of(op), op.inputs[0] if op.inputs else -1
            if name == "select" and op.node.args[1] == 0:
                number: Any = op.node.args[2]
                ops = [at for at, of in self.found.items() if of == source and number in numbers_found(graph, at)]
                return Hit(op=ops[0], mask=source, number=number) if ops else None
            if name in _PARTS and len(op.inputs) == 2:
                hit = self.known(op.inputs[1])
                return hit if hit is not None and hit.mask == source else None
            if len(op.inputs) != 1 or name not in COPIES:
                return None
            mask = source
        return None


def named_hits(graph: ModelGraph) -> tuple[dict[int, int], dict[int, Hit]]:
    """(values that list hits, with the op that found them; values that are one hit), by what the run found."""
    lists: dict[int, int] = {}
    named: dict[int, Hit] = {}
    masks: dict[int, int] = {}
    for op in graph.ops:
        if not op.inputs or op.node is None or not all(sole_maker(graph, value) for value in op.outputs):
            continue
        source, name = op.inputs[0], name_of(op)
        if name == "nonzero" and FOUND in op.node.meta:
            mask = hit_mask(graph, source)
            if mask is not None:
                lists[op.outputs[0]], masks[op.index] = op.index, mask
        elif source in lists and len(op.inputs) == 1:
            numbers = numbers_found(graph, lists[source])
            if name == "unbind" and len(op.outputs) == len(numbers):
                for value, number in zip(op.outputs, numbers, strict=True):
                    named[value] = Hit(op=lists[source], mask=masks[lists[source]], number=number)
            elif name in COPIES and len(op.outputs) == 1 and graph.values[op.outputs[0]].dtype is torch.int64:
                lists[op.outputs[0]] = lists[source]
        elif source in named and len(op.inputs) == len(op.outputs) == 1 and _is_one(graph, op):
            named[op.outputs[0]] = named[source]
    return lists, named


def numbers_found(graph: ModelGraph, op: int) -> list[int]:
    """What an op found when the run was recorded."""
    node = graph.ops[op].node
    assert node is not None
    return node.meta[FOUND].flatten().tolist()


def _is_one(graph: ModelGraph, op: Op) -> bool:
    """Whether what an op makes is still the one number that it is given."""
    alone = all(torch.Size(graph.values[value].shape).numel() == 1 for value in (op.inputs[0], op.outputs[0]))
    kept = name_of(op) in COPIES | MOVES and not reads_bits(op)
    return alone and kept and not graph.values[op.outputs[0]].dtype.is_floating_point


def hit_mask(graph: ModelGraph, value: int) -> int | None:
    """The mask of which a value tells, for each line of its first dimension, whether any element is true."""
    op = sole_maker(graph, value)
    if op is None or op.node is None or len(graph.values[value].shape) != 1:
        return None
    name = name_of(op)
    if name in ("gt", "ne") and len(op.inputs) == 1 and op.node.args[1] == 0:
        op = sole_maker(graph, op.inputs[0])
        name = name_of(op) if op is not None else ""
    if op is None or op.node is None or name not in _COUNTS or len(op.inputs) != 1:
        return None
    mask = op.inputs[0]
    shape = graph.values[mask].shape
    dims: Any = op.node.args[1] if len(op.node.args) > 1 else None
    listed = [dims] if isinstance(dims, int) else list(dims or [])
    over = sorted(dim % len(shape) for dim in listed)
    rest = graph.values[op.outputs[0]].shape == shape[:1] and over == list(range(1, len(shape)))
    return mask if rest and _is_never_negative(graph, mask) else None


def _is_never_negative(graph: ModelGraph, value: int) -> bool:
    """Whether no element can be below zero, by what makes it: a sum of such is nought only if all of them are."""
    op = sole_maker(graph, value)
    if op is None or op.node is None:
        return False
    if graph.values[value].dtype is torch.bool:
        return True
    name = name_of(op)
    if name == "one_hot":
        return True
    if name == "mul" and not all(isinstance(item, torch.fx.Node) for item in op.node.args):
        return False
    passes = name in {"to", "_to_copy", "mul"} | MOVES | RESHAPES and not reads_bits(op)
    return passes and all(_is_never_negative(graph, one) for one in op.inputs)

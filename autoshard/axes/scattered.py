"""Features that are put where a mask says, one after the other, as those of images in the places of their tokens. Sound
by argument.

    mask      [2, 3]   . x x | . . x        places of two samples
    features  [3, d]     a b |     c        features of the same samples, in the order of their rows
    out       [2, 3]   . a b | . . c

    if mask.sum() != len(features): raise ValueError(…)

Argument: which feature a place is given depends on how many places come before it, in other rows as well. But every
part of the batch asks whether it has as many places as features, and raises an error if not. Where all parts pass, the
rows before a part have as many places as features, so that its first place is given its own first feature, as in the
whole. So the question has to be about this mask and as many features in two runs, it must decide nothing but whether
an error is raised, nobody may catch that error, and rows come first in the order of places and of features.
"""

from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import Any

import torch

from autoshard.axes.axis import resolve
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.entries import Entries
from autoshard.axes.given import ops_behind, origin
from autoshard.axes.reshaping import COPIES
from autoshard.capture.graph import ModelGraph, Op, name_of, sole_maker

_SPREADS = COPIES | {"expand"}
"""Ops that repeat each element as often as any other, and keep their order."""
_WHOLE = (torch.int32, torch.int64)


class Scattered:
    """What a walk knows of such questions. `_counted`: (what computes a mask, how many are true in both runs)."""

    def __init__(self, walk: BatchAxes, entries: Entries) -> None:
        self.walk, self.entries = walk, entries
        self._counted: set[tuple[Any, tuple[Fraction, ...]]] = set()

    def note(self, value: int, answer: bool) -> bool:
        """Whether the answer to a question says how many elements of a mask are true. It must be asked by all parts."""
        graph = self.walk.graph
        found = _counted(graph, value)
        base = self._base(found[0]) if found is not None and found[2] is answer else None
        if found is None or base is None:
            return False
        other = _counted(self.walk.other, value)
        assert other is not None  # it runs the same ops
        runs = zip((graph, self.walk.other), (found[1], other[1]), strict=True)
        counts = tuple(number / _repeats(run, found[0], base) for run, number in runs)
        self._counted.add((self.entries.key(base), counts))
        return True

    def results(self, op: Op) -> list[State] | None:
        """The state of what such features were put into; None for any other op."""
        name = name_of(op)
        if name not in ("masked_scatter", "masked_scatter_", "index_put", "index_put_", "_index_put_impl_"):
            return None
        if len(op.inputs) != 3 or op.node is None:
            return None
        (x, mask, source), made = op.inputs, op.outputs[0]
        base = self._base(mask)
        places_only = _is_mask_alone(self.walk.graph, op) if "index_put" in name else self._is_as_long(x, mask, made)
        if base is None or not places_only or not all(map(self._has_rows_first, (x, mask, source))):
            return None
        counts = tuple(
            Fraction(prod(run.values[source].shape)) / _repeats(run, x, base)
            for run in (self.walk.graph, self.walk.other)
        )
        if (self.entries.key(base), counts) not in self._counted or not self._is_measured(source):
            return None
        if self.walk.mixes(lambda: self.walk.walk.unify(self.walk.axes(x)[0], self.walk.axes(mask)[0])):
            return None
        self.entries.forget(op)
        self.walk.give(made, {0: self.walk.axes(x)[0]})
        return [self.walk.made(True, made)]

    def _base(self, mask: int) -> int | None:
        """The mask of which one is made by repeating each of its elements; None if it may have been written over."""
        graph = self.walk.graph
        for base in _spread_from(graph, mask):
            if self.walk.is_overwritten(base):
                return None
        if graph.values[base].dtype is not torch.bool or not self.walk.is_of_samples(base):
            return None
        behind = (value for op in ops_behind(graph, base) for value in op.inputs)
        return None if any(map(self.walk.is_overwritten, behind)) else base

    def _is_as_long(self, x: int, mask: int, made: int) -> bool:
        """Whether a mask has the dimensions of what it is laid over, and that is not repeated itself."""
        runs = (self.walk.graph, self.walk.other)
        return all(
            run.values[x].shape == run.values[made].shape and len(run.values[mask].shape) == len(run.values[x].shape)
            for run in runs
        )

    def _has_rows_first(self, value: int) -> bool:
        """Whether the elements of a value, in their order, are those of one sample after the other."""
        axes = self.walk.axes(value)
        return bool(axes) and self.walk.is_of_samples(value) and next(iter(resolve(axes[0])), None) is self.walk.batch

    def _is_measured(self, features: int) -> bool:
        """Whether code asks how many features there are."""
        graph = self.walk.graph
        *_, root = _spread_from(graph, features)
        size = prod(graph.values[features].shape)
        asked = {value for value, _ in graph.measured if prod(graph.values[value].shape) == size}
        return any(root in _spread_from(graph, value) for value in asked)


def _counted(graph: ModelGraph, value: int) -> tuple[int, Fraction, bool] | None:
    """(mask, number, answer) if a value says, by this answer, that so many elements of a mask are true."""
    op = sole_maker(graph, origin(graph, value, *COPIES, "all", "_is_all_true"))
    if op is None or op.node is None or name_of(op) not in ("eq", "ne") or len(op.inputs) != 1:
        return None
    number, source = op.node.args[1], sole_maker(graph, op.inputs[0])
    per_place = Fraction(1)
    while source is not None and source.node is not None and graph.values[source.outputs[0]].dtype in _WHOLE:
        if len(source.inputs) != 1:
            return None
        name = name_of(source)
        if name == "mul":
            times = source.node.args[1]
            if type(times) is not int or times < 1:
                return None
            per_place *= times
        elif name not in COPIES:
            break
        source = sole_maker(graph, source.inputs[0])
    if source is None or name_of(source) not in ("sum", "count_nonzero") or graph.values[source.outputs[0]].shape:
        return None
    if type(number) is not int or number < 1 or graph.values[source.inputs[0]].dtype not in (torch.bool, *_WHOLE):
        return None
    return source.inputs[0], number / per_place, name_of(op) == "eq"


def _is_mask_alone(graph: ModelGraph, op: Op) -> bool:
    """Whether `x[mask] = source` writes one line of the source into each place of a mask."""
    x, mask, source = (graph.values[value] for value in op.inputs)
    assert op.node is not None
    indices: Any = op.node.args[1]
    alone = mask.dtype is torch.bool and list(indices).index(next(filter(None, indices))) == 0
    adds = True in op.node.args[3:4]
    return alone and not adds and source.shape[1:] == x.shape[len(mask.shape) :] and len(source.shape) > 0


def _spread_from(graph: ModelGraph, value: int) -> Iterator[int]:
    """A value, and those before it of which each element was repeated as often as any other, back to a mask."""
    yield value
    while (op := sole_maker(graph, value)) is not None and name_of(op) in _SPREADS and op.inputs and not op.mutates:
        if graph.values[op.inputs[0]].dtype is not torch.bool and graph.values[value].dtype is torch.bool:
            return  # here it became a mask
        value = op.inputs[0]
        yield value


def _repeats(run: ModelGraph, value: int, base: int) -> Fraction:
    """How many elements a value has for each of a mask."""
    return Fraction(prod(run.values[value].shape), prod(run.values[base].shape))

"""What the values of one run have of the samples of a batch, as far as a walk (`batch_walk`) has come."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from autoshard.axes.axis import (
    Axis,
    Cat,
    Factor,
    covers,
    factors_of,
    local_size,
    make_unshardable,
    resolve,
    times,
    whole,
)
from autoshard.axes.contents import Contents, paired
from autoshard.axes.given import literals, plain
from autoshard.axes.rules import Axes, Rule, Seen
from autoshard.axes.walk import AxisWalk
from autoshard.capture.graph import ModelGraph, Op, written_storages

State = Literal["shared", "apart", "mixed"]
"""Of a tensor: no sample decides anything of it; each slice of the factor belongs to one sample; anything else."""


@dataclass(slots=True)
class _Axes(AxisWalk):
    """A walk that knows numbers which code alone decides, in both runs.

    `known`: indices of the present op, and whether they pick the same of every sample, whatever made them.
    """

    contents: tuple[Contents, ...] = ()
    batch: Factor | None = None
    rows: tuple[int, int] = (0, 0)
    known: dict[int, bool] = field(default_factory=dict)

    def block(self, axes: Iterable[Axis], what: str = "") -> None:
        """What is made along an axis is not the same everywhere; what it is made of may be, as a mask is of which code
        asks whether all of it is true."""
        for axis in axes:
            if axis:
                self.blocks.append((self._op, axis))
                make_unshardable(tuple(factor for factor in factors_of(axis) if factor.rigid), f"{self.why}: {what}")

    def run(self, op: Op) -> None:
        AxisWalk.run(self, op)
        unshardable = {factor for _, axis in self.blocks for factor in factors_of(axis) if not factor.rigid}
        for value in op.outputs if unshardable else ():
            if value in op.inputs:
                make_unshardable(
                    tuple(factor for axis in self.axes[value] for factor in factors_of(axis) if factor in unshardable),
                    self.why,
                )
            else:
                self.axes[value] = tuple(_without(axis, unshardable, self.why) for axis in self.axes[value])

    def paired(self, axis: Axis, index: Seen) -> Sequence[Axis] | None:
        numbers = [contents.of(index.value) for contents in self.contents]
        made = paired(resolve(axis), numbers, self.batch, self.rows)
        self.known[index.value] = self.known.get(index.value, True) and made is not None
        return made


class BatchAxes:
    """What every value of a graph has of the samples.

    Attributes:
        other: the same forward with a larger batch, which runs the same ops; `rows`, `other_rows`: of how many.
        batch: the factor of the samples; `axes`: of all values, with it.
        counts: by value, which of its dimensions are longer for a larger batch.
        overwritten: storages that any op writes into.
        cause: by mixed value, the op that first mixed samples, -1 for one from outside.
    """

    def __init__(
        self, graph: ModelGraph, other: ModelGraph, inputs: Mapping[int, Axes], batch: Factor, rows: tuple[int, int],
        table: Mapping[Any, Rule],
    ) -> None:  # fmt: skip
        self.graph, self.other, self.batch = graph, other, batch
        self.rows, self.other_rows = rows
        self.counts = _counts(graph, other)
        self.cause: dict[int, int] = {}
        self.overwritten = written_storages(graph)
        self.contents = Contents(graph, self.counts), Contents(other, self.counts)
        self.walk = _Axes(graph, table=table, contents=self.contents, batch=batch, rows=rows)
        self.walk.axes.update(inputs)
        self.rigid = [batch]
        self._states: dict[int, State] = {}
        self._sharing: dict[int, list[int]] = {}
        for value in inputs:
            self._enter(value, "apart" if self.has_batch(value) else "shared")
        self._resizes = {
            mine.index for mine, its in zip(graph.ops, other.ops, strict=True) if repr(plain(mine)) != repr(plain(its))
        }  # NaN is not equal to itself
        self._others = literals(other)

    def state(self, value: int) -> State:
        """What a value has of the samples now; weights, tables and numbers in the code depend on none."""
        if value not in self._states:
            self._enter(value, self._from_outside(value))
        return self._states[value]

    def _enter(self, value: int, state: State) -> None:
        if value not in self._states:
            self._sharing.setdefault(self.graph.values[value].storage, []).append(value)
        self._states[value] = state

    def axes(self, value: int) -> Axes:
        """The axes of a value as far as they are known now."""
        if value not in self.walk.axes:
            self.state(value)
        return tuple(map(resolve, self.walk.of(value)))

    def has_batch(self, value: int) -> bool:
        """Whether all of a tensor is divided by the batch: each element belongs to a sample."""
        return any(covers(axis, self.batch) for axis in self.axes(value))

    def longer(self, value: int) -> tuple[bool, ...]:
        """Which dimensions of a value are longer for a larger batch."""
        return self.counts.get(value) or (False,) * len(self.graph.values[value].shape)

    def is_of_samples(self, value: int) -> bool:
        """Whether every element of a value belongs to a sample of the batch."""
        return self.state(value) == "apart" and self.has_batch(value)

    def is_the_same(self, value: int) -> bool:
        """Whether a value holds the same for all samples, and for any number of them."""
        longer = enumerate(self.longer(value))
        return self.state(value) == "shared" and all(self.is_same_along(value, dim) for dim, more in longer if more)

    def is_overwritten(self, value: int) -> bool:
        """Whether any op writes into the memory of a value."""
        return self.graph.values[value].storage in self.overwritten

    def is_same_along(self, value: int, dim: int) -> bool:
        """Whether a value that depends on no sample is the same everywhere along a dimension."""
        return all(isinstance(term, Factor) and not term.unshardable for term in self.axes(value)[dim])

    def resized(self, op: Op) -> bool:
        """Whether the numbers among the arguments of an op are others for a larger batch."""
        return op.index in self._resizes

    def _from_outside(self, value: int) -> State:
        row = self.graph.values[value]
        self.give(value, {})
        mine, its = self.contents[0].literals.get(value), self._others.get(value)
        same = mine is None or its is None or torch.equal(mine, its)
        if row.shape == self.other.values[value].shape and same:
            return "shared"
        self.cause.setdefault(value, -1)
        return "mixed"

    def give(self, value: int, known: Mapping[int, Axis]) -> None:
        """Enter the axes of a value, by dimension; those that are not among them can't be cut."""
        sizes = enumerate(self.graph.values[value].shape)
        self.walk.axes[value] = tuple(known[dim] if dim in known else whole(size, "not known") for dim, size in sizes)

    def mixes(self, act: Callable[[], None]) -> bool:
        """Whether something that is done to axes mixes samples, or entries."""
        act()
        found = any(factor.unshardable for factor in self.rigid)
        for factor in self.rigid:
            factor.unshardable = ""
        return found

    def made(self, of_samples: bool, value: int) -> State:
        """The state of a value that nothing has mixed, by where its axes have the factor, and by its sizes."""
        axes, its = self.axes(value), self.other.values[value].shape
        found = sum(map(times, axes))
        slices = {self.batch: self.other_rows}
        for axis, size in zip(axes, its, strict=True):
            if times(axis, self.batch) and local_size(axis, slices) != size:
                return "mixed"
        return "shared" if not of_samples else "apart" if found == 1 else "mixed"


def _without(axis: Axis, unshardable: Collection[Factor], why: str) -> Axis:
    """The axis with factors that can't be cut in place of some."""
    made: list[Factor | Cat] = []
    for term in resolve(axis):
        if isinstance(term, Cat):
            term = Cat(_without(segment, unshardable, why) for segment in term.segments)
        elif term in unshardable:
            made += whole(term.size, why)
            continue
        made.append(term)
    return tuple(made)


def _counts(graph: ModelGraph, other: ModelGraph) -> dict[int, tuple[bool, ...]]:
    """Which dimensions of each value are longer for a larger batch."""
    return {
        index: tuple(left != right for left, right in zip(mine.shape, its.shape, strict=False))
        for index, (mine, its) in enumerate(zip(graph.values, other.values, strict=False))
        if mine.shape != its.shape
    }

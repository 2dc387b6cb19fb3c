"""The samples of all tensors of one run, op by op, in the order in which they ran: every layer, and what Python read.

batch of 2, batch of 3    the same ops in the same order, or the model's code looks at how many samples there are
x / 2,  x / 3             a number that is another one for a larger batch has reached a value
x[0] = y                  what is written in place changes all tensors that share its memory
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from autoshard.axes.given import literals, plain
from autoshard.axes.parts_of_batch import by_place, of_place, part_dim
from autoshard.axes.sample_merges import Merges
from autoshard.axes.sample_rules import FILLED, MOST_ELEMENTS, PARTS, SIZED, OpRules
from autoshard.axes.samples import PLACE, SHARED, Samples, all_of, combine, fixed, samples, whole
from autoshard.axes.sound import Sound
from autoshard.capture.graph import ModelGraph, Op, name_of
from autoshard.capture.traits import traits_of
from autoshard.torch_private import OpOverload

SIZED_BY_VALUES = frozenset({"nonzero", "nonzero_numpy", "argwhere", "masked_select", "bincount", "unique",
                             "unique_dim", "unique_consecutive", "_unique2"})  # fmt: skip
"""Ops that make tensors as large as values say."""


class SampleWalk:
    """The samples of all values of a graph.

    Attributes:
        other: the same forward with a larger batch, which runs the same ops; `rows`, `other_rows`: of how many.
        samples: what is known of each value now; `cause`: the op that first mixed samples in it.
        merges: how values that several samples decide are made of those of parts, where that is known.
        sized: ops that make tensors whose sizes depend on values of the batch, which Python may look at.
        placed: ops that work on a part of the batch by its place in it, which the samples of values do not tell.
        written: (op, value) of parameters, buffers and inputs that were written with what depends on the batch.
    """

    def __init__(
        self, graph: ModelGraph, other: ModelGraph, inputs: Mapping[int, Samples], rows: tuple[int, int]
    ) -> None:
        self.graph = graph
        self.other = other
        self.rows, self.other_rows = rows
        self.samples: dict[int, Samples] = dict(inputs)
        self.cause: dict[int, int] = {}
        self.sized: list[int] = []
        self.placed: list[int] = []
        self.written: list[tuple[int, int]] = []
        self.rules = OpRules(graph, _counts(graph, other))
        self.sound = Sound(self)
        self.merges = Merges(self)
        self._others = literals(other)
        self._numbers = [repr(plain(op)) for op in graph.ops]
        self._resizes = {
            op.index for op, numbers in zip(other.ops, self._numbers, strict=True) if repr(plain(op)) != numbers
        }  # NaN is not equal to itself
        self._parts: set[int] = set()
        self._read = {value for op in graph.ops for value in op.inputs} | {*graph.outputs}

    def of(self, value: int) -> Samples:
        """The samples of a value; weights, tables and numbers in the code depend on no sample."""
        if value not in self.samples:
            self.samples[value] = self._from_outside(value)
        return self.samples[value]

    def step(self, op: Op) -> None:
        """Follow one op."""
        given = [self.of(value) for value in op.inputs]
        made = self.sound.results(op, given)
        if made is None:
            made = self.rules.results(op, given, self._numbers[op.index])
            made = self._resized(op, given, self._placed(op, given, made))
            if self._is_sized(op) and not all(item.shared for item in given):
                self.sized.append(op.index)
        self.merges.step(op, given, made)
        for value in op.mutates:
            if not self._parts.isdisjoint(self._views(value)):
                self.placed.append(op.index)
            if value not in op.outputs:
                shape = self.graph.values[value].shape
                self._write(op, value, all_of(shape, whole(combine([_flat(item) for item in given], (1,)))))
        for value, item in zip(op.outputs, made, strict=True):
            if not item.apart and value not in self.cause:
                before = [self.cause[one] for one in op.inputs if one in self.cause]
                self.cause[value] = before[0] if before else op.index
            if value in op.mutates:
                self._write(op, value, item)
            else:
                self.samples[value] = item

    def _is_sized(self, op: Op) -> bool:
        """Whether values decide how large the results of an op are."""
        name, graph = name_of(op), self.graph
        if name in ("index", "_unsafe_index"):
            return any(graph.values[value].dtype in (torch.bool, torch.uint8) for value in op.inputs[1:])
        if name == "one_hot":
            assert op.node is not None
            return [*op.node.args[1:2], *op.node.kwargs.values()] in ([], [-1])
        if isinstance(op.target, OpOverload) and torch.Tag.dynamic_output_shape in op.target.tags:
            return True
        if name == "repeat_interleave":
            return len(op.inputs) > 1 or not op.inputs
        return name in SIZED_BY_VALUES or (name == "where" and len(op.inputs) == 1)

    # ---- numbers that are others for a larger batch

    def _from_outside(self, value: int) -> Samples:
        row = self.graph.values[value]
        mine, other = self.rules.contents.literals.get(value), self._others.get(value)
        if row.shape != self.other.values[value].shape or (
            mine is not None and other is not None and not torch.equal(mine, other)
        ):
            self.cause.setdefault(value, -1)
            return all_of(row.shape, PLACE)
        return fixed(row.shape)

    def resized(self, op: Op) -> bool:
        """Whether the numbers among the arguments of an op are others for a larger batch."""
        return op.index in self._resizes

    def is_entries(self, item: Samples) -> bool:
        """Whether elements are entries of a selection: which sample each belongs to is not known."""
        return bool((item.owner >= self.rows).any())

    def _placed(self, op: Op, given: Sequence[Samples], made: list[Samples]) -> list[Samples]:
        """What an op makes that may take a part of the batch by its place in it."""
        counts = self.rules.counts.get(op.inputs[0], ()) if op.inputs else ()
        if not any(counts) or not by_place(op, given[0], counts, made, self.rules.contents, self.resized(op)):
            return made
        self._parts.update(op.outputs)
        varies = any(flag and longer for flag, longer in zip(given[0].varies, counts, strict=True))
        if any(0 in item.shape and value in self._read for value, item in zip(op.outputs, made, strict=True)):
            self.placed.append(op.index)  # nothing in it can say so
        return [of_place(item, varies=varies) for item in made]

    def _resized(self, op: Op, given: Sequence[Samples], made: list[Samples]) -> list[Samples]:
        """What an op makes whose numbers are others for a larger batch: sizes and bounds may be, others may not."""
        if not self.resized(op):
            return made
        mine, other = plain(op), plain(self.other.ops[op.index])
        name = name_of(op)
        if name in SIZED and (name not in FILLED or _scalars(mine) == _scalars(other)):
            return made
        dim = part_dim(op, len(given[0].shape)) if name in PARTS else None
        if dim is not None and not given[0].varies[dim]:
            return made
        if name in PARTS and not bool((given[0].owner == SHARED).any()):
            return made
        return [combine([item, all_of(item.shape, PLACE)], item.shape) for item in made]

    # ---- memory that is shared

    def _write(self, op: Op, value: int, item: Samples) -> None:
        """Enter what a value is after it was written, and what others are that share its memory."""
        graph = self.graph
        storage = graph.values[value].storage
        if graph.storages[storage].kind in ("parameter", "buffer", "input") and not (
            item.shared and all(self.of(one).shared for one in op.inputs if one != value)
        ):
            self.written.append((op.index, value))
        before = self.of(value)
        if _same(before, item):
            return
        sharing = [
            other for other in self.samples
            if other != value and graph.values[other].storage == storage and graph.values[other].died > op.index
        ]  # fmt: skip
        replayed = self._replayed(value, item, sharing) if sharing else {}
        self.samples[value] = item
        for other in sharing:
            found = replayed.get(other)
            if found is None:
                found = combine([self.samples[other], all_of(self.samples[other].shape, whole(item))],
                                self.samples[other].shape)  # fmt: skip
            self.samples[other] = found
            if not found.apart:
                self.cause.setdefault(other, self.cause.get(value, op.index))

    def _replayed(self, value: int, item: Samples, sharing: Iterable[int]) -> dict[int, Samples]:
        """What values are whose memory a value is a part of: the same views are made of numbers, and written."""
        chain = self._views(value)
        root = chain[0]
        base = self.of(root)
        if torch.Size(base.shape).numel() > MOST_ELEMENTS:
            return {}
        memory = base.full().clone(memory_format=torch.contiguous_format)
        kinds, many = _kinds(base)
        kinds = kinds.expand(base.shape).clone(memory_format=torch.contiguous_format)
        seen, marked = self._viewed(memory, chain), self._viewed(kinds, chain)
        if seen is None or marked is None or tuple(seen.shape) != item.shape:
            return {}
        seen.copy_(item.full())
        marked.copy_(_kinds(item)[0] + many)
        found = {}
        for other in sharing:
            way = self._views(other)
            view = self._viewed(memory, way) if way[0] == root else None
            marks = self._viewed(kinds, way) if view is not None else None
            if view is not None and marks is not None:
                found[other] = samples(tuple(view.shape), view.clone(), _differing(marks, view == SHARED))
        return found

    def _views(self, value: int) -> list[int]:
        """The values from the owner of a memory to this view of it."""
        chain = [value]
        values = self.graph.values
        while (op := values[chain[0]].op) >= 0 and (inputs := self.graph.ops[op].inputs):
            first = inputs[0]
            if values[first].storage != values[value].storage or first in chain:
                break
            chain.insert(0, first)
        return chain

    def _viewed(self, memory: torch.Tensor, chain: Sequence[int]) -> torch.Tensor | None:
        """The view of some memory that a chain of ops makes; None if it isn't one."""
        seen = memory
        for value in chain[1:]:
            op = self.graph.ops[self.graph.values[value].op]
            if op.node is None or not (traits_of(op.target).view or name_of(op) in ("reshape", "to", "contiguous")):
                return None
            if any(isinstance(part, torch.fx.Node) for part in op.node.args[1:]):
                return None
            if name_of(op) in ("to", "contiguous"):
                continue
            try:
                made = op.target(seen, *op.node.args[1:], **op.node.kwargs)
            except (RuntimeError, TypeError):
                return None
            seen = made if isinstance(made, torch.Tensor) else made[op.outputs.index(value)]
            if seen.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
                return None
        return seen if tuple(seen.shape) == self.graph.values[chain[-1]].shape else None


def _kinds(item: Samples) -> tuple[torch.Tensor, int]:
    """Numbers that differ where elements that depend on no sample may differ, and how many there are."""
    kinds, many = torch.zeros((1,) * len(item.shape), dtype=torch.int64), 1
    for dim, flag in enumerate(item.varies):
        if flag:
            shape = [1] * len(item.shape)
            shape[dim] = item.shape[dim]
            kinds = kinds + many * torch.arange(item.shape[dim]).view(shape)
            many *= item.shape[dim]
    return kinds, many


def _differing(kinds: torch.Tensor, shared: torch.Tensor) -> list[bool]:
    """Along which dimensions elements that depend on no sample may differ."""
    if not kinds.numel():
        return [False] * kinds.dim()
    most = torch.where(shared, kinds, -1)
    least = torch.where(shared, kinds, torch.iinfo(torch.int64).max)
    return [bool((most.amax(dim) > least.amin(dim)).any()) for dim in range(kinds.dim())]


def _flat(item: Samples) -> Samples:
    return all_of((1,), whole(item))


def _same(left: Samples, right: Samples) -> bool:
    return left.varies == right.varies and torch.equal(left.owner, right.owner)


def _counts(graph: ModelGraph, other: ModelGraph) -> dict[int, tuple[bool, ...]]:
    """Which dimensions of each value are longer for a larger batch."""
    return {
        index: tuple(left != right for left, right in zip(mine.shape, its.shape, strict=False))
        for index, (mine, its) in enumerate(zip(graph.values, other.values, strict=False))
        if mine.shape != its.shape
    }


def _scalars(numbers: Iterable[Any]) -> list[Any]:
    return [item for item in numbers if not isinstance(item, list)]


def first_difference(graph: ModelGraph, other: ModelGraph) -> tuple[int, str] | None:
    """(op, what is there for a larger batch) where two runs part; None if they run the same ops."""
    for mine, its in zip(graph.ops, other.ops, strict=False):
        if mine.target != its.target or len(mine.inputs) != len(its.inputs) or mine.inputs != its.inputs:
            return mine.index, name_of(its)
    if len(graph.ops) != len(other.ops):
        return min(len(graph.ops), len(other.ops)) - 1, "more of them" if len(graph.ops) < len(other.ops) else "the end"
    return None


def is_same(graph: ModelGraph, other: ModelGraph) -> bool:
    """Whether two runs of as many samples do the same, with the same numbers."""
    if first_difference(graph, other) is not None:
        return False
    mine, its = literals(graph), literals(other)
    numbers = all(repr(plain(one)) == repr(plain(two)) for one, two in zip(graph.ops, other.ops, strict=True))
    return numbers and mine.keys() == its.keys() and all(torch.equal(mine[value], its[value]) for value in mine)


def first_uneven(graph: ModelGraph, other: ModelGraph, rows: tuple[int, int]) -> int | None:
    """The first op whose sizes are no multiples of the rows and a rest, so that code looks how many there are.

    `rows`: of the two runs of the same ops. 3 and 1,024 are sizes of them, 2 and 1,023 are; 4 and 16 are not.
    """
    for mine, its in zip(graph.ops, other.ops, strict=True):
        if not _are_even(plain(mine), plain(its), rows):
            return mine.index
    return None


def _are_even(first: Any, second: Any, rows: tuple[int, int]) -> bool:
    """Whether two arguments are the same multiples. Others than integers are seen to differ by who follows the runs."""
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(
            _are_even(mine, its, rows) for mine, its in zip(first, second, strict=True)
        )
    if any(not isinstance(item, int) or isinstance(item, bool) for item in (first, second)):
        return True
    each, left = divmod(second - first, rows[1] - rows[0])
    rest = first - each * rows[0]
    return not left and (each <= 0 or rest >= -each)  # a square of the rows has a rest far below 0

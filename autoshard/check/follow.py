"""Follow the ops of a rank beside those of the whole model: a size of what is cut may reach shapes, and nothing else.

    whole    softmax(view(q, [2, 5, 8, 16]) * 0.25)            8 heads, 0.25 = 16 ** -0.5
    rank     softmax(view(q, [2, 5, 4, 16]) * 0.25)            4 heads: the list is a shape, 0.25 is the same number

The rank runs the model's own Python code on local sizes, on shapes alone. It must run the same ops on the same values
in the same modules, each on tensors of the local shapes that the axis analysis says, with the same numbers in all
arguments that are no sizes. Then, by induction over the ops, every tensor of the rank is its slice of the whole one: a
rule of the analysis says so of each op, whatever the values are. A size that reaches arithmetic (a scale, a mean that
divides by a length, a threshold, a constant, another way through the code) is seen as another number or another op.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy
import torch

from autoshard.axes.axis import Factor, describe, factors_of, local_size
from autoshard.axes.given import named, with_tensors
from autoshard.axes.groups import AxisGroup
from autoshard.axes.regions import scaled_ops
from autoshard.axes.walk import AxisWalk, where
from autoshard.capture.graph import ModelGraph, Op, name_of
from autoshard.plan.sharding import DROPOUTS, kept

SIZES: dict[str, tuple[str, ...]] = {
    "view": ("size",), "reshape": ("shape",), "_unsafe_view": ("size",), "_reshape_alias": ("size", "stride"),
    "expand": ("size",), "repeat": ("repeats",), "repeat_interleave": ("repeats", "output_size"),
    "zeros": ("size",),
    "ones": ("size",), "full": ("size",), "empty": ("size",), "new_zeros": ("size",), "new_ones": ("size",),
    "new_full": ("size",), "new_empty": ("size",), "conv1d": ("groups",), "conv2d": ("groups",), "conv3d": ("groups",),
    "conv_transpose1d": ("groups",), "conv_transpose2d": ("groups",), "conv_transpose3d": ("groups",),
}  # fmt: skip
"""Arguments that may be smaller on a rank: the shapes of what the op reads and makes tell what they have to be."""
_ALL_BUT_THE_DIMENSION = frozenset({"split", "split_with_sizes", "unsafe_split"})
"""Ops whose parts come one after the other: how long each is tells where it begins."""
_PLACES = frozenset({"slice", "select"})
"""Ops whose numbers are places along a dimension: those that the rank keeps must be the same ones."""
_SKIPPED = "contiguous"
"""What torch does not call where there is nothing to do, which depends on sizes of 1."""


class Differs(Exception):
    """A rank does something else than the whole model; `op` is that of the whole, -1 if it is none.

    `module`: the path of the module in which it is, if the op is not known.
    """

    def __init__(self, op: int, message: str, module: str = "") -> None:
        super().__init__(message)
        self.op, self.module = op, module


@dataclass(slots=True)
class Required:
    """What one op must be like on a rank.

    Attributes:
        shapes: local shapes of values that are cut there, of those that it reads or makes.
        axes: what their dimensions are made of, as texts with what is kept on the rank, for places along them.
        summed: what it makes is this rank's term of a sum; `addends`: values that are added once, behind the sum.
        drawn: its random mask is drawn for all of the tensor.
    """

    shapes: dict[int, tuple[int, ...]] = field(default_factory=dict)
    axes: dict[tuple[int, int], list[tuple[str, tuple[int, ...]]]] = field(default_factory=dict)
    summed: bool = False
    addends: set[int] = field(default_factory=set)
    drawn: bool = False


def required_on(
    graph: ModelGraph, groups: Sequence[AxisGroup], shares: Sequence[tuple[int, ...]], rank: int
) -> dict[int, Required]:
    """What every op that works on something cut must be like on a rank, in all blocks; by its index."""
    together: dict[tuple[int, tuple], list[tuple[AxisGroup, tuple[int, ...]]]] = {}
    for group, share in zip(groups, shares, strict=True):
        together.setdefault((id(group.walk), group.ops), []).append((group, share))
    required: dict[int, Required] = {}
    for rows in together.values():
        first = rows[0][0]
        cut = {group.factor: share for group, share in rows}
        found = list(_of_walk(graph, first.walk, first.walked, cut, rank))
        for ops in first.ops:
            for place, row in found:
                _enter(
                    required.setdefault(ops[place], Required()),
                    graph.ops[first.walked[place]],
                    graph.ops[ops[place]],
                    row,
                )
    tensors = {tensor.value for tensor in graph.tensors}
    shapes = {value: shape for row in required.values() for value, shape in row.shapes.items() if value in tensors}
    for op in scaled_ops(graph):  # wherever they are: they belong to no block
        own = {value: shapes[value] for value in graph.ops[op].inputs if value in shapes}
        if own:
            required[op] = Required(shapes=own)
    return required


def _of_walk(
    graph: ModelGraph, walk: AxisWalk, ops: Sequence[int], cut: Mapping[Factor, tuple[int, ...]], rank: int
) -> Iterator[tuple[int, Required]]:
    """(place in `ops`, what is due there) for the block that was analysed."""
    slices = {factor: share[rank] for factor, share in cut.items()}
    summed: dict[int, set[int]] = {}
    for one in walk.contractions:
        if not slices.keys().isdisjoint(factors_of(one.axis)):
            summed.setdefault(one.op, set()).update({one.addend} - {-1})
    touched = {value for factor in slices for value in walk.values_with(factor)}
    drawn = {op for op, value in walk.random_calls if value in touched}
    for place, index in enumerate(ops):
        op, row = graph.ops[index], Required()
        for value in touched.intersection((*op.inputs, *op.outputs)):
            axes = walk.axes[value]
            for dim, axis in enumerate(axes):
                texts = [(describe(axis, factor), share) for factor, share in cut.items() if factor in factors_of(axis)]
                if texts:
                    row.axes[value, dim] = texts
                    row.shapes[value] = tuple(local_size(axis, slices) for axis in axes)
        row.summed, row.addends, row.drawn = index in summed, summed.get(index, set()), index in drawn
        if row.shapes or row.summed:
            yield place, row


def _enter(required: Required, first: Op, op: Op, row: Required) -> None:
    """Add what is due at an op of the first block for the same op of another one."""
    same = dict(zip((*first.inputs, *first.outputs), (*op.inputs, *op.outputs), strict=True))
    required.shapes.update({same[value]: shape for value, shape in row.shapes.items()})
    required.axes.update({(same[value], dim): texts for (value, dim), texts in row.axes.items()})
    required.summed |= row.summed
    required.drawn |= row.drawn
    required.addends |= {same[value] for value in row.addends if value in same}


def follow(whole: ModelGraph, local: ModelGraph, required: Mapping[int, Required], rank: int) -> None:
    """Compare the ops of a rank with those of the whole model. Raises `Differs` at the first that is another one."""
    _Beside(whole, local, required, rank).run()


class _Beside:
    """Two runs beside each other. `stands`: a value of the rank -> the values of the whole of which it is the slice."""

    def __init__(self, whole: ModelGraph, local: ModelGraph, required: Mapping[int, Required], rank: int) -> None:
        self._whole, self._local, self._required, self._rank = whole, local, required, rank
        self._stands: dict[int, set[int]] = {}
        self._made_of: dict[int, int] = {}  # what a cut has made of a constant that nobody has read yet
        self._terms: set[int] = set()  # values that are a term of a sum over ranks
        self._parts: set[int] = set()  # storages of which a cut has taken a part as a view
        self._written: list[tuple[int, int]] = []  # (storage in the whole, on the rank) that were written in place
        self._copied: set[int] = set()  # storages on the rank that `contiguous` copied in one run alone
        self._contents = [_contents(whole), _contents(local)]

    def run(self) -> None:
        names = {tensor.name: tensor.value for tensor in self._whole.tensors}
        for tensor in self._local.tensors:
            self._stands.setdefault(tensor.value, set()).add(names[tensor.name])
        if len(self._local.inputs) != len(self._whole.inputs):
            raise Differs(-1, "a rank is given other inputs")
        for mine, other in zip(self._local.inputs, self._whole.inputs, strict=True):
            self._stands.setdefault(mine, set()).add(other)
        at = 0
        for op in self._local.ops:
            if op.index in self._local.added_ops:
                self._added(op)
                continue
            at = self._skip_whole(at, op)
            if at < len(self._whole.ops) and self._whole.ops[at].target is op.target:
                self._pair(self._whole.ops[at], op)
                at += 1
            elif name_of(op) == _SKIPPED:
                source, made = op.inputs[0], op.outputs[0]
                self._stands.setdefault(made, set()).update(self._stands.get(source, ()))
                self._copied |= {self._local.values[one].storage for one in (source, made)}
            else:
                raise Differs(
                    min(at, len(self._whole.ops) - 1),
                    f"code takes another way where a size is smaller: a rank runs {where(self._local, op)}",
                )
        at = self._skip_whole(at, None)
        if at < len(self._whole.ops):
            missing = where(self._whole, self._whole.ops[at])
            raise Differs(at, f"code takes another way where a size is smaller: no rank runs {missing}")
        self._compare_results()

    def _skip_whole(self, at: int, op: Op | None) -> int:
        """Go past `contiguous` where the rank had nothing to do."""
        while at < len(self._whole.ops):
            other = self._whole.ops[at]
            if name_of(other) != _SKIPPED:
                break
            both = op is not None and op.target is other.target
            if op is not None and both and other.inputs[0] in self._stands.get(op.inputs[0], ()):
                break
            for value, known in self._stands.items():
                if other.inputs[0] in known:
                    known.add(other.outputs[0])
                    self._copied.add(self._local.values[value].storage)
            at += 1
        return at

    def _added(self, op: Op) -> None:
        """An op of the cut itself: what it makes stands for the same as what it is given, and completes it."""
        self._terms.difference_update(op.mutates)
        known = [value for value in op.inputs if value in self._stands]  # of a tensor and its mask, the one made last
        source = max(known, key=lambda value: max(self._stands[value]), default=None)
        for value in op.outputs:
            if value in op.inputs or value in self._stands:
                continue
            if source is not None:
                self._stands[value] = set(self._stands[source])
                if self._local.values[value].storage == self._local.values[source].storage:
                    self._parts.add(self._local.values[value].storage)
            elif op.inputs:
                self._made_of[value] = self._made_of.get(op.inputs[0], op.inputs[0])

    # ---- one op

    def _pair(self, other: Op, op: Op) -> None:
        """Compare an op of the whole with one of the rank, and note what its results stand for."""
        required = self._required.get(other.index, _NOTHING)
        here = self._local.calls[op.call].path
        if here != self._whole.calls[other.call].path:
            raise Differs(other.index, f"{where(self._whole, other)} runs in {here or 'the model itself'} on a rank")
        given, mine = _arguments(other), _arguments(op)
        for name in given | mine:
            self._compare_tensors(required, other, given.get(name), mine.get(name))
        for name in given | mine:
            if not self._same_number(required, other, op, name, (given, mine)):
                raise Differs(
                    other.index,
                    f"a size of what is cut reaches more than shapes: {where(self._whole, other)} has "
                    f"{_short(given.get(name))} as {name} in the whole and {_short(mine.get(name))} on a rank",
                )
        if len(other.outputs) != len(op.outputs) or len(other.mutates) != len(op.mutates):
            raise Differs(other.index, f"{where(self._whole, other)} makes another number of tensors on a rank")
        for value, made in zip(other.outputs, op.outputs, strict=True):
            self._check_shape(required, other, value, made)
            self._stands.setdefault(made, set()).add(value)
            if required.summed:
                self._terms.add(made)
        for value, mutated in zip(other.mutates, op.mutates, strict=True):
            self._note_written(other, value, mutated)

    def _compare_tensors(self, required: Required, other: Op, given: Any, mine: Any) -> None:
        wanted = given.values if isinstance(given, _Tensors) else ()
        found = mine.values if isinstance(mine, _Tensors) else ()
        if len(wanted) == 1 and not found and wanted[0] in required.addends:
            return  # it is added behind the sum
        if len(wanted) != len(found):
            raise Differs(other.index, f"{where(self._whole, other)} is given other tensors on a rank")
        for value, one in zip(wanted, found, strict=True):
            if value not in self._stands_for(one, value):
                what = "another constant" if self._local.values[one].op < 0 else "another tensor"
                raise Differs(other.index, f"{where(self._whole, other)} is given {what} on a rank")
            if one in self._terms:
                raise Differs(other.index, f"{where(self._whole, other)} reads a sum that is not complete on a rank")
            self._check_shape(required, other, value, one)
            self._check_memory(other, value, one)

    def _same_number(self, required: Required, other: Op, op: Op, name: str, arguments: tuple[dict, dict]) -> bool:
        """Whether an argument that is no tensor is what it has to be on the rank."""
        given, mine = (found.get(name) for found in arguments)
        given, mine = (one.rest if isinstance(one, _Tensors) else one for one in (given, mine))
        function = name_of(other)
        if function == "group_norm" and isinstance(given, int) and isinstance(mine, int) and name == "num_groups":
            whole, local = self._shapes(other, op)
            return bool(whole[1] * mine == local[1] * given)  # groups are as large as ever
        if _equal(given, mine) or name in SIZES.get(function, ()):
            return True
        if function in _ALL_BUT_THE_DIMENSION and name != "dim":
            return True
        if required.addends and None in (given, mine):
            return True  # it is added behind the sum
        if function == "embedding" and name == "padding_idx":
            return required.summed  # the cut sees to it that this row is not learned
        return function in _PLACES and self._same_places(required, other, self._shapes(other, op), arguments)

    def _shapes(self, other: Op, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of what an op is given first: in the whole, and on the rank."""
        return self._whole.values[other.inputs[0]].shape, self._local.values[op.inputs[0]].shape

    def _same_places(
        self, required: Required, other: Op, shapes: Sequence[tuple[int, ...]], arguments: tuple[dict, dict]
    ) -> bool:
        """Whether a part of a dimension is, on the rank, what it keeps of the same part."""
        dim = arguments[0]["dim"] % len(shapes[0])
        texts = required.axes.get((other.inputs[0], dim), [])
        if not texts or arguments[0]["dim"] != arguments[1]["dim"]:
            return False
        have = reduce(numpy.intersect1d, (kept(text, share, self._rank) for text, share in texts))
        whole, local = (_places(found, shape[dim]) for found, shape in zip(arguments, shapes, strict=True))
        wanted = numpy.flatnonzero(numpy.isin(have, numpy.arange(shapes[0][dim])[whole]))
        return numpy.array_equal(wanted, numpy.arange(shapes[1][dim])[local])

    # ---- values

    def _stands_for(self, value: int, expected: int) -> set[int]:
        """What a value of the rank stands for; a constant that is met for the first time: what has its content."""
        if value not in self._stands:
            source = self._made_of.get(value, value)
            if source in self._stands or self._same_constant(source, expected):
                self._stands[value] = set(self._stands.setdefault(source, {expected}))
        return self._stands.get(value, set())

    def _same_constant(self, mine: int, other: int) -> bool:
        whole, local = self._whole.values[other], self._local.values[mine]
        if whole.op >= 0 or local.op >= 0 or (whole.shape, whole.dtype) != (local.shape, local.dtype):
            return False
        left, right = self._contents[0].get(other), self._contents[1].get(mine)
        if left is None or right is None:
            return left is right
        return bool(((left == right) | ((left != left) & (right != right))).all())

    def _check_shape(self, required: Required, other: Op, value: int, one: int) -> None:
        shape = self._local.values[one].shape
        wanted = required.shapes.get(value, self._whole.values[value].shape)
        if shape != wanted and not (required.drawn and name_of(other) in DROPOUTS):
            raise Differs(
                other.index,
                f"{where(self._whole, other)} has a tensor of {list(shape)} on a rank, where {list(wanted)} is due",
            )

    def _note_written(self, other: Op, value: int, mutated: int) -> None:
        pair = self._whole.values[value].storage, self._local.values[mutated].storage
        if pair[1] in self._parts or pair[1] in self._copied:
            raise Differs(other.index, f"{where(self._whole, other)} writes into what a rank has a part of")
        if pair not in self._written:
            self._written.append(pair)

    def _check_memory(self, other: Op, value: int, one: int) -> None:
        """What was written in place in one run must have been so in the other."""
        pair = self._whole.values[value].storage, self._local.values[one].storage
        apart = any((pair[0] == whole) != (pair[1] == local) for whole, local in self._written)
        if apart and pair not in self._written:
            raise Differs(other.index, f"{where(self._whole, other)} reads what is written elsewhere on a rank")

    def _compare_results(self) -> None:
        if len(self._whole.outputs) != len(self._local.outputs):
            raise Differs(-1, "the model returns another number of tensors on a rank")
        for value, one in zip(self._whole.outputs, self._local.outputs, strict=True):
            if value not in self._stands_for(one, value) or one in self._terms:
                raise Differs(-1, "the model returns another tensor on a rank")
        if not _equal(self._whole.plain, self._local.plain):
            raise Differs(-1, "a size of what is cut reaches more than shapes: the model returns it")


_NOTHING = Required()


@dataclass(frozen=True, slots=True)
class _Tensors:
    """The tensors of one argument; `rest`: what else is in it, if it is a list."""

    values: tuple[int, ...]
    rest: tuple[Any, ...] = ()


def _arguments(op: Op) -> dict[str, Any]:
    """What was given as each argument of an op, those that have their usual value included."""
    values = iter(op.inputs)
    args, kwargs = with_tensors(op, lambda node: _Tensors((next(values),)))
    return {name: _together(item) for name, item in named(op.target, args, kwargs).items()}


def _together(item: Any) -> Any:
    """The tensors of a list as one, with what else is in it."""
    parts = item if isinstance(item, (list, tuple)) else ()
    found = tuple(value for part in parts if isinstance(part, _Tensors) for value in part.values)
    return _Tensors(found, tuple("a tensor" if isinstance(one, _Tensors) else one for one in parts)) if found else item


def _places(arguments: Mapping[str, Any], size: int) -> slice:
    """The part of a dimension that `slice` or `select` takes."""
    if "index" in arguments:
        index = arguments["index"] % size
        return slice(index, index + 1)
    return slice(arguments["start"], arguments["end"], arguments["step"])


def _contents(graph: ModelGraph) -> dict[int, torch.Tensor]:
    """The content of constants, and of tensors in objects that the model was given, by value."""
    return {node.meta["value"]: node.meta["content"] for node in graph.fx_graph.nodes if "content" in node.meta}


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right or (left != left and right != right))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:39]}…"

"""Entries: elements that are picked out of tensors, worked on one by one, and put back in their own places. Sound by
argument.

    keys      [6]    2 0 1 | 0 2 0       the expert of each token, of two samples
    sort             0 0 0 1 2 2         entries e, each of one token, whose place is p(e):   1 3 5 2 0 4
    x[p]                                 what entry e is made of is the token p(e) alone
    grouped product  0 0 0 | 1 | 2 2     by the matrix of the entry's own key, where groups end where its keys do
    y[inverse]       token p(e) is given what entry e became

    mask      [2, 3]   x . x | . x .     elements of two samples
    where     rows, columns              where each entry e has its element:   (0 0) (0 2) (1 1)
    x[mask]                              what entry e is made of is its own element alone
    y.index_add_(0, rows, entries)       row(e) is given what entry e became

Argument: which entries there are, and in which order, is decided by all samples, but what an entry holds is decided by
its own sample, and it is put back there; a mask has an entry if the entry's own sample says so. Entries are a factor of
their own, as the batch is one: whatever works along it, or pairs it with what varies along it (a capacity, a rank),
mixes samples. The places themselves, how many entries there are, and where groups end depend on the whole batch: they
may be used in these ways only, and mix otherwise; of what has as many elements as a mask chooses Python may not read
the size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.axes.axis import Axis, Factor, covers, factors_of, reshape, size_of, times
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.contents import bound_of_filled
from autoshard.axes.given import arguments_of, overwritten_by, plain, reads_bits
from autoshard.axes.reshaping import CATS, COPIES, MOVES, RESHAPES
from autoshard.axes.rules import Axes, is_pointwise
from autoshard.capture.graph import Op, maker_of, name_of
from autoshard.capture.traits import traits_of

EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Types in which the number of an expert is exact."""
_LISTED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
_PICK = ("index", "_unsafe_index", "index_select")
_PUT = ("index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_")
LEAST = 2
"""Fewer entries would not show what takes two of them together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Selection:
    """Entries that were made of elements.

    Attributes:
        op: what made them; `factor`: the factor that they are.
        axes: of what they were made of: tokens that were sorted, or a mask.
        keys: the value by which they are sorted in ascending order, -1 if they are not.
        mask: the value that chooses them, -1 where all tokens are sorted.
    """

    op: int
    factor: Factor
    axes: Axes
    keys: int = -1
    mask: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPlaces:
    """Of every entry, where its element is along an axis, which is dimension `dim` of what the entries were made of."""

    selection: Selection
    axis: Axis
    dim: int = 0
    once: bool = True


class Entries:
    """What is known of places, counts and ends of groups, by value.

    Attributes:
        sized: values as large as masks say, and what was made of them.
        puts: (op, selection) of what puts entries back that a mask chose.
    """

    def __init__(self, walk: BatchAxes) -> None:
        self.walk = walk
        self.sized: set[int] = set()
        self.puts: list[tuple[int, Selection]] = []
        self._places: dict[int, EntryPlaces] = {}
        self._rows: dict[int, Selection] = {}  # nonzero: the places of each entry, one after the other
        self._inverse: dict[int, Selection] = {}
        self._counts: dict[int, int] = {}  # of keys -> how many have each number
        self._ends: dict[int, int] = {}
        self._sorted: dict[int, int] = {}  # sorted keys -> keys
        self._selections: dict[Factor, Selection] = {}
        self._chosen: dict[Any, Selection] = {}

    def results(self, op: Op) -> list[State] | None:
        """The states of what an op makes of entries, or of elements by their places; None if it is no such op."""
        name = name_of(op)
        made: list[State] | None = None
        if name == "sort":
            made = self._sort(op)
        elif name == "nonzero":
            made = self._found(op)
        elif name in _PICK:
            made = self._picked(op, name)
        elif name in _PUT:
            made = self._put(op, name)
        elif name in ("_grouped_mm", "grouped_mm"):
            made = self._grouped(op)
        elif op.inputs and not op.mutates and op.node is not None:
            self._note(op, name)
        if made is None and op.mutates:
            self.forget(op)
        put = name in _PUT and made is not None and op.inputs[0] not in self.sized
        if not put and not self.sized.isdisjoint(op.inputs):
            self.sized.update(value for value in op.outputs if value not in op.inputs)
        return made

    def _select(self, op: Op, count: int, axes: Axes, keys: int = -1, mask: int = -1) -> Selection:
        """Entries that an op makes of elements."""
        selection = Selection(op=op.index, factor=Factor(count, rigid=True), axes=axes, keys=keys, mask=mask)
        self._selections[selection.factor] = selection
        self.walk.rigid.append(selection.factor)
        return selection

    def made_by(self, value: int) -> int:
        """The op that made the entries of a tensor that nothing has mixed, -1 if it has none."""
        if self.walk.state(value) != "apart":
            return -1
        found = (factor for axis in self.walk.axes(value) for factor in factors_of(axis))
        return next((self._selections[factor].op for factor in found if factor in self._selections), -1)

    def forget(self, op: Op) -> None:
        """Nothing more is known of what an op writes into."""
        for table in (self._places, self._rows, self._inverse, self._counts, self._ends, self._sorted):
            for value in overwritten_by(self.walk.graph, op, table):
                del table[value]

    # ---- places, counts and ends of groups

    def _sort(self, op: Op) -> list[State] | None:
        walk, source = self.walk, op.inputs[0]
        values, places = op.outputs
        known = self._places.get(source)
        if known is not None and known.once and known.selection.mask < 0 and not _descends(op):
            self._inverse[places] = known.selection
            return ["mixed"] * len(op.outputs)
        axes = walk.axes(source)
        if len(axes) != 1 or not self.walk.is_of_samples(source):
            return None
        selection = self._select(op, size_of(axes[0]), axes, keys=-1 if _descends(op) else self._root(source))
        self._places[places] = EntryPlaces(selection=selection, axis=axes[0])
        self._sorted[values] = selection.keys
        return [self._entries(value, selection) if value == values else "mixed" for value in op.outputs]

    def _entries(self, value: int, selection: Selection, at: int = 0) -> State:
        """Give a result the entries along one dimension."""
        self.walk.give(value, {at: (selection.factor,)})
        return "apart"

    def _found(self, op: Op) -> list[State] | None:
        selection = self._choice(op, op.inputs[0], op.outputs[0])
        if selection is None:
            return None
        self._rows[op.outputs[0]] = selection
        self.sized.update(op.outputs)
        return ["mixed"] * len(op.outputs)

    def _choice(self, op: Op, mask: int, entries: int, at: int = 0) -> Selection | None:
        """What a mask chooses. `entries`: a value that has as many of them along a dimension."""
        graph, other = self.walk.graph, self.walk.other
        count, its = graph.values[entries].shape[at], other.values[entries].shape[at]
        if count < LEAST or count == its or not graph.values[mask].shape:
            return None
        if self.walk.is_overwritten(mask) or not self.walk.is_of_samples(mask):
            return None
        key = self.key(mask)
        if key not in self._chosen:
            self._chosen[key] = self._select(op, count, self.walk.axes(mask), mask=mask)
        known = self._chosen[key]
        return known if known.factor.size == count else None

    def key(self, mask: int, depth: int = 3) -> Any:
        """What computes a mask, the same for `~mask` wherever it is written."""
        op = maker_of(self.walk.graph, mask)
        if op is None or op.node is None or not depth or self.walk.is_overwritten(mask) or len(op.outputs) > 1:
            return mask
        if not is_pointwise(op.target) or traits_of(op.target).random:
            return mask
        return op.target, tuple(self.key(value, depth - 1) for value in op.inputs), repr(plain(op))

    def _note(self, op: Op, name: str) -> None:
        """What is handed on: places of one dimension, as another type, or in groups of tokens; how many keys."""
        graph, source = self.walk.graph, op.inputs[0]
        args: Sequence[Any] = op.node.args  # type: ignore[union-attr]
        if source in self._rows and name == "unbind" and len(args) > 1 and args[1] in (1, -1):
            self._places.update((value, _along(self._rows[source], dim)) for dim, value in enumerate(op.outputs))
        elif source in self._rows and name == "select" and args[1] in (1, -1) and args[2] >= 0:
            self._places[op.outputs[0]] = _along(self._rows[source], args[2])
        if len(op.outputs) != 1 or (name not in RESHAPES and self.walk.resized(op)):
            return
        made = op.outputs[0]
        row = graph.values[made]
        if _copies(op) and row.shape == graph.values[source].shape and row.dtype in EXACT:
            if source in self._places and not row.dtype.is_floating_point:
                self._places[made] = self._places[source]
            for table in (self._inverse, self._counts, self._ends):
                if source in table:
                    table[made] = table[source]  # type: ignore[assignment]
        elif name in ("floor_divide", "div") and source in self._places and len(op.inputs) == 1:
            rounded = name == "floor_divide" or arguments_of(op).get("rounding_mode") == "floor"
            divided = self._divided(self._places[source], args[1]) if rounded else None
            if divided is not None:
                self._places[made] = divided
        elif name in ("histc", "bincount"):
            keys = self._root(source)
            if keys >= 0 and self._counts_each(op, row.shape):
                self._counts[made] = keys
        elif name == "cumsum" and source in self._counts and row.dtype in EXACT:
            self._ends[made] = self._counts[source]

    def _divided(self, places: EntryPlaces, by: Any) -> EntryPlaces | None:
        """The places of groups of so many tokens, where all tokens of a group are of one sample."""
        size = size_of(places.axis)
        if not isinstance(by, int) or by <= 0 or places.selection.mask >= 0 or size % by:
            return None
        made: list[Axis] = []
        if self.walk.mixes(lambda: made.extend(reshape([places.axis], [size // by, by]))):
            return None
        alike = covers(made[0], self.walk.batch)
        once = places.once and by == 1
        return EntryPlaces(selection=places.selection, axis=made[0], once=once) if alike else None

    def _counts_each(self, op: Op, shape: Sequence[int]) -> bool:
        """Whether an op counts the numbers 0, 1, 2 and so on, each by itself, and keys have no others."""
        assert op.node is not None
        if len(op.inputs) != 1 or not 0 < self._bound(op.inputs[0]) <= shape[0]:
            return False
        dtype = self.walk.graph.values[op.inputs[0]].dtype
        each = torch.arange(shape[0], dtype=dtype)
        whole = torch.eye(shape[0], dtype=torch.int64)
        counted = [op.target(one, *op.node.args[1:], **op.node.kwargs).long() for one in each[:, None]]
        return all(torch.equal(one, row) for one, row in zip(counted, whole, strict=True))

    def _root(self, value: int) -> int:
        """Of which value this is a copy in any order, -1 if that may have been written over."""
        graph = self.walk.graph
        while not self.walk.is_overwritten(value):
            if value in self._sorted:
                return self._sorted[value]
            op = maker_of(graph, value)
            if op is None or not _copies(op) or graph.values[value].dtype not in EXACT:
                return value
            value = op.inputs[0]
        return -1

    def _bound(self, value: int) -> int:
        """All numbers of a value are below this one, and none is below 0; 0 if that is not known."""
        graph = self.walk.graph
        value = self._root(value)
        while value >= 0 and (op := maker_of(graph, value)) is not None and not self.walk.is_overwritten(value):
            if name_of(op) in ("topk", "sort", "max", "min", "argmax", "argmin"):
                shape = graph.values[op.inputs[0]].shape
                return _ranked(op, shape) if value == op.outputs[-1] and len(op.inputs) == 1 else 0
            if name_of(op) in CATS and graph.values[value].dtype in EXACT:
                bounds = [self._bound(one) for one in op.inputs]
                return max(bounds) if all(bounds) else 0
            if name_of(op) == "masked_fill":
                return bound_of_filled(graph, op, self._bound(op.inputs[0]), self._root)
            moves = name_of(op) in MOVES and len(op.inputs) == 1
            if not (_copies(op) or moves) or graph.values[value].dtype not in EXACT:
                return 0
            value = op.inputs[0]
        return 0

    # ---- elements and entries

    def _picked(self, op: Op, name: str) -> list[State] | None:
        """x[places] makes entries of elements, and x[inverse] tokens of entries."""
        x, made = op.inputs[0], op.outputs[0]
        shape = self.walk.graph.values[made].shape
        places = self._indexed(op, name)
        if places is None:
            selection = self._inverse.get(op.inputs[1]) if _first_index(op) else None
            if selection is None or self.entries(x) is not selection:
                return None
            self.walk.give(made, {0: selection.axes[0]})
            return ["apart"]
        selection, at = next(iter(places.values())).selection, min(places)
        if len(shape) <= at or shape[at] != selection.factor.size or not self._is_of(x, places):
            return None
        if selection.mask >= 0:
            self.sized.update(op.outputs)
        return [self._entries(made, selection, at)]

    def _indexed(self, op: Op, name: str) -> dict[int, EntryPlaces] | None:
        """By dimension the places that are the only indices of an op: of one selection, each dimension of it once."""
        args: Sequence[Any] = op.node.args if op.node is not None else ()
        if name not in _LISTED:
            place = self._places.get(op.inputs[1])
            ndim = len(self.walk.graph.values[op.inputs[0]].shape)
            return {args[1] % ndim: place} if place is not None and ndim else None
        which = [dim for dim, index in enumerate(args[1]) if index is not None]
        values = op.inputs[1 : 1 + len(which)]
        if len(values) != len(which) or not which or which != list(range(which[0], which[0] + len(which))):
            return None
        if self.walk.graph.values[values[0]].dtype is torch.bool:
            if len(values) > 1:
                return None
            known = self._chosen.get(self.key(values[0]))
            if name in _PICK:
                known = self._choice(op, values[0], op.outputs[0], which[0])
            return None if known is None else {which[0] + d: _along(known, d) for d in range(len(known.axes))}
        found = [place for value in values if (place := self._places.get(value)) is not None]
        alike = len(found) == len(values) and all(one.selection is found[0].selection for one in found)
        return dict(zip(which, found, strict=True)) if alike and len({one.dim for one in found}) == len(found) else None

    def _is_of(self, x: int, places: Mapping[int, EntryPlaces]) -> bool:
        """Whether what stands in each place belongs to the sample of the element there, or to none."""
        walk = self.walk
        axes = walk.axes(x)
        pairs = [(axes[dim], place.axis) for dim, place in places.items()]
        if walk.state(x) == "mixed" or any(size_of(mine) != size_of(its) for mine, its in pairs):
            return False
        rest = [axis for dim, axis in enumerate(axes) if dim not in places]
        if any(map(times, rest)):
            return False
        if walk.state(x) == "shared" and not any(times(its, walk.batch) for _, its in pairs):
            masks = [place.selection.mask for place in places.values()]
            return not any(
                (walk.longer(x)[dim] or walk.longer(mask)[place.dim]) and not walk.is_same_along(x, dim)
                for mask, (dim, place) in zip(masks, places.items(), strict=True)
            )

        def pair() -> None:
            for mine, its in pairs:
                walk.walk.unify(mine, its)

        return not walk.mixes(pair)

    def _put(self, op: Op, name: str) -> list[State] | None:
        """out[places] = entries, out[places] += entries, and inverse[places] = 0, 1, 2 and so on."""
        places = self._indexed(op, name) if len(op.inputs) > 2 and op.node is not None else None
        if places is None or op.node is None:
            return None
        graph, x, source, one = self.walk.graph, op.inputs[0], op.inputs[-1], next(iter(places.values()))
        selection, adds = one.selection, "add" in name or True in op.node.args[3:4]
        shape = graph.values[x].shape
        if selection.mask < 0 and len(shape) == 1 and one.once and not adds and self._counts_up(op, size_of(one.axis)):
            self.forget(op)
            self._inverse[op.outputs[0]] = selection
            return ["mixed"] * len(op.outputs)
        alone = one.once and len(places) == len(selection.axes)
        if min(places) or self.entries(source) is not selection or not (adds or alone):
            return None
        if graph.values[source].shape[1:] != shape[len(places) :]:
            return None
        if not any(covers(place.axis, self.walk.batch) for place in places.values()) or not self._is_of(x, places):
            return None
        if selection.mask >= 0:
            self.puts.append((op.index, selection))
        self.forget(op)
        if op.outputs[0] != x:
            self.walk.walk.axes[op.outputs[0]] = self.walk.axes(x)
        return [self.walk.made(True, op.outputs[0])]

    def _counts_up(self, op: Op, count: int) -> bool:
        """Whether an op writes 0, 1, 2 and so on into a tensor of so many elements."""
        numbers = self.walk.contents[0].of(op.inputs[-1])
        shape = self.walk.graph.values[op.outputs[0]].shape
        return numbers is not None and shape == (count,) and torch.equal(numbers.long(), torch.arange(count))

    def _grouped(self, op: Op) -> list[State] | None:
        """A product of every entry with the matrix of its own key."""
        if op.node is None or len(op.inputs) != 3:
            return None
        x, matrices, ends = (self.walk.graph.values[value].shape for value in op.inputs)
        keys, selection = self._ends.get(op.inputs[2], -1), self.entries(op.inputs[0])
        if selection is None or self.walk.state(op.inputs[1]) != "shared" or keys < 0 or keys != selection.keys:
            return None
        if len(x) != 2 or len(matrices) != 3 or ends != matrices[:1]:
            return None
        return [self._entries(op.outputs[0], selection)]

    def entries(self, value: int) -> Selection | None:
        """The selection of which a tensor has all entries, one after the other."""
        axes = self.walk.axes(value)
        if self.walk.state(value) != "apart" or not axes or len(axes[0]) != 1:
            return None
        factor = axes[0][0]
        return self._selections.get(factor) if isinstance(factor, Factor) else None


def _first_index(op: Op) -> bool:
    """Whether an op has one index, along the first dimension."""
    args: Sequence[Any] = op.node.args if op.node is not None else ()
    if isinstance(args[1], (list, tuple)):
        return args[1][0] is not None and all(item is None for item in args[1][1:])
    return args[1] == 0


def _copies(op: Op) -> bool:
    """Whether an op hands on the same numbers in the same order; bits that are read as another type are others."""
    return name_of(op) in COPIES and len(op.inputs) == 1 and not reads_bits(op)


def _descends(op: Op) -> bool:
    return bool(arguments_of(op).get("descending"))


def _ranked(op: Op, shape: Sequence[int]) -> int:
    """The size of the dimension in which an op finds places; 0 if it is not told."""
    dim = arguments_of(op).get("dim")
    return shape[dim] if isinstance(dim, int) and not isinstance(dim, bool) and shape else 0


def _along(selection: Selection, dim: int) -> EntryPlaces:
    """Where the elements of a selection are along one dimension of its mask."""
    return EntryPlaces(selection=selection, axis=selection.axes[dim], dim=dim)

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
its own sample, and it is put back there; a mask has an entry if the entry's own sample says so. Each entry has a code
of its own, so that whatever takes two entries together, or meets a number that varies along them (a capacity, a rank),
mixes samples. The places themselves, how many entries there are, and where groups end depend on the whole batch: they
may be used in these ways only, and mix otherwise; of what has as many elements as a mask chooses Python may not read
the size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoshard.axes.given import arguments_of, plain, written_storages
from autoshard.axes.reshaping import MOVES, RESHAPES
from autoshard.axes.rules import is_pointwise
from autoshard.axes.samples import FIRST_ENTRY, MIXED, SHARED, Samples, all_of, combine, reduce, samples
from autoshard.capture.graph import Op, name_of
from autoshard.capture.traits import traits_of

if TYPE_CHECKING:
    from autoshard.axes.sample_walk import SampleWalk

COPIES = frozenset({"to", "_to_copy", "alias", "contiguous", "clone", "detach"}) | RESHAPES
"""Ops that hand on the same numbers in the same order, if as many of them."""
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
        op: what made them; `first`: code of the first entry; `count`: how many there are.
        owner: which sample every element belongs to: a token that was sorted, or an element of a mask, in its shape.
        keys: the value by which they are sorted in ascending order, -1 if they are not.
        mask: the value that chooses them, -1 where all tokens are sorted.
    """

    op: int
    first: int
    count: int
    owner: torch.Tensor
    keys: int = -1
    mask: int = -1

    @property
    def codes(self) -> torch.Tensor:
        """The codes of all entries, in their order."""
        return torch.arange(self.first, self.first + self.count, dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryPlaces:
    """Of every entry, where its element is along dimension `dim` of `owner`: which sample each place belongs to."""

    selection: Selection
    owner: torch.Tensor
    dim: int = 0
    once: bool = True


class Entries:
    """What is known of places, counts and ends of groups, by value.

    Attributes:
        sized: values as large as masks say, and what was made of them.
        puts: (op, selection) of what puts entries back that a mask chose.
    """

    def __init__(self, walk: "SampleWalk") -> None:
        self.walk = walk
        self.sized: set[int] = set()
        self.puts: list[tuple[int, Selection]] = []
        self._places: dict[int, EntryPlaces] = {}
        self._rows: dict[int, Selection] = {}  # nonzero: the places of each entry, one after the other
        self._inverse: dict[int, Selection] = {}
        self._counts: dict[int, int] = {}  # of keys -> how many have each number
        self._ends: dict[int, int] = {}
        self._sorted: dict[int, int] = {}  # sorted keys -> keys
        self._selections: dict[int, Selection] = {}
        self._chosen: dict[Any, Selection] = {}
        self._next = FIRST_ENTRY
        self._written = written_storages(walk.graph)

    def results(self, op: Op, given: Sequence[Samples]) -> list[Samples] | None:
        """The samples of what an op makes of entries, or of elements by their places; None if it is no such op."""
        name = name_of(op)
        made: list[Samples] | None = None
        if name in ("sort", "argsort"):
            made = self._sort(op, name, given)
        elif (name == "where" and len(op.inputs) == 1) or name in ("nonzero", "nonzero_numpy"):
            made = self._found(op, given, name)
        elif name in _PICK:
            made = self._picked(op, given, name)
        elif name in _PUT:
            made = self._put(op, given, name)
        elif name in ("_grouped_mm", "grouped_mm"):
            made = self._grouped(op, given)
        elif op.inputs and not op.mutates and op.node is not None:
            self._note(op, name)
        if made is None and op.mutates:
            self.forget(op)
        put = name in _PUT and made is not None and op.inputs[0] not in self.sized
        if not put and not self.sized.isdisjoint(op.inputs):
            self.sized.update(value for value in op.outputs if value not in op.inputs)
        return made

    def _select(self, op: Op, count: int, owner: torch.Tensor, keys: int = -1, mask: int = -1) -> Selection:
        """Entries that an op makes of elements."""
        selection = Selection(op=op.index, first=self._next, count=count, owner=owner, keys=keys, mask=mask)
        self._next += count
        self._selections[selection.first] = selection
        return selection

    def made_by(self, item: Samples) -> int:
        """The op that made the entries of a tensor, -1 if it has none."""
        code = int(item.owner.max()) if item.owner.numel() else SHARED
        return next((one.op for first, one in reversed(self._selections.items()) if FIRST_ENTRY <= first <= code), -1)

    def forget(self, op: Op) -> None:
        """Nothing more is known of what an op writes into."""
        graph = self.walk.graph
        storages = {graph.values[value].storage for value in op.mutates}
        for table in (self._places, self._rows, self._inverse, self._counts, self._ends, self._sorted):
            for value in [value for value in table if graph.values[value].storage in storages]:
                del table[value]

    # ---- places, counts and ends of groups

    def _sort(self, op: Op, name: str, given: Sequence[Samples]) -> list[Samples] | None:
        graph, source = self.walk.graph, op.inputs[0]
        values, places = (-1, op.outputs[0]) if name == "argsort" else (op.outputs[0], op.outputs[-1])
        known = self._places.get(source)
        if known is not None and known.once and known.selection.mask < 0 and not _descends(op):
            self._inverse[places] = known.selection
            return [all_of(graph.values[value].shape, MIXED) for value in op.outputs]
        keys = given[0]
        if len(keys.shape) != 1 or keys.shared or not self._is_of_samples(keys.owner):
            return None
        owner = keys.full().clone()
        selection = self._select(op, len(owner), owner, keys=-1 if _descends(op) else self._root(source))
        self._places[places] = EntryPlaces(selection=selection, owner=owner)
        if values >= 0:
            self._sorted[values] = selection.keys
        return [
            samples(keys.shape, selection.codes) if value == values else all_of(keys.shape, MIXED)
            for value in op.outputs
        ]

    def _is_of_samples(self, owner: torch.Tensor) -> bool:
        """Whether every element belongs to a sample of the batch."""
        return bool(((owner >= 0) & (owner < self.walk.rows)).all())

    def _found(self, op: Op, given: Sequence[Samples], name: str) -> list[Samples] | None:
        selection = self._choice(op, op.inputs[0], given[0], op.outputs[0])
        if selection is None:
            return None
        if name == "nonzero":
            self._rows[op.outputs[0]] = selection
        else:
            self._places.update((value, _along(selection, dim)) for dim, value in enumerate(op.outputs))
        self.sized.update(op.outputs)
        return [all_of(self.walk.graph.values[value].shape, MIXED) for value in op.outputs]

    def _choice(self, op: Op, mask: int, item: Samples, entries: int, at: int = 0) -> Selection | None:
        """What a mask chooses. `entries`: a value that has as many of them along a dimension."""
        graph, other = self.walk.graph, self.walk.other
        count, its = graph.values[entries].shape[at], other.values[entries].shape[at]
        if graph.values[mask].storage in self._written or not item.shape or count < LEAST or count == its:
            return None
        if not self._is_of_samples(item.owner):
            return None
        key = self._key(mask)
        if key not in self._chosen:
            self._chosen[key] = self._select(op, count, item.full().clone(), mask=mask)
        known = self._chosen[key]
        return known if known.count == count else None

    def _key(self, mask: int, depth: int = 3) -> Any:
        """What computes a mask, the same for `~mask` wherever it is written."""
        row = self.walk.graph.values[mask]
        op = self.walk.graph.ops[row.op] if row.op >= 0 else None
        if op is None or op.node is None or not depth or row.storage in self._written or len(op.outputs) > 1:
            return mask
        if not is_pointwise(op.target) or traits_of(op.target).random:
            return mask
        return op.target, tuple(self._key(value, depth - 1) for value in op.inputs), repr(plain(op))

    def _note(self, op: Op, name: str) -> None:
        """What is handed on: places of one dimension, as another type, or in groups of tokens; how many keys."""
        graph, source = self.walk.graph, op.inputs[0]
        args: Sequence[Any] = op.node.args  # type: ignore[union-attr]
        if source in self._rows and name == "unbind" and len(args) > 1 and args[1] in (1, -1):
            self._places.update((value, _along(self._rows[source], dim)) for dim, value in enumerate(op.outputs))
        elif source in self._rows and name == "select" and args[1] in (1, -1) and args[2] >= 0:
            self._places[op.outputs[0]] = _along(self._rows[source], args[2])
        if len(op.outputs) != 1 or self._resized(op, name):
            return
        made = op.outputs[0]
        row = graph.values[made]
        if _copies(op) and row.shape == graph.values[source].shape and row.dtype in EXACT:
            if source in self._places and not row.dtype.is_floating_point:
                self._places[made] = self._places[source]
            for table in (self._inverse, self._counts, self._ends):
                if source in table:
                    table[made] = table[source]  # type: ignore[assignment]
        elif name in ("floor_divide", "div", "divide") and source in self._places and len(op.inputs) == 1:
            rounded = name == "floor_divide" or arguments_of(op).get("rounding_mode") == "floor"
            divided = _divided(self._places[source], args[1]) if rounded else None
            if divided is not None:
                self._places[made] = divided
        elif name in ("histc", "bincount"):
            keys = self._root(source)
            if keys >= 0 and self._counts_each(op, name, row.shape):
                self._counts[made] = keys
        elif name == "cumsum" and source in self._counts and row.dtype in EXACT:
            self._ends[made] = self._counts[source]

    def _resized(self, op: Op, name: str) -> bool:
        return name not in RESHAPES and self.walk.resized(op)

    def _counts_each(self, op: Op, name: str, shape: Sequence[int]) -> bool:
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
        while graph.values[value].storage not in self._written:
            if value in self._sorted:
                return self._sorted[value]
            op = graph.ops[graph.values[value].op] if graph.values[value].op >= 0 else None
            if op is None or not _copies(op) or graph.values[value].dtype not in EXACT:
                return value
            value = op.inputs[0]
        return -1

    def _bound(self, value: int) -> int:
        """All numbers of a value are below this one, and none is below 0; 0 if that is not known."""
        graph = self.walk.graph
        value = self._root(value)
        while value >= 0 and (at := graph.values[value].op) >= 0 and graph.values[value].storage not in self._written:
            op = graph.ops[at]
            if name_of(op) in ("topk", "sort", "max", "min", "argmax", "argmin", "argsort"):
                shape = graph.values[op.inputs[0]].shape
                return _ranked(op, shape) if value == op.outputs[-1] and len(op.inputs) == 1 else 0
            moves = name_of(op) in MOVES and len(op.inputs) == 1
            if not (_copies(op) or moves) or graph.values[value].dtype not in EXACT:
                return 0
            value = op.inputs[0]
        return 0

    # ---- elements and entries

    def _picked(self, op: Op, given: Sequence[Samples], name: str) -> list[Samples] | None:
        """x[places] makes entries of elements, and x[inverse] tokens of entries."""
        x, shape = given[0], self.walk.graph.values[op.outputs[0]].shape
        places = self._indexed(op, given, name)
        if places is None:
            selection = self._inverse.get(op.inputs[1]) if _first_index(op) else None
            found = selection is not None and self.entries(x) is selection
            return [_first(shape, selection.owner)] if found and selection is not None else None
        selection, at = next(iter(places.values())).selection, min(places)
        if len(shape) <= at or shape[at] != selection.count or not self._is_of(op, x, places):
            return None
        if selection.mask >= 0:
            self.sized.update(op.outputs)
        return [samples(shape, selection.codes.view(*(1,) * at, -1, *(1,) * (len(shape) - at - 1)))]

    def _indexed(self, op: Op, given: Sequence[Samples], name: str) -> dict[int, EntryPlaces] | None:
        """By dimension the places that are the only indices of an op: of one selection, each dimension of it once."""
        args: Sequence[Any] = op.node.args if op.node is not None else ()
        if name not in _LISTED:
            place = self._places.get(op.inputs[1])
            return {args[1] % len(given[0].shape): place} if place is not None and given[0].shape else None
        which = [dim for dim, index in enumerate(args[1]) if index is not None]
        values = op.inputs[1 : 1 + len(which)]
        if len(values) != len(which) or not which or which != list(range(which[0], which[0] + len(which))):
            return None
        if self.walk.graph.values[values[0]].dtype is torch.bool:
            if len(values) > 1:
                return None
            known = self._chosen.get(self._key(values[0]))
            if name in _PICK:
                known = self._choice(op, values[0], given[1], op.outputs[0], which[0])
            return None if known is None else {which[0] + d: _along(known, d) for d in range(known.owner.dim())}
        found = [place for value in values if (place := self._places.get(value)) is not None]
        alike = len(found) == len(values) and all(one.owner is found[0].owner for one in found)
        return dict(zip(which, found, strict=True)) if alike and len({one.dim for one in found}) == len(found) else None

    def _is_of(self, op: Op, x: Samples, places: dict[int, EntryPlaces]) -> bool:
        """Whether what stands in each place belongs to the sample of the element there, or to none."""
        one = next(iter(places.values()))
        counts, owner = self.walk.rules.counts, one.owner
        longer, wide = counts.get(op.inputs[0], ()), counts.get(one.selection.mask, ())
        if any(size != 1 for dim, size in enumerate(x.owner.shape) if dim not in places):
            return False
        sizes, order = [1] * owner.dim(), sorted(places, key=lambda dim: places[dim].dim)
        shared = bool((x.owner == SHARED).any())
        for dim in order:
            at = places[dim].dim
            if x.shape[dim] != owner.shape[at]:
                return False
            grows = (dim < len(longer) and longer[dim]) or (at < len(wide) and wide[at]) or one.selection.mask < 0
            if shared and x.varies[dim] and grows:
                return False
            sizes[at] = x.owner.shape[dim]
        own = x.owner.permute([*order, *(dim for dim in range(x.owner.dim()) if dim not in order)]).reshape(sizes)
        return bool(((own == owner) | (own == SHARED)).all())

    def _put(self, op: Op, given: Sequence[Samples], name: str) -> list[Samples] | None:
        """out[places] = entries, out[places] += entries, and inverse[places] = 0, 1, 2 and so on."""
        places = self._indexed(op, given, name) if len(given) > 2 and op.node is not None else None
        if places is None or op.node is None:
            return None
        x, source, one = given[0], given[-1], next(iter(places.values()))
        owner, selection, adds = one.owner, one.selection, "add" in name or True in op.node.args[3:4]
        if selection.mask < 0 and len(x.shape) == 1 and one.once and not adds and self._counts_up(op, len(owner)):
            self.forget(op)
            self._inverse[op.outputs[0]] = selection
            return [all_of(x.shape, MIXED)]
        alone = one.once and len(places) == owner.dim()
        if min(places) or self.entries(source) is not selection or not (adds or alone):
            return None
        if source.shape[1:] != x.shape[len(places) :]:
            return None
        if any(x.shape[dim] != owner.shape[place.dim] for dim, place in places.items()):
            return None
        order = [place.dim for place in places.values()]
        gone = [dim for dim in range(owner.dim()) if dim not in order]
        layout = reduce(owner, gone)
        if bool((layout == MIXED).any()):
            return None
        layout = layout.permute([*order, *gone]).reshape(
            *(owner.shape[dim] for dim in order), *(1,) * (len(x.shape) - len(order))
        )
        if selection.mask >= 0:
            self.puts.append((op.index, selection))
        self.forget(op)
        return [combine([x, samples(x.shape, layout)], x.shape)]

    def _counts_up(self, op: Op, count: int) -> bool:
        """Whether an op writes 0, 1, 2 and so on into a tensor of so many elements."""
        numbers = self.walk.rules.contents.of(op.inputs[-1])
        shape = self.walk.graph.values[op.outputs[0]].shape
        return numbers is not None and shape == (count,) and torch.equal(numbers.long(), torch.arange(count))

    def _grouped(self, op: Op, given: Sequence[Samples]) -> list[Samples] | None:
        """A product of every entry with the matrix of its own key."""
        if op.node is None or len(op.inputs) != 3 or len(given[0].shape) != 2 or len(given[1].shape) != 3:
            return None
        ends, selection = self._ends.get(op.inputs[2], -1), self.entries(given[0])
        if selection is None or not given[1].shared or ends < 0 or ends != selection.keys:
            return None
        if given[2].shape != (given[1].shape[0],):
            return None
        return [_first(self.walk.graph.values[op.outputs[0]].shape, selection.codes)]

    def entries(self, item: Samples) -> Selection | None:
        """The selection of which a tensor has all entries, one after the other."""
        if not item.shape or any(size != 1 for size in item.owner.shape[1:]):
            return None
        owner = item.owner.flatten()
        selection = self._selections.get(int(owner[0])) if len(owner) else None
        return selection if selection is not None and torch.equal(owner, selection.codes) else None


def _first_index(op: Op) -> bool:
    """Whether an op has one index, along the first dimension."""
    args: Sequence[Any] = op.node.args if op.node is not None else ()
    if isinstance(args[1], (list, tuple)):
        return args[1][0] is not None and all(item is None for item in args[1][1:])
    return args[1] == 0


def _copies(op: Op) -> bool:
    """Whether an op hands on the same numbers in the same order; bits that are read as another type are others."""
    assert op.node is not None
    bits = name_of(op) == "view" and any(isinstance(item, torch.dtype) for item in op.node.args)
    return name_of(op) in COPIES and len(op.inputs) == 1 and not bits


def _descends(op: Op) -> bool:
    return bool(arguments_of(op).get("descending"))


def _divided(places: EntryPlaces, by: Any) -> EntryPlaces | None:
    """EntryPlaces of groups of so many tokens, where all tokens of a group are of one sample."""
    if not isinstance(by, int) or by <= 0 or places.selection.mask >= 0 or len(places.owner) % by:
        return None
    groups = places.owner.view(-1, by)
    alike = bool((groups == groups[:, :1]).all())
    once = places.once and by == 1
    return EntryPlaces(selection=places.selection, owner=groups[:, 0], once=once) if alike else None


def _ranked(op: Op, shape: Sequence[int]) -> int:
    """The size of the dimension in which an op finds places; 0 if it is not told."""
    dim = arguments_of(op).get("dim")
    return shape[dim] if isinstance(dim, int) and not isinstance(dim, bool) and shape else 0


def _along(selection: Selection, dim: int) -> EntryPlaces:
    """Where the elements of a selection are along one dimension of its mask."""
    return EntryPlaces(selection=selection, owner=selection.owner, dim=dim)


def _first(shape: tuple[int, ...], codes: torch.Tensor) -> Samples:
    """Samples that differ along the first dimension only."""
    return samples(shape, codes.view(-1, *[1] * (len(shape) - 1)))

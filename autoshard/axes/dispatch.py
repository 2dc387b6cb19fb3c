"""Tokens that are sorted by expert, worked on in that order, and put back in their own places. Sound by argument.

    keys      [6]    2 0 1 | 0 2 0       the expert of each token, of two samples
    sort             0 0 0 1 2 2         entries e, each of one token, whose place is p(e):   1 3 5 2 0 4
    x[p]                                 what entry e is made of is the token p(e) alone
    grouped product  0 0 0 | 1 | 2 2     by the matrix of the entry's own key, where groups end where its keys do
    y[inverse]       token p(e) is given what entry e became

Argument: which entries there are, and in which order, is decided by all samples, but what an entry holds is decided by
its own token, and it is put back there. Each entry has a code of its own, so that whatever takes two entries together,
or meets a number that varies along them (a capacity, a rank), mixes samples. The places themselves, how many tokens an
expert has, and where groups end depend on the whole batch: they may be used in these ways only, and mix otherwise.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoshard.axes.sample_rules import MOVES, RESHAPES
from autoshard.axes.samples import FIRST_ENTRY, MIXED, SHARED, Samples, all_of, combine, samples
from autoshard.axes.walk import name_of
from autoshard.capture.graph import Op

if TYPE_CHECKING:
    from autoshard.axes.sample_walk import SampleWalk

COPIES = frozenset({"to", "_to_copy", "alias", "contiguous", "clone", "detach"}) | RESHAPES
"""Ops that hand on the same numbers in the same order, if as many of them."""
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Types in which the number of an expert is exact."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Entries that were made of tokens.

    Attributes:
        op: what made them; `first`: code of the first entry; `layout`: which sample every token belongs to.
        keys: the value by which they are sorted in ascending order, -1 if they are not.
    """

    op: int
    first: int
    layout: torch.Tensor
    keys: int

    @property
    def codes(self) -> torch.Tensor:
        """The codes of all entries, in their order."""
        return torch.arange(self.first, self.first + len(self.layout), dtype=torch.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Of every entry, the place of its token among all; `layout`: which sample each place belongs to."""

    selection: Selection
    layout: torch.Tensor
    once: bool = True


class Dispatch:
    """What is known of places, counts and ends of groups, by value."""

    def __init__(self, walk: "SampleWalk") -> None:
        self.walk = walk
        self._places: dict[int, Places] = {}
        self._inverse: dict[int, Selection] = {}
        self._counts: dict[int, int] = {}  # of keys -> how many have each number
        self._ends: dict[int, int] = {}
        self._sorted: dict[int, int] = {}  # sorted keys -> keys
        self._selections: dict[int, Selection] = {}
        self._next = FIRST_ENTRY
        graph = walk.graph
        self._written = {graph.values[value].storage for op in graph.ops for value in op.mutates}

    def results(self, op: Op, given: Sequence[Samples]) -> list[Samples] | None:
        """The samples of what an op makes of entries, or of tokens by their places; None if it is no such op."""
        name = name_of(op)
        made: list[Samples] | None = None
        if name in ("sort", "argsort"):
            made = self._sort(op, name, given)
        elif name in ("index", "_unsafe_index", "index_select"):
            made = self._picked(op, given)
        elif name in ("index_add", "index_add_", "index_put", "index_put_"):
            made = self._put(op, name, given)
        elif name in ("_grouped_mm", "grouped_mm"):
            made = self._grouped(op, given)
        else:
            self._note(op, name)
        if made is None and op.mutates:
            self.forget(op)
        return made

    def select(self, op: Op, count: int) -> Selection:
        """Entries that an op makes, whose samples only values tell."""
        layout = torch.full((count,), MIXED, dtype=torch.int32)
        selection = Selection(op=op.index, first=self._next, layout=layout, keys=-1)
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
        for table in (self._places, self._inverse, self._counts, self._ends, self._sorted):
            for value in [value for value in table if graph.values[value].storage in storages]:
                del table[value]

    # ---- places, counts and ends of groups

    def _sort(self, op: Op, name: str, given: Sequence[Samples]) -> list[Samples] | None:
        graph, source = self.walk.graph, op.inputs[0]
        values, places = (-1, op.outputs[0]) if name == "argsort" else (op.outputs[0], op.outputs[-1])
        known = self._places.get(source)
        if known is not None and known.once and not _descends(op):
            self._inverse[places] = known.selection
            return [all_of(graph.values[value].shape, MIXED) for value in op.outputs]
        keys = given[0]
        if len(keys.shape) != 1 or keys.shared or self._of_samples(keys) is None:
            return None
        selection = Selection(
            op=op.index, first=self._next, layout=keys.full().clone(),
            keys=-1 if _descends(op) else self._root(source),
        )  # fmt: skip
        self._next += len(selection.layout)
        self._selections[selection.first] = selection
        self._places[places] = Places(selection=selection, layout=selection.layout)
        if values >= 0:
            self._sorted[values] = selection.keys
        return [
            samples(keys.shape, selection.codes) if value == values else all_of(keys.shape, MIXED)
            for value in op.outputs
        ]

    def _of_samples(self, item: Samples) -> torch.Tensor | None:
        """The numbers if every element belongs to a sample of the batch."""
        owner = item.full()
        return owner if bool(((owner >= 0) & (owner < self.walk.rows)).all()) else None

    def _note(self, op: Op, name: str) -> None:
        """What is handed on: places as another type, or in groups of tokens; how many keys there are of each."""
        graph = self.walk.graph
        if not op.inputs or len(op.outputs) != 1 or op.mutates or op.node is None or self._resized(op, name):
            return
        source, made = op.inputs[0], op.outputs[0]
        row = graph.values[made]
        if _copies(op) and row.shape == graph.values[source].shape and row.dtype in EXACT:
            for table in (self._places, self._inverse, self._counts, self._ends):
                if source in table:
                    table[made] = table[source]  # type: ignore[assignment]
        elif name in ("floor_divide", "div", "divide") and source in self._places and len(op.inputs) == 1:
            rounded = name == "floor_divide" or op.node.kwargs.get("rounding_mode") == "floor"
            divided = _divided(self._places[source], op.node.args[1]) if rounded else None
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

    # ---- tokens and entries

    def _picked(self, op: Op, given: Sequence[Samples]) -> list[Samples] | None:
        """x[places] makes entries of tokens, and x[inverse] tokens of entries."""
        index = self._index(op)
        if index is None:
            return None
        x, shape = given[0], self.walk.graph.values[op.outputs[0]].shape
        if index in self._places:
            places = self._places[index]
            return [_along(shape, places.selection.codes)] if _matches(x, places.layout) else None
        if index in self._inverse:
            selection = self._inverse[index]
            return [_along(shape, selection.layout)] if self.entries(x) is selection else None
        return None

    def _put(self, op: Op, name: str, given: Sequence[Samples]) -> list[Samples] | None:
        """out[places] += entries, and inverse[places] = 0, 1, 2 and so on."""
        index = self._index(op)
        if index not in self._places or op.node is None or len(given) != 3:
            return None
        places, source = self._places[index], op.inputs[-1]
        adds = "add" in name or (len(op.node.args) > 3 and op.node.args[3] is True)
        shape = self.walk.graph.values[op.outputs[0]].shape
        numbers = self.walk.rules.contents.of(source)
        if numbers is not None and not adds and places.once and len(shape) == 1:
            if shape == (len(places.layout),) and torch.equal(numbers.long(), torch.arange(len(places.layout))):
                self.forget(op)
                self._inverse[op.outputs[0]] = places.selection
                return [all_of(shape, MIXED)]
            return None
        if self.entries(given[-1]) is not places.selection or shape[0] != len(places.layout):
            return None
        if given[-1].shape[1:] != shape[1:] or not (adds or places.once):
            return None
        self.forget(op)
        return [combine([given[0], _along(shape, places.layout)], shape)]

    def _grouped(self, op: Op, given: Sequence[Samples]) -> list[Samples] | None:
        """A product of every entry with the matrix of its own key."""
        if op.node is None or len(op.inputs) != 3 or len(given[0].shape) != 2 or len(given[1].shape) != 3:
            return None
        ends, selection = self._ends.get(op.inputs[2], -1), self.entries(given[0])
        if selection is None or not given[1].shared or ends < 0 or ends != selection.keys:
            return None
        if given[2].shape != (given[1].shape[0],):
            return None
        return [_along(self.walk.graph.values[op.outputs[0]].shape, selection.codes)]

    def entries(self, item: Samples) -> Selection | None:
        """The selection of which a tensor has all entries, one after the other."""
        if not item.shape or any(size != 1 for size in item.owner.shape[1:]):
            return None
        owner = item.owner.flatten()
        selection = self._selections.get(int(owner[0])) if len(owner) else None
        return selection if selection is not None and torch.equal(owner, selection.codes) else None

    def _index(self, op: Op) -> int | None:
        """The only index of an op, along the first dimension."""
        if op.node is None or len(op.inputs) < 2:
            return None
        args: Sequence[Any] = op.node.args
        if isinstance(args[1], (list, tuple)):
            return op.inputs[1] if len(args[1]) == 1 or all(item is None for item in args[1][1:]) else None
        return op.inputs[1] if args[1] == 0 else None


def _copies(op: Op) -> bool:
    """Whether an op hands on the same numbers in the same order; bits that are read as another type are others."""
    assert op.node is not None
    bits = name_of(op) == "view" and any(isinstance(item, torch.dtype) for item in op.node.args)
    return name_of(op) in COPIES and len(op.inputs) == 1 and not bits


def _descends(op: Op) -> bool:
    assert op.node is not None
    return True in op.node.args[1:] or bool(op.node.kwargs.get("descending"))


def _divided(places: Places, by: Any) -> Places | None:
    """Places of groups of so many tokens, where all tokens of a group are of one sample."""
    if not isinstance(by, int) or by <= 0 or len(places.layout) % by:
        return None
    groups = places.layout.view(-1, by)
    alike = bool((groups == groups[:, :1]).all())
    once = places.once and by == 1
    return Places(selection=places.selection, layout=groups[:, 0], once=once) if alike else None


def _ranked(op: Op, shape: Sequence[int]) -> int:
    """The size of the dimension in which an op finds places; 0 if it is not told."""
    assert op.node is not None
    at = 2 if name_of(op) == "topk" else 1
    dim = op.node.args[at] if len(op.node.args) > at else op.node.kwargs.get("dim", -1 if at == 2 else None)
    return shape[dim] if isinstance(dim, int) and not isinstance(dim, bool) and shape else 0


def _matches(x: Samples, layout: torch.Tensor) -> bool:
    """Whether what stands at each place belongs to its sample, or is one number at all places."""
    if not x.shape or x.shape[0] != len(layout) or any(size != 1 for size in x.owner.shape[1:]):
        return False
    owner = x.owner.flatten().expand(len(layout))
    shared = owner == SHARED
    return bool(((owner == layout) | shared).all()) and not (bool(shared.any()) and x.varies[0])


def _along(shape: tuple[int, ...], codes: torch.Tensor) -> Samples:
    """Samples that differ along the first dimension only."""
    return samples(shape, codes.view(-1, *[1] * (len(shape) - 1)))

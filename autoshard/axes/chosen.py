"""Elements that a mask chooses, worked on one by one, and put back in their own places. Sound by argument.

    mask      [2, 3]   x . x | . x .       elements of two samples
    where     rows, columns                where each entry e has its element:   (0 0) (0 2) (1 1)
    x[mask]   entries                      what entry e is made of is its own element alone
    y.index_add_(0, rows, entries)         row(e) is given what entry e became

Argument: an entry is there if its own sample says so, what it holds is decided by its own sample, and it goes to where
it came from. A part of the batch has the entries of its own samples, in the same order. Each entry has a code of its
own, as in `dispatch`: whatever takes two together, or meets a number that varies along them, mixes samples. How many
entries there are depends on all samples, and so do the places of those before: places may be used as an index only, and
of what has so many elements Python may not read the size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from autoshard.axes.dispatch import COPIES, Dispatch, Selection
from autoshard.axes.rules import is_pointwise
from autoshard.axes.samples import MIXED, SHARED, Samples, all_of, combine, reduce, samples
from autoshard.capture.graph import Op, name_of
from autoshard.capture.traits import traits_of

if TYPE_CHECKING:
    from autoshard.axes.sample_walk import SampleWalk

_LISTED = ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_")
_PUT = ("index_add", "index_add_", "index_put", "index_put_", "_index_put_impl_")
LEAST = 2
"""Fewer entries would not show what takes two of them together."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Choice:
    """What a mask chooses; `owner`: the sample of each element of the mask, in its shape; `mask`: its value."""

    selection: Selection
    owner: torch.Tensor
    mask: int

    def along(self, dim: int) -> torch.Tensor:
        """The sample of each place along a dimension, MIXED where elements of several have it."""
        return reduce(self.owner, [d for d in range(self.owner.dim()) if d != dim]).flatten()


class Chosen:
    """What is known of elements that masks choose, by value.

    Attributes:
        sized: values as large as masks say, and what was made of them.
        puts: (op, choice) of what puts entries back.
    """

    def __init__(self, walk: "SampleWalk", dispatch: Dispatch) -> None:
        self.walk = walk
        self.dispatch = dispatch
        self.sized: set[int] = set()
        self.puts: list[tuple[int, Choice]] = []
        self._choices: dict[Any, Choice] = {}
        self._rows: dict[int, Choice] = {}  # nonzero: the places of each entry, one after the other
        self._places: dict[int, tuple[Choice, int]] = {}
        graph = walk.graph
        self._written = {graph.values[value].storage for op in graph.ops for value in op.mutates}

    def results(self, op: Op, given: Sequence[Samples]) -> list[Samples] | None:
        """The samples of what an op makes of what a mask chooses; None if it is no such op."""
        name = name_of(op)
        made: list[Samples] | None = None
        if (name == "where" and len(op.inputs) == 1) or name in ("nonzero", "nonzero_numpy"):
            made = self._found(op, given, name)
        elif name in (*_LISTED, "index_select", "index_add", "index_add_"):
            made = self._indexed(op, given, name)
        elif op.inputs and not op.mutates:
            self._note(op, name)
        if not self.sized.isdisjoint(op.inputs) and not (name in _PUT and made is not None):
            self.sized.update(value for value in op.outputs if value not in op.inputs)
        return made

    # ---- places

    def _found(self, op: Op, given: Sequence[Samples], name: str) -> list[Samples] | None:
        choice = self._choice(op, op.inputs[0], given[0], op.outputs[0])
        if choice is None:
            return None
        if name == "nonzero":
            self._rows[op.outputs[0]] = choice
        else:
            self._places.update((value, (choice, dim)) for dim, value in enumerate(op.outputs))
        self.sized.update(op.outputs)
        return [all_of(self.walk.graph.values[value].shape, MIXED) for value in op.outputs]

    def _choice(self, op: Op, mask: int, item: Samples, entries: int, at: int = 0) -> Choice | None:
        """What a mask chooses. `entries`: a value that has as many of them along a dimension."""
        graph, other = self.walk.graph, self.walk.other
        count, its = graph.values[entries].shape[at], other.values[entries].shape[at]
        if graph.values[mask].storage in self._written or not item.shape or count < LEAST or count == its:
            return None
        owner = item.full()
        if not bool(((owner >= 0) & (owner < self.walk.rows)).all()):
            return None
        key = self._key(mask)
        known = self._choices.get(key)
        if known is None:
            selection = self.dispatch.select(op, count)
            known = self._choices[key] = Choice(selection=selection, owner=owner.clone(), mask=mask)
        return known if len(known.selection.layout) == count else None

    def _key(self, mask: int, depth: int = 3) -> Any:
        """What computes a mask, the same for `~mask` wherever it is written."""
        row = self.walk.graph.values[mask]
        op = self.walk.graph.ops[row.op] if row.op >= 0 else None
        if op is None or op.node is None or not depth or row.storage in self._written or len(op.outputs) > 1:
            return mask
        if not is_pointwise(op.target) or traits_of(op.target).random:
            return mask
        plain = [None if isinstance(item, torch.fx.Node) else item for item in op.node.args]
        return op.target, tuple(self._key(value, depth - 1) for value in op.inputs), repr((plain, op.node.kwargs))

    def _note(self, op: Op, name: str) -> None:
        """Places that are handed on: of one dimension, or as another type."""
        graph, source = self.walk.graph, op.inputs[0]
        assert op.node is not None
        args: Sequence[Any] = op.node.args
        if source in self._rows and name == "unbind" and len(args) > 1 and args[1] in (1, -1):
            self._places.update((value, (self._rows[source], dim)) for dim, value in enumerate(op.outputs))
        elif source in self._rows and name == "select" and args[1] in (1, -1) and args[2] >= 0:
            self._places[op.outputs[0]] = self._rows[source], args[2]
        elif source in self._places and name in COPIES and len(op.inputs) == len(op.outputs) == 1:
            row = graph.values[op.outputs[0]]
            if row.shape == graph.values[source].shape and row.dtype in (torch.int32, torch.int64):
                self._places[op.outputs[0]] = self._places[source]

    # ---- elements and entries

    def _indexed(self, op: Op, given: Sequence[Samples], name: str) -> list[Samples] | None:
        dims = self._dims(op, given, name)
        if dims is None:
            return None
        choice, places = dims
        if name in _PUT:
            return self._put(op, given, name, choice, places)
        x, at = given[0], min(dim for dim, _ in places)
        shape = self.walk.graph.values[op.outputs[0]].shape
        if len(shape) <= at or shape[at] != len(choice.selection.layout) or not self._is_of(op, x, choice, places):
            return None
        self.sized.update(op.outputs)
        codes = choice.selection.codes.view(*(1,) * at, -1, *(1,) * (len(shape) - at - 1))
        return [samples(shape, codes)]

    def _dims(self, op: Op, given: Sequence[Samples], name: str) -> tuple[Choice, list[tuple[int, int]]] | None:
        """(choice, [(dimension, which of the mask's stands for it)]) of an op whose only indices are its places."""
        assert op.node is not None
        args: Sequence[Any] = op.node.args
        if name not in _LISTED:
            place = self._places.get(op.inputs[1])
            dim = args[1] % len(given[0].shape) if given[0].shape else 0
            return (place[0], [(dim, place[1])]) if place is not None else None
        which = [dim for dim, index in enumerate(args[1]) if index is not None]
        values = op.inputs[1 : 1 + len(which)]
        if len(values) != len(which) or not which or which != list(range(which[0], which[0] + len(which))):
            return None
        if self.walk.graph.values[values[0]].dtype is torch.bool:
            if len(values) > 1:
                return None
            count = op.outputs[0] if name in ("index", "_unsafe_index") else op.inputs[-1]
            known = self._choices.get(self._key(values[0]))
            if name in ("index", "_unsafe_index"):
                known = self._choice(op, values[0], given[1], count, which[0])
            return (known, [(which[0] + d, d) for d in range(known.owner.dim())]) if known is not None else None
        places = [self._places.get(value) for value in values]
        if any(place is None or place[0] is not (places[0] or (None,))[0] for place in places):
            return None
        choice = places[0][0]  # type: ignore[index]
        return choice, [(dim, place[1]) for dim, place in zip(which, places, strict=True) if place is not None]

    def _is_of(self, op: Op, x: Samples, choice: Choice, places: Sequence[tuple[int, int]]) -> bool:
        """Whether what stands in each place of a mask belongs to the sample of the mask there, or to none."""
        counts = self.walk.rules.counts
        longer, wide = counts.get(op.inputs[0], ()), counts.get(choice.mask, ())
        sizes = [1] * choice.owner.dim()
        order, taken = [], [dim for dim, _ in places]
        if len({one for _, one in places}) != len(places):
            return False
        if any(size != 1 for dim, size in enumerate(x.owner.shape) if dim not in taken):
            return False
        shared = bool((x.owner == SHARED).any())
        for dim, one in sorted(places, key=lambda place: place[1]):
            if x.shape[dim] != choice.owner.shape[one]:
                return False
            grows = (dim < len(longer) and longer[dim]) or (one < len(wide) and wide[one])
            if shared and x.varies[dim] and grows:
                return False
            sizes[one] = x.owner.shape[dim]
            order.append(dim)
        owner = x.owner.permute([*order, *(dim for dim in range(x.owner.dim()) if dim not in order)]).reshape(sizes)
        return bool(((owner == choice.owner) | (owner == SHARED)).all())

    def _put(self, op: Op, given: Sequence[Samples], name: str, choice: Choice,
             places: Sequence[tuple[int, int]]) -> list[Samples] | None:  # fmt: skip
        """out[places] = entries, or out[places] += entries."""
        assert op.node is not None
        x, source = given[0], given[-1]
        args: Sequence[Any] = op.node.args
        adds = "add" in name or (len(args) > 3 and args[3] is True)
        whole = len(places) == choice.owner.dim()
        if places[0][0] or self.dispatch.entries(source) is not choice.selection or not (adds or whole):
            return None
        if source.shape[1:] != x.shape[len(places) :]:
            return None
        if any(x.shape[dim] != choice.owner.shape[one] for dim, one in places):
            return None
        gone = [one for one in range(choice.owner.dim()) if one not in [place for _, place in places]]
        owner = reduce(choice.owner, gone)
        if bool((owner == MIXED).any()):
            return None
        order = [one for _, one in places]
        owner = owner.permute([*order, *gone]).reshape(*(choice.owner.shape[one] for one in order),
                                                       *(1,) * (len(x.shape) - len(order)))  # fmt: skip
        self.puts.append((op.index, choice))
        self.dispatch.forget(op)
        return [combine([x, samples(x.shape, owner)], x.shape)]

# mypy: ignore-errors
"""Samples of what is picked, or written, by index.

x[torch.arange(n), best]     numbers that code alone decides are known: sample i of x
x[:, order]                  any others: all along the dimension are taken together
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.axes.given import computed, literals, written_storages
from autoshard.axes.parts_of_batch import has_constant_bound
from autoshard.axes.samples import SHARED, Samples, combine, join, samples, taken_together, whole
from autoshard.capture.graph import ModelGraph, Op

NAMES = frozenset({"index", "_unsafe_index", "index_select", "index_put", "index_put_", "_index_put_impl_", "index_add",
                   "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_"})  # fmt: skip
MOST_NUMBERS = 1 << 16
"""Elements of a tensor of integers that is computed again."""


class Contents:
    """Numbers that code alone decides: not the batch, not a weight or a buffer.

    `counts`: by value, which of its dimensions are longer for a larger batch.
    """

    def __init__(self, graph: ModelGraph, counts: Mapping[int, Sequence[bool]] | None = None) -> None:
        self._graph = graph
        self._counts = counts or {}
        self._known: dict[int, torch.Tensor | None] = {}
        self._written = written_storages(graph)
        self.literals = literals(graph)

    def of(self, value: int) -> torch.Tensor | None:
        """The numbers of a value; None if they are not known."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def is_longer(self, value: int) -> bool:
        """Whether there are more numbers for a larger batch."""
        return any(self._counts.get(value, ()))

    def shape(self, value: int) -> tuple[int, ...]:
        """The shape of a value."""
        return self._graph.values[value].shape

    def _found(self, value: int) -> torch.Tensor | None:
        row = self._graph.values[value]
        if row.storage in self._written or torch.Size(row.shape).numel() > MOST_NUMBERS:
            return None
        if row.op < 0:
            return self.literals.get(value)
        op = self._graph.ops[row.op]
        if op.inputs and has_constant_bound(op, self._counts.get(op.inputs[0], ())):
            return None  # it is all of it for so few samples only
        made = computed(op, [self.of(one) for one in op.inputs])
        found = made[op.outputs.index(value)] if made is not None else None
        return found if isinstance(found, torch.Tensor) and found.shape == row.shape else None


def picked(
    contents: Contents, name: str, op: Op, given: Sequence[Samples], shape: tuple[int, ...]
) -> list[Samples] | None:
    """The samples of the result of an op that picks or writes by index; None if this is not the place to know."""
    assert op.node is not None
    args = op.node.args
    inputs = dict(zip(_nodes(op), zip(op.inputs, given, strict=True), strict=True))
    if name in ("index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"):
        indices: list[Any] = [None if item is None else inputs[item] for item in args[1]]  # type: ignore[union-attr]
    else:
        dim = args[1] % len(given[0].shape) if given[0].shape else 0  # type: ignore[operator]
        indices = [*[None] * dim, inputs[args[2]]]
    values = [contents.of(item[0]) if item is not None else None for item in indices]
    dtypes = [None if item is None else contents._graph.values[item[0]].dtype for item in indices]
    masks = [d for d, dtype in enumerate(dtypes) if dtype in (torch.bool, torch.uint8)]
    reads = name in ("index", "_unsafe_index", "index_select")
    if masks:
        if reads or len(indices) != 1:
            return None
        return _masked(given[0], indices[0][1], given[-1] if len(given) > 2 else None, shape)
    listed = [None if item is None else item[1] for item in indices]
    if reads:
        return [_taken(given[0], listed, values, shape)]
    source = given[-1] if len(given) > 1 + sum(item is not None for item in indices) else None
    return [_written(name, op, given[0], listed, values, source)]


def _nodes(op: Op) -> list[Any]:
    """The nodes among the arguments of an op, in the order of its inputs."""
    assert op.node is not None
    found: list[Any] = []
    for item in (*op.node.args, *op.node.kwargs.values()):
        for part in item if isinstance(item, (list, tuple)) else [item]:
            if isinstance(part, torch.fx.Node):
                found.append(part)
    return found


def _taken(
    x: Samples, indices: Sequence[Samples | None], values: Sequence[torch.Tensor | None], shape: tuple[int, ...]
) -> Samples:
    given = [d for d, index in enumerate(indices) if index is not None]
    owner = taken_together(x, [d for d in given if values[d] is None])
    spread = torch.broadcast_shapes(*(indices[d].shape for d in given))  # type: ignore[union-attr]
    numbers: list[Any] = []
    for d in range(len(indices)):
        known = values[d]
        if indices[d] is None:
            numbers.append(slice(None))
        elif known is None or owner.shape[d] == 1:
            numbers.append(torch.zeros((1,) * len(spread), dtype=torch.int64))
        else:
            numbers.append(known.long())
    taken = owner[tuple(numbers)]
    together = given == list(range(given[0], given[-1] + 1))
    at = given[0] if together else 0
    others = [d for d in range(len(x.shape)) if d not in given]
    varies = [x.varies[d] for d in others]
    parts = [Samples(shape=shape, owner=taken, varies=(*varies[:at], *[False] * len(spread), *varies[at:]))]
    after = len(others) - at
    for d in given:
        index = indices[d]
        assert index is not None
        flags = [bool(flag and x.varies[d]) for flag in index.varies]
        own = (
            torch.full((), SHARED, dtype=torch.int32).expand(index.owner.shape)
            if values[d] is not None
            else index.owner
        )
        left = len(spread) - len(index.shape)
        parts.append(Samples(
            shape=shape, owner=own.reshape((1,) * (at + left) + tuple(index.owner.shape) + (1,) * after),
            varies=(*[False] * (at + left), *flags, *[False] * after),
        ))  # fmt: skip
    return combine(parts, shape)


def _masked(x: Samples, mask: Samples, source: Samples | None, shape: tuple[int, ...]) -> list[Samples] | None:
    """x[mask] = one number: as `where` would."""
    if source is None or torch.Size(source.shape).numel() != 1:
        return None
    after = len(x.shape) - len(mask.shape)
    spread = Samples(
        shape=x.shape,
        owner=mask.owner.reshape(*mask.owner.shape, *(1,) * after),
        varies=(*mask.varies, *(False,) * after),
    )
    return [combine([x, spread, samples(x.shape, whole(source))], shape)]


def _written(
    name: str, op: Op, x: Samples, indices: Sequence[Samples | None], values: Sequence[torch.Tensor | None],
    source: Samples | None,
) -> Samples:  # fmt: skip
    """x with a part of it written over, or added to."""
    given = [d for d, index in enumerate(indices) if index is not None]
    exact = all(values[d] is not None for d in given)
    if exact and source is not None:
        assert op.node is not None
        owner = x.full().clone()
        adds = "add" in name or (len(op.node.args) > 3 and op.node.args[3] is True)
        place = tuple(slice(None) if values[d] is None else values[d].long() for d in range(len(indices)))  # type: ignore[union-attr]
        new = source.full() if name.startswith(("index_put", "_index_put")) else source.owner
        if not name.startswith(("index_put", "_index_put")):
            new = new.expand(owner[place].shape)
        owner[place] = join(owner[place], new.expand(owner[place].shape)) if adds else new
        return samples(x.shape, owner, any(source.varies) or x.varies)
    codes = [whole(index) for index in indices if index is not None]
    owner = taken_together(x, given)
    if source is not None:
        codes.append(whole(source))
    for code in codes:
        owner = join(owner, torch.full((), code, dtype=torch.int32))
    return samples(x.shape, owner, True)

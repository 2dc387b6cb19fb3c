"""Rows of a graph with other figures: as `dataclasses.replace`, column by column, for thousands of them."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from itertools import compress, count, repeat, starmap
from operator import attrgetter, ne
from typing import Any, TypeVar

Row = TypeVar("Row")


def changed(rows: Sequence[Row], **columns: Sequence[Any]) -> tuple[Row, ...]:
    """Return rows of a dataclass with slots with other values in some columns; equal rows are kept. Nothing is checked.

    changed(graph.values, nbytes=[…])
    """
    found = list(rows)
    before = zip(*(map(attrgetter(name), rows) for name in columns), strict=True)
    after = zip(*columns.values(), strict=True)
    at = list(compress(count(), starmap(ne, zip(before, after, strict=True))))
    if at:
        kind: Any = type(rows[0])
        made = list(map(object.__new__, repeat(kind, len(at))))
        kept = [rows[i] for i in at]
        for name, put in _slots(kind):
            column = columns.get(name)
            values = map(attrgetter(name), kept) if column is None else map(column.__getitem__, at)
            deque(map(put, made, values), maxlen=0)  # does nothing but call it for all of them
        for i, row in zip(at, made, strict=True):
            found[i] = row
    return tuple(found)


@cache
def _slots(kind: type) -> tuple[tuple[str, Callable[[Any, Any], None]], ...]:
    """What writes each field."""
    return tuple((name, kind.__dict__[name].__set__) for name in kind.__dict__["__slots__"])

"""Remember the latest thing that was worked out of a graph: it is asked for several times in a row."""

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

from autoshard.capture.graph import ModelGraph

Found = TypeVar("Found")


class Latest(Generic[Found]):
    """One result per graph, with what was asked. What is kept must not refer to its graph: it would keep it alive."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[ModelGraph, tuple[object, Found]] = WeakKeyDictionary()

    def of(self, graph: ModelGraph, asked: object, make: Callable[[], Found]) -> Found:
        """What was made when the same was asked of this graph last, or what `make` makes now."""
        known = self._known.get(graph)
        if known is not None and known[0] == asked:
            return known[1]
        found = make()
        self._known[graph] = asked, found
        return found

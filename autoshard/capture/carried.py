"""What modules keep on attributes from one forward to the next: a weight made of two others, an attention map.

    forward 1    op 7 makes it, the module keeps it ──────────────────────────▶
    forward 2    as it was left ──────────▶ op 7 makes another: the old one goes at time 8

So in the long run both are there while op 7 runs.
"""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autoshard.capture.graph import Storage, Value
from autoshard.capture.ledger import Ledger
from autoshard.nested import flat_tensors

_HOLDERS = (torch.Tensor, list, tuple, dict, deque)
_TABLES = ("_parameters", "_buffers", "_modules")


class Carried:
    """Notes when the attributes of modules were first set in a run, and finds what they have at its end."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._set: dict[tuple[int, str], int] = {}  # (id of a module, attribute) -> time

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what is set on modules inside."""
        set_attribute, thread = nn.Module.__setattr__, threading.get_ident()

        def noted(module: nn.Module, name: str, value: Any) -> None:
            set_attribute(module, name, value)
            if threading.get_ident() != thread:
                return
            self._set.setdefault((id(module), name), self._ledger.now)

        nn.Module.__setattr__ = noted  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            nn.Module.__setattr__ = set_attribute  # type: ignore[method-assign]

    def found(self, model: nn.Module) -> list[tuple[int, int | None]]:
        """(value, when its attribute was first set) of the tensors that modules have now; None: it was not set."""
        kept = []
        for module in model.modules():
            for name, item in vars(module).items():
                if name not in _TABLES and isinstance(item, _HOLDERS):
                    if not isinstance(item, torch.Tensor) and not item:
                        continue  # tables of hooks, a dozen in every module
                    tensors = flat_tensors(list(item) if isinstance(item, deque) else item)
                    values = [value for tensor in tensors if (value := self._ledger.find(tensor)) is not None]
                    kept += [(value, self._set.get((id(module), name))) for value in values]
        return kept


def left_by_the_last(
    found: Sequence[tuple[int, int | None]], values: Sequence[Value], storages: Sequence[Storage]
) -> tuple[tuple[int, int], ...]:
    """Return (storage, time at which the next forward lets go of it) of what ops made; in place of it, if unknown."""
    until: dict[int, int] = {}
    for value, time in found:
        row = values[value]
        if row.op >= 0 and storages[row.storage].kind == "activation":
            until[row.storage] = max(until.get(row.storage, 0), row.op + 1 if time is None else time)
    return tuple((storage, time) for storage, time in until.items() if time)

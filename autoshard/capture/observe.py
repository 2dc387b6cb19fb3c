"""What modules are called with: the arguments of their first calls, without the memory of their tensors.

    block(x, mask, cache=cache)   ──▶   ((TensorSpec,), {"mask": TensorSpec(value=…), "cache": copy of it as it was})

With `fill_specs` they are arguments again, with which a block can be run alone. What decides which way its code goes is
as it was: integers, booleans, masks and tables have their values; a cache is neither left out nor filled by this call;
tensors that were one object (`query is key`) are one again.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.decode import opaque_tensors
from autoshard.capture.fake import REAL_ELEMENTS
from autoshard.capture.record import Recorder
from autoshard.torch_private import no_modes

CALLS = 2
"""How many calls of a module are noted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSpec:
    """Stands for a tensor: one object for each. `value` is a copy where its values were known, else None."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    value: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict) -> Any:
        make = memo.get(TensorSpec)
        return self if make is None else make(self)


def fill_specs(arguments: Any, make: Callable[[TensorSpec], torch.Tensor]) -> Any:
    """Return a copy of arguments with `make(spec)`, called once for each, in place of specs, inside of objects too."""
    return copy.deepcopy(arguments, {TensorSpec: make})  # type: ignore[dict-item]


class Observer:
    """Notes the arguments of the first calls of some modules of a model, in its first forward.

    A generation calls the model again, with a state that the modules made themselves: those calls are left out.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str]) -> None:
        self.calls: dict[str, list[tuple[tuple, dict[str, Any]]]] = {path: [] for path in paths}
        self._modules = {id(module): module for module in model.modules()}
        self._recorder: Recorder | None = None
        self._begun: set[str] = set()  # modules called by nobody else: the model, or its encoder before it
        self._again = False

    def begin(self, recorder: Recorder) -> None:
        """A run begins; what was noted of another one, which failed, is forgotten."""
        self.calls = {path: [] for path in self.calls}
        self._recorder, self._begun, self._again = recorder, set(), False

    def note(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """A module is about to be called."""
        assert self._recorder is not None
        if not self._recorder.calls.running:
            self._again |= path in self._begun
            self._begun.add(path)
        calls = self.calls.get(path)
        if calls is not None and len(calls) < CALLS and not self._again:
            with no_modes():
                calls.append(self._frozen(args, kwargs))

    def _frozen(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """A copy of arguments with specs in place of tensors; modules of the model are kept."""
        memo: dict[int, Any] = dict(self._modules)
        specs: dict[int, TensorSpec] = {}
        for tensor in (*(tensor for _, tensor in nested.tensors_in((args, kwargs))), *opaque_tensors((args, kwargs))):
            if id(tensor) not in specs:
                memo[id(tensor)] = specs[id(tensor)] = self._spec(tensor)
        try:
            return copy.deepcopy((args, kwargs), memo)
        except Exception:  # an object that can't be copied is kept, unless its tensors are those of the capture
            args = tuple(_without_tensors(item) for item in args)
            kwargs = {name: _without_tensors(item) for name, item in kwargs.items()}
            frozen: Any = nested.map_tensors((args, kwargs), lambda tensor: specs[id(tensor)])  # type: ignore[arg-type, return-value]
            return frozen

    def _spec(self, tensor: torch.Tensor) -> TensorSpec:
        assert self._recorder is not None
        known = not self._recorder.engine.unknown(tensor) and tensor.numel() <= REAL_ELEMENTS
        shape = () if tensor.is_nested else tuple(tensor.shape)
        return TensorSpec(shape=shape, dtype=tensor.dtype, value=tensor.detach().clone() if known else None)


def _without_tensors(argument: Any) -> Any:
    return None if next(opaque_tensors(argument), None) is not None else argument

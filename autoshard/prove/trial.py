"""One run of one rank's block, watched: the first function whose result is not of the expected shape ends it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard import nested
from autoshard.axes.axis import Leaf
from autoshard.capture.sites import PROPERTIES
from autoshard.prove.expected import Expected, Key
from autoshard.runtime.lengths import sizes_of
from autoshard.sharding import DROPOUTS
from autoshard.torch_private import opened


class Differs(Exception):
    """A result has another shape than it should have on this rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run went: `reached` counts the functions that gave what they should; `failed` is the one that did not.

    `failed` is None if all went well; `message` says what was wrong with it, `lengths` what integers it was given, and
    `sizes` how many of them are sizes of which such a call shows by itself that they do not fit.
    """

    reached: int
    failed: Key | None
    message: str = ""
    lengths: dict[str, int] = field(default_factory=dict)
    sizes: int = 0


class Watch(TorchFunctionMode):
    """Compares the results of every torch function with what one rank should see."""

    def __init__(self, expected: dict[Key, list[Expected]], slices: dict[Leaf, int]) -> None:
        super().__init__()
        self.reached = 0
        self.current: Key | None = None
        self.given: tuple[tuple, dict[str, Any]] = (), {}
        self._expected, self._slices = expected, slices
        self._stack: list[tuple[str, int, dict[str, int]]] = []
        self._calls: dict[str, int] = {}

    def enter(self, path: str) -> None:
        """A module begins to run."""
        time = self._calls.get(path, 0)
        self._calls[path] = time + 1
        self._stack.append((path, time, {}))

    def leave(self) -> None:
        """The module that began last has run."""
        self._stack.pop()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if not self._stack or name in PROPERTIES:
            return func(*args, **(kwargs or {}))
        body = opened(func)
        if body is not None:
            with self:
                return body(*args, **(kwargs or {}))
        occurrence = self._stack[-1][2].get(name, 0)
        for _, _, counts in self._stack:
            counts[name] = counts.get(name, 0) + 1
        path, time, _ = self._stack[-1]
        key = (path, time, name, occurrence)
        self.current, self.given = key, (args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if key in self._expected and name not in DROPOUTS:  # whose masks are drawn for the whole tensor
            self._compare(result, self._expected[key])
            self.reached += 1
        return result

    def _compare(self, result: Any, expected: list[Expected]) -> None:
        found = dict(nested.tensors_in(result))
        for row in expected:
            wanted = row.local_shape(self._slices)
            shape = tuple(found[row.path].shape) if row.path in found else wanted
            # Other dimensions may depend on values, which are wrong on a rank that runs alone.
            if len(shape) != len(wanted) or any(shape[dim] != wanted[dim] for dim in row.cut_dims(self._slices)):
                raise Differs(f"{shape} where {wanted} is due")


def run_watched(block: nn.Module, args: tuple, kwargs: dict[str, Any], watch: Watch) -> Outcome:
    """Run a block under a watch. What the block raises is an outcome, not an error."""
    with _reported(block, watch), torch.no_grad():
        try:
            with watch:
                block(*args, **kwargs)
        except Exception as error:
            message = " ".join(str(error).split())[:200]
            lengths = {path: item for path, item in nested.leaves_in(watch.given) if type(item) is int}
            failed = watch.current or ("", 0, "", 0)
            seen = sizes_of(failed[2], *watch.given)
            sizes = 0 if seen is None else len(seen[0])
            return Outcome(reached=watch.reached, failed=failed, message=message, lengths=lengths, sizes=sizes)
    return Outcome(reached=watch.reached, failed=None)


@contextmanager
def _reported(block: nn.Module, watch: Watch) -> Iterator[None]:
    """Tell the watch when modules of the block begin and end."""
    handles = []
    for path, module in block.named_modules():

        def enter(module: nn.Module, args: Any, path: str = path) -> None:
            watch.enter(path)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            watch.leave()

        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

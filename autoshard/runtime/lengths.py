"""Lengths that code reads from whole tensors, at calls that say how all of a tensor, or of a dimension, is divided.

    y.view(rows, length, width)     y has half of its columns here: width / 2 is what fits

Such a call shows by itself whether it needs another length: what has not been cut has as many elements as it says. So
it does not matter how many calls came before, as that differs between runs with and without a cache or a mask.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from autoshard.errors import ApplyError
from autoshard.nested import item_at, leaves_in, replace_at
from autoshard.runtime.steps import Step


def sizes_of(function: str, args: tuple, kwargs: dict) -> tuple[tuple[int, ...], int, bool] | None:
    """(sizes that a call names, the elements there are, whether they fit together); None if that can't be told.

    view(x [2, 6, 12], 2, 6, 24)  ->  (2, 6, 24), 144, False
    """
    if kwargs.keys() - {"dim"} or len(args) < 2:
        return None
    tensor, sizes, dim = args[0], args[1], kwargs.get("dim", 0)
    if function in ("view", "reshape"):
        sizes, dim = sizes if isinstance(sizes, (tuple, list)) else args[1:], None
    elif function == "unflatten" and len(args) == 3:
        sizes, dim = args[2], args[1]
    elif function != "split":
        return None
    elif len(args) > 2:
        dim = args[2]
    if not isinstance(sizes, (tuple, list)) or not all(isinstance(size, int) and size >= 0 for size in sizes):
        return None
    there = tensor.numel() if dim is None else tensor.shape[dim]
    return tuple(sizes), there, (sum if function == "split" else prod)(sizes) == there


class Lengths:
    """The lengths that calls of one function may need, of all that were found in a module: what fits is used.

    Stands in for their steps; see `Step`.
    """

    __slots__ = ("action", "steps")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.action = steps[0].action
        self.steps = tuple(steps)

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call with the lengths that fit; as it is if it fits, or if nothing does. Raises `ApplyError` in doubt."""
        seen = sizes_of(self.action.function, args, kwargs)
        if seen is not None and not seen[2]:
            args, kwargs = self._fitting((args, kwargs), len(seen[0]))
        return call(*args, **kwargs)

    def _fitting(self, arguments: tuple[tuple, dict], count: int) -> tuple[tuple, dict]:
        """Those lengths that are as in the plan come first; others may have grown with the batch."""
        steps = [step for step in self.steps if step.action.dim == count]
        same = [step for step in steps if step.length and item_at(arguments, step.action.argument) == step.length.whole]
        for tried in (same, steps):
            found: dict[tuple[int, ...], tuple[tuple, dict]] = {}
            for chosen in (tried, *([step] for step in tried)):
                changed = _changed(arguments, chosen)
                seen = sizes_of(self.action.function, *changed)
                if seen is not None and seen[2]:
                    found[seen[0]] = changed
            if len(found) > 1:
                raise ApplyError(
                    f"{self.steps[0].where} was given {_numbers(arguments)}, of which one is of the whole tensor, and "
                    "it can't be told which. Plan again with inputs like these."
                )
            for changed in found.values():
                return changed
        return arguments


def _changed(arguments: tuple[tuple, dict], steps: Sequence[Step]) -> tuple[tuple, dict]:
    for step in steps:
        length = item_at(arguments, step.action.argument)
        assert step.length is not None
        if step.length.takes(length):
            arguments = replace_at(arguments, step.action.argument, step.length(length))
    return arguments


def _numbers(arguments: tuple[tuple, dict]) -> list[int]:
    return [item for _, item in leaves_in(arguments) if isinstance(item, int)]

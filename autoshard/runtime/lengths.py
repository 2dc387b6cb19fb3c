"""Lengths that code reads from whole tensors, at calls that say how all of a tensor, or of a dimension, is divided.

    y.view(rows, length, width)     y has half of its columns here: width / 2 is what fits

Such a call shows by itself whether it needs another length: what has not been cut has as many elements as it says. So
it does not matter how many calls came before, as that differs between runs with and without a cache or a mask.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from autoshard.nested import item_at, replace_at
from autoshard.runtime.steps import Step


def demanded(function: str, args: tuple, kwargs: dict) -> tuple[int, int] | None:
    """(elements that a call says there are, those there are); None if this can't be told.

    view(x [2, 6, 12], 2, 6, 24)  ->  288, 144
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
    return (sum if function == "split" else prod)(sizes), there


class Lengths:
    """The lengths that calls of one function may need, of all that were found in a module: what fits is used.

    Stands in for their steps; see `Step`.
    """

    __slots__ = ("action", "steps")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.action = steps[0].action
        self.steps = tuple(steps)

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call with the lengths that fit; as it is if it fits, or if nothing does."""
        there = demanded(self.action.function, args, kwargs)
        if there is None or there[0] == there[1]:
            return call(*args, **kwargs)
        steps = [step for step in self.steps if isinstance(item_at((args, kwargs), step.action.argument), int)]
        for chosen in (steps, *([step] for step in steps)):
            changed = _changed((args, kwargs), chosen)
            there = demanded(self.action.function, *changed)
            if there is not None and there[0] == there[1]:
                return call(*changed[0], **changed[1])
        return call(*args, **kwargs)


def _changed(arguments: tuple[tuple, dict], steps: Sequence[Step]) -> tuple[tuple, dict]:
    for step in steps:
        length = item_at(arguments, step.action.argument)
        assert step.length is not None
        if step.length.takes(length):
            arguments = replace_at(arguments, step.action.argument, step.length(length))
    return arguments

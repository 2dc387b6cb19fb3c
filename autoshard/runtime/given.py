"""What a forward was given where it runs in parts or on several ranks, each with some of its own.

What is put into lists and dicts there, the caller would not see. Tensors that a forward writes into are refused at plan
time.
"""

from collections.abc import Iterator
from typing import Any

import torch

from autoshard.errors import ApplyError
from autoshard.nested import leaves_in


class Given:
    """The containers among the arguments of a forward, as it got them."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]) -> None:
        found = [(f"positional argument {place}", value) for place, value in enumerate(args)]
        found += [(f"argument {name}", value) for name, value in kwargs.items()]
        self.known = [(where, one, _items(one)) for where, value in found for one in _containers(value)]

    def check(self, name: str, why: str) -> None:
        """Raise `ApplyError` if one was changed since. `name`: of the model; `why`: nobody sees it."""
        for where, one, items in self.known:
            now = _items(one)
            if len(now) != len(items) or any(a is not b for a, b in zip(now, items, strict=True)):
                raise ApplyError(
                    f"the forward of {name} changes its {where} in place, and {why}. Let it change a copy, or place "
                    'whole modules (strategy="balanced").'
                )


def picks_tokens(arguments: tuple[tuple, dict], count: int, ranks: int) -> str:
    """Name an argument by which code may pick tokens, as in `x[:, -n:]`; "" if there is none.

    Only those of which a rank with `count` of the tokens would have enough of its own, and all ranks together others:
    what picks fewer is seen by the size of the result.
    """
    for path, leaf in leaves_in(arguments):
        if isinstance(leaf, torch.Tensor):
            found = leaf.dim() == 1 and leaf.numel() == count and not leaf.is_floating_point()
        else:
            numbers = (leaf.start, leaf.stop) if isinstance(leaf, slice) else (leaf,)
            whole = [abs(one) for one in numbers if isinstance(one, int) and not isinstance(one, bool)]
            found = any(count <= one < count * ranks for one in whole)
        if found:
            return path.partition(".")[2]
    return ""


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, dict)):
        yield value
    for item in _items(value):
        yield from _containers(item)


def _items(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [*value, *value.values()]
    return list(value) if isinstance(value, (list, tuple)) else []

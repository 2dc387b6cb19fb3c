"""What ops of another position gave before, for arguments of the same shapes: most of what a token costs there.

    key (op, shapes by number, other arguments)  ──▶  shapes of the result

Only plain cases: all tensors are of that position, nothing is written, and no value is read.
"""

from typing import Any

import torch

from autoshard.runtime.remote_tensor import StageTensor, traits_of
from autoshard.runtime.shape_rules import Shape, shape_of

_REMEMBERED = 20_000
_MISSING = object()


class Remembered:
    """The results of one model's ops, by what they were given."""

    def __init__(self) -> None:
        self._numbers: dict[Shape, int] = {}
        self._results: dict[tuple, Any] = {}

    def key(self, position: int, func: Any, args: tuple, kwargs: dict) -> tuple | None:
        """What tells a call from others, None if it is no plain case."""
        words: list[Any] = [func]
        for value in args:
            kind = type(value)
            if kind is StageTensor:
                if value.position != position:
                    return None
                words.append(value.number or self._number(value))
            elif kind is list or kind is tuple:
                words.append(len(value))
                for item in value:
                    if type(item) is StageTensor and item.position == position:
                        words.append(item.number or self._number(item))
                    elif isinstance(item, (torch.Tensor, list, tuple)):
                        return None
                    else:
                        words += (type(item), item)
            elif isinstance(value, (torch.Tensor, dict)):
                return None
            else:
                words += (kind, value)
        for name, value in kwargs.items():
            if isinstance(value, (torch.Tensor, list, tuple, torch.Generator)):
                return None
            words += (name, type(value), value)
        return tuple(words)

    def result(self, key: tuple, like: "tuple[Any, int]", args: tuple) -> Any:
        """New tensors of the shapes that are remembered for a key; `like`: wire and position. None: none are."""
        found = self._results.get(key, _MISSING)
        if found is _MISSING:
            return None
        kind, shapes, views = found
        first = args[0] if views else None
        writes = first.writes if type(first) is StageTensor else None
        made = []
        for shape, number in shapes:
            tensor = StageTensor(*like, None, shape)
            tensor.number = number
            if writes is not None:
                tensor.writes = writes
            made.append(tensor)
        return made[0] if kind is None else kind(made)

    def keep(self, key: tuple, result: Any) -> None:
        """Remember a result, if it is a plain case."""
        traits = traits_of(key[0])
        several = isinstance(result, (tuple, list))
        tensors = result if several else (result,)
        plain = not (traits.written or traits.reads or traits.composite or traits.reshapes)
        if not plain or not all(type(tensor) is StageTensor for tensor in tensors):
            return
        if len(self._results) >= _REMEMBERED:
            self._results.clear()
        shapes = [(shape_of(tensor), self._number(tensor)) for tensor in tensors]
        self._results[key] = type(result) if several else None, shapes, traits.views

    def _number(self, tensor: StageTensor) -> int:
        shape = shape_of(tensor)
        number = self._numbers.setdefault(shape, len(self._numbers) + 1)
        tensor.number = number
        return number

"""What shape an op's result has, from the shapes of its arguments: asked of torch's meta kernels once, then remembered.

Decoding asks the same of every layer and of every token, and some of those kernels take longer than computing does.
"""

from dataclasses import dataclass
from typing import Any

import torch

from autoshard.errors import RankError, first_line

_REMEMBERED = 20_000
_MATERIAL_BYTES = 1 << 28
_SCALARS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes, strides, offset and dtype of a tensor."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, device: str) -> torch.Tensor:
        """A tensor of this shape."""
        return torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Same:
    """A result that is an argument itself, perhaps in another shape."""

    argument: Any  # its number while it is remembered, the tensor when it is handed out
    shape: Shape


@dataclass(frozen=True, slots=True)
class _Several:
    kind: type
    items: list[Any]


def shape_of(tensor: torch.Tensor) -> Shape:
    """Describe a tensor."""
    return Shape(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)


class ShapeRules:
    """The remembered results of one model."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def result(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Return the result of an op, with a `Shape` for every new tensor and `Same` for arguments that come back."""
        tensors: list[torch.Tensor] = []
        key = func, _key(args, tensors), _key(tuple(sorted(kwargs.items())), tensors) if kwargs else None
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = (_outline(*_run(func, args, kwargs)),)
        return _filled(found[0], tensors)


def _key(value: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        key = (tuple(value.shape), value.stride(), value.dtype)
        return (*key, _mask_key(value)) if value.dtype in (torch.bool, torch.uint8) and value.dim() else key
    if isinstance(value, (tuple, list)):
        return tuple(_key(item, tensors) for item in value)
    if isinstance(value, torch.Generator):
        return id(value)
    return (type(value), value) if isinstance(value, (bool, int, float)) else value


def _mask_key(value: torch.Tensor) -> Any:
    """How many are set in a mask that all processes have: it may be an index."""
    return None if type(value) is not torch.Tensor or value.is_meta else int(value.count_nonzero())


def _run(func: Any, args: tuple, kwargs: dict) -> tuple[Any, list[Any]]:
    """Run an op without values; returns what came out and what each tensor argument was replaced by."""
    failure = ""
    for device in ("meta", "cpu"):
        stand_ins: list[Any] = []
        try:
            given = _stand_in(args, device, stand_ins), _stand_in(kwargs, device, stand_ins)
            if device == "cpu" and sum(one.nbytes for one in stand_ins) > _MATERIAL_BYTES:
                break
            with torch.inference_mode(), torch.no_grad():
                return func(*given[0], **given[1]), stand_ins
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            failure = failure or first_line(error)
    raise RankError(
        f"this process can't tell the shape of what {func} gives in another one: {failure}. "
        "Use autoshard.schedule(model), or a plan that places this model without a pipeline."
    )


def _stand_in(value: Any, device: str, made: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if type(value) is torch.Tensor and not value.is_meta and value.dtype in (torch.bool, torch.uint8):
            made.append(value.to(device) if device == "meta" and value.dim() == 0 else value)
            if value.dim() and device == "meta":
                made[-1] = value.to("meta")
            return made[-1]
        new = shape_of(value).on(device)
        made.append(new.zero_() if device == "cpu" else new)
        return new
    if isinstance(value, (tuple, list)):
        return type(value)(_stand_in(item, device, made) for item in value)
    if isinstance(value, dict):
        return {name: _stand_in(item, device, made) for name, item in value.items()}
    return torch.device(device) if isinstance(value, torch.device) else value


def _outline(result: Any, stand_ins: list[Any]) -> Any:
    if isinstance(result, torch.Tensor):
        number = next((number for number, given in enumerate(stand_ins) if given is result), None)
        return shape_of(result) if number is None else Same(number, shape_of(result))
    if isinstance(result, (tuple, list)):
        return _Several(type(result), [_outline(item, stand_ins) for item in result])
    return result


def _filled(outline: Any, tensors: list[torch.Tensor]) -> Any:
    if isinstance(outline, Same):
        return Same(tensors[outline.argument], outline.shape)
    if isinstance(outline, _Several):
        return outline.kind(_filled(item, tensors) for item in outline.items)
    return outline

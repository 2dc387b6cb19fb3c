"""Packed tensors: a face that modules compute with, and ordinary tensors behind it that hold the bytes.

    weight       says bfloat16 (128, 64)        what modules see, plans name and state dicts hold
      ├─ qdata   int8 (128, 64)     8,192 B     what is stored, moved and counted
      └─ scale   float32 (128, 1)     512 B

Any wrapper subclass that can be taken apart and put together again (`__tensor_flatten__`, `__tensor_unflatten__`: the
protocol that torch's compiler uses) is one; quantised weights are. Nested tensors follow it too and are none.
"""

from collections.abc import Callable, Iterator
from functools import cache

import torch
from torch import nn


class _Other(torch.Tensor):
    """Tensors of any class but torch's own."""


PARAMETER_MARKS = dict(vars(nn.Parameter(torch.empty(0).as_subclass(_Other), requires_grad=False)))
"""The attributes by which torch knows that a tensor of another class is a parameter."""


@cache
def is_packed_type(kind: type) -> bool:
    """Whether tensors of a class can be taken apart into other tensors, and put together again."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a face with other tensors behind it."""
    return is_packed_type(type(tensor)) and not tensor.is_nested


def stored_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The ordinary tensors that hold a tensor's bytes: those behind a face, at any depth, or the tensor itself."""
    return [stored for _, stored in named_stored(tensor)] if is_packed(tensor) else [tensor]


def named_stored(tensor: torch.Tensor, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """As `stored_tensors`, each with its dotted path behind the face, "" for an ordinary tensor."""
    if not is_packed(tensor):
        yield prefix, tensor
        return
    names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    for name in names:
        yield from named_stored(getattr(tensor, name), f"{prefix}.{name}" if prefix else name)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes that a tensor's elements take; those behind its face if it has one."""
    if not is_packed(tensor):
        return tensor.numel() * tensor.element_size()
    return sum(stored.numel() * stored.element_size() for stored in stored_tensors(tensor))


def repacked(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Put a face like `tensor`'s before changed tensors, such as copies elsewhere. Being a parameter is not kept."""
    if not is_packed(tensor):
        return change(tensor)
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: repacked(getattr(tensor, name), change) for name in names}
    kind = type(tensor)
    return kind.__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]


def own_attributes(tensor: torch.Tensor) -> dict[str, object]:
    """What users put on a tensor object: its attributes less those that its type keeps."""
    kept = vars(tensor.detach()).keys() | PARAMETER_MARKS.keys()
    return {name: value for name, value in vars(tensor).items() if name not in kept}

"""Notice that parameters were written to since they were copied, as far as torch counts writes."""

from collections.abc import Iterable
from typing import Any

import torch

from autoshard.packed import stored_tensors


def versions(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return what differs after a write that torch counts, or after `tensor.data = …`."""
    return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor) -> Any:
    if tensor.is_inference():
        return object()
    where = stored_tensors(tensor)[0].data_ptr()
    return tensor._version, where, tensor.shape, tensor.stride() if tensor.layout is torch.strided else None

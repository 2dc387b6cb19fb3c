"""Notice that parameters were written to since they were copied.

Torch counts writes, except those through `.data` (adapters are merged that way). Copies that were made before code
outside of the forward ran are therefore compared with what they were made of, at one place in every 16 KiB: a full
comparison would take as long as copying again. A file that is mapped is compared exactly, by the pages that were
written to.
"""

from collections.abc import Iterable
from typing import Any

import torch

from autoshard.packed import stored_tensors
from autoshard.runtime.mapped import merged, region_of, written_part

SAMPLE_STRIDE_BYTES = 16 << 10


def versions(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return what differs after a write that torch counts, or after `tensor.data = …`."""
    return [_version(tensor) for tensor in tensors]


def _version(tensor: torch.Tensor) -> Any:
    if tensor.is_inference():
        return object()
    where = stored_tensors(tensor)[0].data_ptr()
    return tensor._version, where, tensor.shape, tensor.stride() if tensor.layout is torch.strided else None


def sample(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """Return a little of the values of CPU tensors, to be compared by `same_sample` later."""
    stored = [part for tensor in tensors for part in stored_tensors(tensor)]
    regions = [region_of(tensor) for tensor in stored]
    written = [written_part(region) for region in merged(region for region in regions if region is not None)]
    if None in written:
        return [_values(tensor) for tensor in stored]
    return written + [_values(tensor) for tensor, region in zip(stored, regions, strict=True) if region is None]


def same_sample(first: list[Any], second: list[Any]) -> bool:
    """Whether two samples of the same tensors agree."""
    return len(first) == len(second) and all(map(_agree, first, second))


def _values(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    with torch.inference_mode(False), torch.no_grad():
        flat = torch.as_strided(tensor.detach(), (_extent(tensor),), (1,))
        return flat[:: SAMPLE_STRIDE_BYTES // tensor.element_size()].clone(memory_format=torch.contiguous_format)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one in memory."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _agree(first: Any, second: Any) -> bool:
    if not isinstance(first, torch.Tensor) or not isinstance(second, torch.Tensor):
        return first == second
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))  # bytes: NaN is what it was

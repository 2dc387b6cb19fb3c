"""Page-locked homes: parameters that a GPU fetches straight from CPU memory, without a copy through a buffer.

    ordinary memory   [ q ]   [ k ]      [ v ]
    one slab          [ q | k | v | … ]  mapped, locked for the device as a whole, given back with the last of them

torch's own pinned memory comes in powers of two, up to twice what is asked for; slabs are as large as what is in them.
"""

import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from autoshard import torch_private
from autoshard.packed import is_packed
from autoshard.runtime.mapped import ALIGNMENT_BYTES, region_of
from autoshard.runtime.moves import set_data

SLAB_BYTES = 256 << 20
Lock = Callable[[int, int], Callable[[], object] | None]
"""(address, bytes) -> what unlocks them again, None if they can't be locked."""


def pin(tensors: Iterable[torch.Tensor], lock: Lock) -> None:
    """Move CPU tensors, the same objects, to locked memory as far as it can be had; takes one slab more meanwhile."""
    distinct = {id(tensor): tensor for tensor in tensors if _can_be_pinned(tensor)}
    for group in _groups(list(distinct.values())):
        slab = mmap.mmap(-1, sum(map(_room, group)))
        unlock = lock(torch.frombuffer(slab, dtype=torch.uint8).data_ptr(), len(slab))
        if unlock is None:
            return
        weakref.finalize(slab, unlock).atexit = False
        offset = 0
        with torch.inference_mode(False), torch.no_grad():
            for tensor in group:
                raw = torch.frombuffer(slab, dtype=torch.uint8, count=tensor.nbytes, offset=offset)
                set_data(tensor, raw.view(tensor.dtype).view(tensor.shape).copy_(tensor))
                offset += _room(tensor)


def lock_for(device: torch.device) -> Lock | None:
    """Return how to lock memory for a device, None where there is no way."""
    if device.type != "cuda":
        return None
    runtime = torch.cuda.cudart()

    def lock(address: int, nbytes: int) -> Callable[[], object] | None:
        if int(runtime.cudaHostRegister(address, nbytes, 1)) != 0:  # 1: for all devices of this process
            return None
        return lambda: runtime.cudaHostUnregister(address)

    return lock


def _can_be_pinned(tensor: torch.Tensor) -> bool:
    if is_packed(tensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.numel() == 0:
        return False
    alone = tensor.is_contiguous() and not torch_private.is_storage_shared(tensor)
    return alone and region_of(tensor) is None and not tensor.is_pinned()


def _groups(tensors: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    group: list[torch.Tensor] = []
    for tensor in tensors:
        if group and sum(map(_room, group)) + _room(tensor) > SLAB_BYTES:
            yield group
            group = []
        group.append(tensor)
    if group:
        yield group


def _room(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""From CPU memory to GPUs: page-locked tensors, and copies on a stream of their own through two pinned buffers.

    stored, page-locked [ q ]  ─────────copy stream───────▶ cuda:0
    stored, any other   [ k ]  ──▶ buffer a ──copy stream──▶ cuda:0       one is filled while the other is on its way
                               ──▶ buffer b

Every buffer has an event behind its last copy, which is waited for before it is filled again. Tensors are page-locked
where they are: torch's own pinned memory comes in powers of two, up to twice what is asked for.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.common.packed import is_packed, repacked
from autoshard.runtime.devices import copy_strides, is_accelerator
from autoshard.runtime.mapped import file_of

BUFFER_BYTES = 32 << 20
LEAST_BYTES = BUFFER_BYTES  # smaller tensors may share pages of the heap with others, and fit a buffer
Lock = Callable[[int, int], Callable[[], object] | None]
"""(address, bytes) -> what unlocks them again, None if they can't be locked."""


def has_streams(device: torch.device) -> bool:
    """Whether copies to a device can be queued on a stream, from pinned memory."""
    return is_accelerator(device) and hasattr(torch.get_device_module(device.type), "Stream")


@dataclass(slots=True)
class _Slot:
    """A pinned buffer, and what is recorded behind the last copy out of it."""

    memory: torch.Tensor
    event: Any = None


class Uploads:
    """Copies to some devices; many threads may send, each through buffers of its own."""

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.lock = threading.Lock()
        self.local = threading.local()
        self.streams: dict[torch.device, Any] = {}
        for device in dict.fromkeys(devices):
            module = torch.get_device_module(device.type)
            stream = module.Stream(device)
            stream.wait_stream(module.current_stream(device))  # targets may take the place of what still runs
            self.streams[device] = stream

    def send(self, into: torch.Tensor, value: torch.Tensor) -> bool:
        """Queue a copy of a CPU tensor, cast on its way; False if the device of `into` is not one of these.

        `value` may be written over when this returns.
        """
        stream = self.streams.get(into.device)
        if stream is None:
            return False
        module = torch.get_device_module(into.device.type)
        with module.stream(stream):
            for target, part in _chunks(into, value):
                slot = self._free_slot()
                staged = slot.memory[: part.nbytes].view(part.dtype).view(part.shape)
                staged.copy_(part)
                if target.dtype != part.dtype or not target.is_contiguous():  # else torch would do that on the host
                    staged = staged.to(into.device, non_blocking=True)
                target.copy_(staged, non_blocking=True)
                slot.event = module.Event()
                slot.event.record(stream)
        return True

    def copy(self, stored: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Queue the copying of a whole tensor to a device, with its strides; it may be written over afterwards."""
        if is_packed(stored):
            return repacked(stored, lambda inner: self.copy(inner, device))
        if stored.layout is not torch.strided or stored.is_pinned():
            return stored.to(device, non_blocking=stored.layout is torch.strided, copy=True)
        strides = None if stored.is_contiguous() else copy_strides(stored)
        if strides is None:
            copy = torch.empty_like(stored, device=device)
        else:
            copy = torch.empty_strided(stored.shape, strides, dtype=stored.dtype, device=device)
        self.send(copy, stored)
        return copy

    def _free_slot(self) -> "_Slot":
        """The buffer of this thread that was used longest ago, when nothing is copied out of it any more."""
        if not hasattr(self.local, "slots"):
            self.local.slots = []
        slots: list[_Slot] = self.local.slots
        if len(slots) < 2:
            pinned = any(map(is_accelerator, self.streams))
            slots.append(_Slot(torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=pinned)))
        else:
            slots.append(slots.pop(0))
        if slots[-1].event is not None:
            slots[-1].event.synchronize()
        return slots[-1]

    def finish(self) -> None:
        """Wait for all copies; what is queued on the devices later sees them."""
        for device, stream in self.streams.items():
            stream.synchronize()
            with contextlib.suppress(RuntimeError):
                torch.get_device_module(device.type).current_stream(device).wait_stream(stream)


def _chunks(into: torch.Tensor, value: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Divide a copy into parts that fit a buffer, along the first dimensions."""
    if value.nbytes <= BUFFER_BYTES:
        if value.numel():
            yield into, value
        return
    rows = BUFFER_BYTES * len(value) // value.nbytes
    for target, part in zip(into.split(max(rows, 1)), value.split(max(rows, 1)), strict=True):
        if rows:
            yield target, part
        else:
            yield from _chunks(target[0], part[0])


def pin(tensors: Iterable[torch.Tensor], lock: Lock) -> None:
    """Lock the memory of large CPU tensors where it is, as far as that can be; it is unlocked when it is freed."""
    storages = {tensor.data_ptr(): tensor.untyped_storage() for tensor in tensors if _can_be_pinned(tensor)}
    for address, storage in storages.items():
        unlock = lock(address, storage.nbytes())
        if unlock is None:  # no more may be locked
            return
        weakref.finalize(storage, unlock).atexit = False


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
    """Whether a tensor is alone in ordinary memory that is not locked yet."""
    if is_packed(tensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    alone = LEAST_BYTES <= tensor.nbytes == tensor.untyped_storage().nbytes()
    return alone and file_of(tensor) is None and not tensor.is_pinned()

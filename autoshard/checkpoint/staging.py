"""Buffers that readers fill, and the way from there into targets on any device.

reader 1   buffer ─copy─▶ CPU targets          cast on the way, in this thread
           buffer ─copy stream─▶ cuda:0        pinned, asynchronous; cast there; an event says when it is free again
"""

import contextlib
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import nn

from autoshard.checkpoint.memory import Pages
from autoshard.checkpoint.read_list import Copy

CPU_BUFFER_BYTES = 4 << 20
"""Small enough to be copied out of a cache."""
STREAMED_BUFFER_BYTES = 16 << 20
"""Large enough that the link never waits for a reader."""
_SLOTS = 2
_ALONE_ELEMENTS = 32_000
"""What torch copies in one thread, and a cache holds (at::internal::GRAIN_SIZE is 32,768)."""
_ITEM_BYTES = 2**31 - 1
"""The largest item of numpy."""


def is_streamed(device: torch.device) -> bool:
    """Whether copies to a device can be queued on a stream, from pinned memory."""
    return device.type not in ("cpu", "meta") and hasattr(torch.get_device_module(device.type), "Stream")


def buffer_bytes(devices: Iterable[torch.device]) -> int:
    """Return how large the buffers should be for targets on these devices."""
    return STREAMED_BUFFER_BYTES if any(map(is_streamed, devices)) else CPU_BUFFER_BYTES


@dataclass(slots=True)
class Slot:
    """A buffer, room of the same size for what must be packed first, and the events after which both are free."""

    memory: torch.Tensor
    room: torch.Tensor | None
    used: int = 0
    events: list[Any] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until nothing is copied out of it any more."""
        for event in self.events:
            event.synchronize()
        self.events.clear()
        self.used = 0

    def packed(self, value: torch.Tensor) -> torch.Tensor:
        """Return the values in one stretch, pinned while there is room."""
        begin = -(-self.used // 64) * 64
        if self.room is None or begin + value.nbytes > self.room.numel():
            return value.contiguous()
        self.used = begin + value.nbytes
        stretch = self.room[begin : self.used].view(value.dtype).view(value.shape)
        return stretch.copy_(value)


class Copier:
    """Takes values out of buffers into targets; one for all readers of a load, with one stream per device."""

    def __init__(self, devices: Iterable[torch.device], limit: int) -> None:
        self.limit = limit
        self.lock = threading.Lock()
        self.pages = Pages()
        self.streams: dict[torch.device, Any] = {}
        for device in dict.fromkeys(devices):
            if is_streamed(device):
                module = torch.get_device_module(device.type)
                stream = module.Stream(device=device)
                stream.wait_stream(module.current_stream(device))  # targets may take the place of what still runs
                self.streams[device] = stream

    def slots(self) -> list[Slot]:
        """Return the buffers of one reader: with streams two, so that one is read into while one is copied."""
        pinned = bool(self.streams)
        return [
            Slot(self._buffer(pinned), self._buffer(pinned) if pinned else None) for _ in range(_SLOTS if pinned else 1)
        ]

    def _buffer(self, pinned: bool) -> torch.Tensor:
        return torch.empty(self.limit, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def copy(self, copies: Iterable[Copy], data: torch.Tensor, begin: int, slot: Slot) -> None:
        """Fill the targets of copies from `data`, bytes that start at `begin` of the file."""
        streamed = set()
        for copy in copies:
            value = _value(copy, data, copy.begin - begin)
            device = copy.into.device
            if device in self.streams:
                self._send(copy.into, value, slot)
                streamed.add(device)
            elif type(copy.into) in (torch.Tensor, nn.Parameter):
                self.pages.make(copy.into)
                copy_alone(copy.into, value)
            else:  # tensors of other types may keep counters in Python
                with self.lock:
                    copy.into.copy_(value)
        for device in streamed:
            event = torch.get_device_module(device.type).Event()
            event.record(self.streams[device])
            slot.events.append(event)

    def _send(self, into: torch.Tensor, value: torch.Tensor, slot: Slot) -> None:
        device = into.device
        value = value if value.is_contiguous() and value.is_pinned() else slot.packed(value)
        with torch.get_device_module(device.type).stream(self.streams[device]):
            if into.dtype != value.dtype or not into.is_contiguous():  # else torch would do that on the host
                value = value.to(device, non_blocking=True)
            into.copy_(value, non_blocking=True)

    def finish(self) -> None:
        """Wait for all copies; what is queued on the devices later sees them."""
        for device, stream in self.streams.items():
            stream.synchronize()
            with contextlib.suppress(RuntimeError):
                torch.get_device_module(device.type).current_stream(device).wait_stream(stream)


def copy_alone(into: torch.Tensor, value: torch.Tensor) -> None:
    """Copy in this thread: of larger tensors torch divides the work over threads of its own, for every reader."""
    if into.is_contiguous() and value.is_contiguous():
        into, value = into.reshape(-1), value.reshape(-1)
    if _copy_rows(into, value):
        return
    if into.dim() == 0 or into.numel() <= _ALONE_ELEMENTS or torch.get_num_threads() == 1:
        into.copy_(value)
        return
    rows = max(1, _ALONE_ELEMENTS * len(into) // into.numel())
    for mine, its in zip(into.split(rows), value.split(rows), strict=True):
        mine.copy_(its)


def _copy_rows(into: torch.Tensor, value: torch.Tensor) -> bool:
    """Copy innermost rows that are stretches of memory in both; False if they are not.

    numpy copies each as one item, in 0.7 to 0.9 of the time that torch takes for rows of 512 bytes to 28 KiB.
    """
    nbytes = into.shape[-1] * into.element_size() if into.dim() and into.device.type == "cpu" else 0
    if into.dtype != value.dtype or not 0 < nbytes <= _ITEM_BYTES or into.stride(-1) != 1 or value.stride(-1) != 1:
        return False
    items = f"V{nbytes}"
    numpy.copyto(into.view(torch.uint8).numpy().view(items), value.view(torch.uint8).numpy().view(items))
    return True


def _value(copy: Copy, data: torch.Tensor, position: int) -> torch.Tensor:
    """Return the region of a copy as a view of the bytes from `position`."""
    stretch = data[position : position + copy.end - copy.begin]
    if stretch.data_ptr() % copy.entry.dtype.itemsize or stretch.storage_offset() % copy.entry.dtype.itemsize:
        stretch = stretch.clone()  # files may have tensors at odd places
    typed = stretch.view(copy.entry.dtype)
    return typed.as_strided(copy.shape, copy.stride, typed.storage_offset())

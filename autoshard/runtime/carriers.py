"""How the parameters of one module come to the device they compute on, one module ahead, by the kind of device.

    CopyNow      a device without streams (a simulated one): copied when asked for
    CopyAhead    a GPU: a thread copies on a stream of its own, through pinned memory; the computing stream waits for it
    ReadAhead    the CPU, from disk: threads have the pages of the file read, and copy them where a core is free

`begin` starts, `take` waits and gives what is to be used instead of each parameter (None: itself), `done` ends. Each
thread that computes with them takes them, and says so when it has: threads may have streams of their own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoshard import torch_private
from autoshard.packed import is_packed, repacked, stored_tensors
from autoshard.runtime.devices import CPU, copy_strides, copy_tensor, is_accelerator, set_current
from autoshard.runtime.homes import Copies, Homes
from autoshard.runtime.mapped import let_go
from autoshard.runtime.read_ahead import ReadAhead, Reader

STAGING_BYTES = 32 << 20


class Carrier(Protocol):
    """What a streamer asks of it; calls come from one thread at a time."""

    def begin(self, homes: Homes) -> Any:
        """Start to bring tensors; returns a ticket."""

    def take(self, ticket: Any) -> Copies:
        """Wait until they are there, and return their copies, if any has one; raises what went wrong on the way."""

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        """Those of which copies are used, which would not see what is written to them later."""

    def calls(self, running: bool) -> None:
        """Whether a module runs from now on: between calls, code may write to parameters."""

    def used(self) -> "tuple[Any, Any] | None":
        """The current stream of the caller, which computed with them, and an event behind that; None without any."""

    def done(self, ticket: Any, uses: Mapping[Any, Any]) -> None:
        """They are not needed any more; `uses`: the last event of each stream that computed with them."""


def carrier_for(device: torch.device) -> Carrier:
    """Choose by what the device can do."""
    if device == CPU:
        return ReadAhead()
    if is_accelerator(device) and hasattr(torch.get_device_module(device.type), "Stream"):
        return CopyAhead(device)
    return CopyNow(device)


@dataclass(frozen=True, slots=True)
class CopyNow:
    """Copies when asked to, in the thread that asks."""

    device: torch.device

    def begin(self, homes: Homes) -> Copies:
        with torch.inference_mode(False), torch.no_grad():
            copies: Copies = [copy_tensor(home, self.device) for home in homes.tensors]
        let_go(homes.regions)  # in the thread that runs the model
        return copies

    def take(self, ticket: Copies) -> Copies:
        return ticket

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        return homes.tensors

    def calls(self, running: bool) -> None:
        pass

    def used(self) -> None:
        return None

    def done(self, ticket: Copies, uses: Mapping[Any, Any]) -> None:
        ticket.clear()


@dataclass(slots=True)
class _Load:
    """Copies on a device; `ready` is recorded behind the copying."""

    copies: list[torch.Tensor]
    ready: Any


class CopyAhead:
    """Copies on a stream of its own, from a thread of its own, while the device computes.

    The copies are allocated on that stream, and the thread lets go of them only when the kernels that use them have
    run. So their memory is there for the next ones at once, and no more of it is taken than there are modules in
    flight; the allocator alone would keep it until all that is queued by then has run.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.module = torch.get_device_module(device.type)
        self.stream: Any = None
        self.thread = ThreadPoolExecutor(1, "autoshard-copy", initializer=self._start)
        self.reader = Reader()
        self.staging: list[tuple[torch.Tensor, Any]] = []

    def _start(self) -> None:
        """Begin the thread: its device is the current one in it."""
        if self.device.index is not None:
            set_current(self.device, self.device.index)
        self.stream = self.module.Stream()

    def begin(self, homes: Homes) -> "Future[_Load]":
        return self.thread.submit(self._load, homes, self.reader.begin(homes.regions))

    def take(self, ticket: "Future[_Load]") -> Copies:
        load = ticket.result()
        self.module.current_stream(self.device).wait_event(load.ready)
        return list(load.copies)

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        return homes.tensors

    def calls(self, running: bool) -> None:
        self.reader.calls(running)

    def used(self) -> tuple[Any, Any]:
        stream = self.module.current_stream(self.device)
        event = self.module.Event()
        event.record(stream)
        return stream, event

    def done(self, ticket: "Future[_Load]", uses: Mapping[Any, Any]) -> None:
        if ticket.cancel():
            return
        if uses:
            for copy in (part for whole in ticket.result().copies for part in stored_tensors(whole)):
                if torch_private.is_storage_shared(copy):  # a view of it goes on; its memory must outlast the kernels
                    for stream in uses:
                        copy.record_stream(stream)
        self.thread.submit(_free, ticket, list(uses.values()))

    def _load(self, homes: Homes, parts: "list[Future[None]]") -> _Load:
        for part in parts:
            part.result()
        with self.module.stream(self.stream), torch.no_grad():
            copies = [self._copy(home) for home in homes.tensors]
            ready = self.module.Event()
            ready.record(self.stream)
        if homes.regions:
            ready.synchronize()
            self.reader.let_go(homes.regions)
        return _Load(copies, ready)

    def _copy(self, home: torch.Tensor) -> torch.Tensor:
        if is_packed(home):
            return repacked(home, self._copy)
        if home.layout is not torch.strided:
            return home.to(self.device, copy=True)
        if home.is_pinned():
            return home.to(self.device, non_blocking=True, copy=True)
        if not home.is_contiguous() or home.numel() == 0:
            strides = copy_strides(home)
            if strides is None:
                return home.to(self.device, copy=True)
            return torch.empty_strided(home.shape, strides, dtype=home.dtype, device=self.device).copy_(home)
        copy = torch.empty_like(home, device=self.device)
        source, target = home.view(-1).view(torch.uint8), copy.view(-1).view(torch.uint8)
        for start in range(0, len(source), STAGING_BYTES):
            part = source[start : start + STAGING_BYTES]
            staging, event = self._next_staging()
            staging[: len(part)].copy_(part)
            target[start : start + len(part)].copy_(staging[: len(part)], non_blocking=True)
            event.record(self.stream)
        return copy

    def _next_staging(self) -> tuple[torch.Tensor, Any]:
        """Two buffers in turn: one is filled while the other is on its way."""
        if len(self.staging) < 2:
            buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=is_accelerator(self.device))
            self.staging.append((buffer, self.module.Event()))
        else:
            self.staging.append(self.staging.pop(0))
        self.staging[-1][1].synchronize()
        return self.staging[-1]


def _free(ticket: "Future[_Load]", events: Sequence[Any]) -> None:
    """Let go of copies, in the thread that makes the next ones, when the device has computed with them."""
    if ticket.exception() is None:
        for event in events:
            event.synchronize()
        ticket.result().copies.clear()

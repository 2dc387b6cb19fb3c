"""How the parameters of one module come to the device they compute on, one module ahead, by the kind of device.

    CopyNow      a device without streams (a simulated one): copied when asked for
    CopyAhead    a GPU: a thread copies on a stream of its own, through pinned memory; the computing stream waits for it
    ReadAhead    the CPU, from disk: a thread has the pages of the file read; nothing is copied, as a rule

`begin` starts, `take` waits and gives what is to be used instead of each parameter (None: itself), `done` ends.
"""

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoshard import torch_private
from autoshard.packed import is_packed, repacked, stored_tensors
from autoshard.runtime.devices import CPU, copy_strides, copy_tensor, is_accelerator, set_current
from autoshard.runtime.mapped import (
    Region,
    bring,
    check_unchanged,
    computes_as_in_memory,
    let_go,
    merged,
    parts,
    region_of,
)

STAGING_BYTES = 32 << 20
READERS = 4
"""Threads that read from disk: two for each of the two modules that are on their way."""
Copies = list[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Homes:
    """The parameters of a module where they are between its calls.

    Attributes:
        regions: what of their memory is in files.
        unlike: those in a file where the CPU would compute other bits than in memory of torch's own.
    """

    tensors: list[torch.Tensor]
    regions: list[Region]
    unlike: list[torch.Tensor]

    @classmethod
    def of(cls, parameters: Iterable[torch.Tensor]) -> "Homes":
        with torch.inference_mode(False), torch.no_grad():
            tensors = [parameter.detach() for parameter in parameters]
        return cls(tensors, _regions(tensors), [tensor for tensor in tensors if _computes_elsewhere(tensor)])


class Carrier(Protocol):
    """What a streamer asks of it; calls come from one thread at a time."""

    def begin(self, homes: Homes) -> Any:
        """Start to bring tensors; returns a ticket."""

    def take(self, ticket: Any) -> Copies:
        """Wait until they are there, and return their copies, if any has one; raises what went wrong on the way."""

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        """Those of which copies are used, which would not see what is written to them later."""

    def done(self, ticket: Any, used: bool) -> None:
        """They are not needed any more; `used`: the current stream of the caller computed with them."""


def carrier_for(device: torch.device) -> Carrier:
    """Choose by what the device can do."""
    if device == CPU:
        return ReadAhead()
    if is_accelerator(device) and hasattr(torch.get_device_module(device.type), "Stream"):
        return CopyAhead(device)
    return CopyNow(device)


def _regions(tensors: Iterable[torch.Tensor]) -> list[Region]:
    stored = (part for tensor in tensors for part in stored_tensors(tensor))
    return merged(region for region in map(region_of, stored) if region is not None)


@dataclass(frozen=True, slots=True)
class CopyNow:
    """Copies when asked to, in the thread that asks."""

    device: torch.device

    def begin(self, homes: Homes) -> Copies:
        with torch.inference_mode(False), torch.no_grad():
            copies: Copies = [copy_tensor(home, self.device) for home in homes.tensors]
        let_go(homes.regions)
        return copies

    def take(self, ticket: Copies) -> Copies:
        return ticket

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        return homes.tensors

    def done(self, ticket: Copies, used: bool) -> None:
        ticket.clear()


class _Reader:
    """Threads that have pages of files read, some parts of a module at a time: a disk is fastest with a few requests.

    let go of a │ c, 1st part │ d, 1st …        what goes, goes before the pages of the one after the next come,
                │ c, 2nd part │ d, 2nd …        so no more of them are there than were planned
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(READERS, "autoshard-read")
        self.gone: Future[None] | None = None

    def begin(self, regions: list[Region]) -> "list[Future[None]]":
        return [self.threads.submit(_bring, part, self.gone) for part in parts(regions, READERS // 2)]

    def let_go(self, regions: list[Region]) -> None:
        if regions:
            self.gone = self.threads.submit(let_go, regions)


def _bring(part: Region, after: "Future[None] | None") -> None:
    if after is not None:
        after.result()  # it was submitted before, so it runs or is over
    check_unchanged([part])
    bring([part])


@dataclass(slots=True)
class _Reading:
    """Pages of a module that are being read, and what is to be copied out of them when they are there."""

    regions: list[Region]
    parts: "list[Future[None]]"
    copies: "Future[Copies] | None" = None


class ReadAhead:
    """Has the kernel read a module's pages while another one computes; copies only what would compute differently."""

    def __init__(self) -> None:
        self.reader = _Reader()

    def begin(self, homes: Homes) -> _Reading:
        reading = _Reading(homes.regions, self.reader.begin(homes.regions))
        if homes.unlike:
            reading.copies = self.reader.threads.submit(_copies, homes, reading.parts)
        return reading

    def take(self, ticket: _Reading) -> Copies:
        for part in ticket.parts:
            part.result()
        return [] if ticket.copies is None else ticket.copies.result()  # none: all compute where they are

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        return homes.unlike

    def done(self, ticket: _Reading, used: bool) -> None:
        self.reader.let_go(ticket.regions)


def _copies(homes: Homes, parts: "list[Future[None]]") -> Copies:
    for part in parts:
        part.result()  # they were submitted before
    copies: Copies = []
    for home in homes.tensors:
        if not any(home is unlike for unlike in homes.unlike):
            copies.append(None)
            continue
        with torch.no_grad():
            copies.append(home.clone())
        let_go(_regions([home]))
    return copies


def _computes_elsewhere(home: torch.Tensor) -> bool:
    """Whether a tensor lies in a file where computing with it would give other bits than in memory of torch's own.

    Columns of a matrix in a file do, too: a rank has a part of each of its rows.
    """
    if is_packed(home) or home.dim() < 2:
        return False
    alike = home.is_contiguous() and computes_as_in_memory(home.data_ptr(), home.dtype, home.dim())
    return not alike and region_of(home) is not None


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
        self.reader = _Reader()
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

    def done(self, ticket: "Future[_Load]", used: bool) -> None:
        if ticket.cancel():
            return
        event = None
        if used:
            stream = self.module.current_stream(self.device)
            event = self.module.Event()
            event.record(stream)
            for copy in (part for whole in ticket.result().copies for part in stored_tensors(whole)):
                if torch_private.is_storage_shared(copy):  # a view of it goes on; its memory must outlast the kernels
                    copy.record_stream(stream)
        self.thread.submit(_free, ticket, event)

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


def _free(ticket: "Future[_Load]", event: Any) -> None:
    """Let go of copies, in the thread that makes the next ones, when the device has computed with them."""
    if ticket.exception() is None:
        if event is not None:
            event.synchronize()
        ticket.result().copies.clear()

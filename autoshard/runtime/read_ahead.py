"""Modules on disk that compute on the CPU: while one computes, threads bring the next.

    a core is free    file ─read─▶ slab        computed with there, as in memory
    all compute       file ─▶ pages            computed with there; pages are given back after it

Tensors begin in a file where they happen to, and matrix products read such in more steps than torch's own memory. But
to copy is more work in all: where every core computes it would take longer.
"""

import ctypes
import mmap
import os
import threading
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.file_reads import FileReads
from autoshard.runtime.homes import Copies, Homes, Piece, Transfer
from autoshard.runtime.mapped import Region, bring, check_unchanged, let_go, parts, region_of
from autoshard.runtime.slabs import Slab, Slabs

READERS = 4
"""Threads that read from disk: two for each of the two modules that are on their way."""


class Reader:
    """Threads that have pages of files read, some parts of a module at a time: a disk is fastest with a few requests.

    let go of a │ c, 1st part │ d, 1st …        what goes, goes before the pages of the one after the next come,
                │ c, 2nd part │ d, 2nd …        so no more of them are there than were planned

    Pages that were written to are kept. What is written between looking at them and letting go would be lost, so this
    is done only while a module runs, which needs its parameters as they are; code between calls may write to any.
    """

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(READERS, "autoshard-read")
        self.gone: Future[None] | None = None
        self.lock = threading.Lock()
        self.runs = False
        self.waiting: list[Region] = []

    def begin(self, regions: list[Region]) -> "list[Future[None]]":
        return [self.threads.submit(_bring, part, self.gone) for part in parts(regions, READERS // 2)]

    def let_go(self, regions: list[Region]) -> None:
        if regions:
            self.gone = self.threads.submit(self.let_go_here, regions)

    def let_go_here(self, regions: list[Region]) -> None:
        """Let go of regions in this thread, or leave them to the next call of a module."""
        with self.lock:
            if self.runs:
                let_go(regions)
            else:
                self.waiting += regions

    def calls(self, running: bool) -> None:
        """Whether a module runs from now on; waits for what is being let go of."""
        with self.lock:
            self.runs = running
            regions = self.waiting if running else []
            if running:
                self.waiting = []
        self.let_go(regions)


def _bring(part: Region, after: "Future[None] | None") -> None:
    if after is not None:
        after.result()  # it was submitted before, so it runs or is over
    check_unchanged([part])
    bring([part])


@dataclass(slots=True)
class _Reading:
    """A module that is being read: what of it stays in the file, what is copied, and who is at work."""

    transfer: Transfer
    slab: Slab | None
    copies: Copies
    left: deque[Piece]
    others: "list[Future[Any]]"


class ReadAhead:
    """Brings modules from files to a CPU that computes."""

    def __init__(self) -> None:
        self.reader = Reader()
        self.slabs = Slabs()
        self.reads = FileReads()

    def begin(self, homes: Homes) -> _Reading:
        """Start to read; pieces of the file are given to the readers one by one, so that all end together."""
        transfer = _transfer_of(homes)
        slab = self.slabs.take(transfer.slab_bytes) if transfer.slab_bytes else None
        copies: Copies = [None] * len(homes.tensors)
        left = deque(transfer.pieces)
        submit = self.reader.threads.submit
        if slab is not None:
            for index, begin in transfer.in_slab.items():
                home = homes.tensors[index]
                copies[index] = slab.tensor[begin : begin + home.nbytes].view(home.dtype).view(home.shape)
            writers = min(READERS, len(left))
            slab.writers[:] = (submit(_copy_pieces, left, slab.memory, self.reads, self.reader) for _ in range(writers))
        others = [
            *self.reader.begin(transfer.in_place),
            *(submit(_clone, homes, i, copies, self.reader) for i in transfer.cloned),
        ]
        return _Reading(transfer, slab, copies, left, others)

    def take(self, ticket: _Reading) -> Copies:
        for future in (*(ticket.slab.writers if ticket.slab is not None else ()), *ticket.others):
            future.result()
        return ticket.copies

    def copied(self, homes: Homes) -> list[torch.Tensor]:
        return _transfer_of(homes).copied

    def calls(self, running: bool) -> None:
        self.reader.calls(running)

    def used(self) -> None:
        return None

    def done(self, ticket: _Reading, uses: Mapping[Any, Any]) -> None:
        ticket.left.clear()  # of what was not waited for
        ticket.copies = []
        if ticket.slab is not None:
            self.slabs.give(ticket.slab)
        self.reader.let_go(ticket.transfer.in_place)


def _transfer_of(homes: Homes) -> Transfer:
    return homes.all_copied if torch.get_num_threads() < _cores() else homes.least_copied


def _cores() -> int:
    """How many cores there are for each process on this machine that is a part of the same run (torchrun)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = os.environ.get("LOCAL_WORLD_SIZE", "")
    return cores // max(int(processes), 1) if processes.isdecimal() else cores


def _copy_pieces(left: deque[Piece], memory: mmap.mmap, reads: FileReads, reader: Reader) -> None:
    """Copy pieces of files to a slab until none is left; pages that are brought for it are given back at once."""
    into, address = memoryview(memory), ctypes.addressof(ctypes.c_char.from_buffer(memory))
    while left:
        try:
            piece = left.popleft()
        except IndexError:  # another reader was faster
            return
        region, begin = piece.region, piece.begin
        check_unchanged([region])
        if not reads.read(region, into[begin : begin + region.nbytes], address + begin):
            bring([region])
            ctypes.memmove(address + begin, region.map.address + region.start, region.nbytes)
            reader.let_go_here([region])


def _clone(homes: Homes, index: int, copies: Copies, reader: Reader) -> None:
    home = homes.tensors[index]
    region = region_of(home)
    assert region is not None
    check_unchanged([region])
    bring([region])
    with torch.no_grad():
        copies[index] = home.clone()
    reader.let_go_here([region])

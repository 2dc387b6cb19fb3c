"""Memory that modules on disk are copied to, one after the other: to make fresh memory costs more than to copy into it.

layer 0 ──▶ slab a      layer 1 ──▶ slab b      layer 2 ──▶ slab a, unless something still has a part of it
"""

import mmap
from concurrent.futures import Future, wait
from dataclasses import dataclass, field

import torch

from autoshard import torch_private

_FITS = 9 / 8
"""A slab may be so much larger than what is put into it: memory is planned for what modules have."""


@dataclass(frozen=True, slots=True, eq=False)
class Slab:
    """Memory on the CPU, and the threads that may still write to it, which hold `memory` for as long."""

    memory: mmap.mmap
    tensor: torch.Tensor
    writers: "list[Future[None]]" = field(default_factory=list)


class Slabs:
    """Those that are free; calls come from one thread at a time."""

    def __init__(self) -> None:
        self.free: list[Slab] = []

    def take(self, nbytes: int) -> Slab:
        """Return so many bytes or a few more, with anything in them, from a multiple of the size of a page on."""
        for slab in self.free:
            wait(slab.writers)
            if nbytes <= len(slab.memory) <= nbytes * _FITS and not torch_private.is_storage_shared(slab.tensor):
                self.free.remove(slab)
                slab.writers.clear()
                return slab
        self.free.clear()  # before more is taken
        memory = mmap.mmap(-1, nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return Slab(memory, torch.frombuffer(memory, dtype=torch.uint8))

    def give(self, slab: Slab) -> None:
        """Take a slab back. Who has a part of it keeps it as it is."""
        self.free.append(slab)

"""Memory to load into. The first touch of fresh memory, page by page, costs more than reading a file that is cached.

So pages are made ahead of each read, many in one call, and in huge pages where those are faster. Where they are can't
be known before: on a machine of its own a huge page costs a third of the small ones it stands for; in a virtual machine
whose host takes back large free blocks, four times as much. So both are tried, rarely, on 4 MiB each.

To say that pages should be huge waits until no other thread makes any (10 ms on 4 readers), so it is said once for all
of a tensor that is left.

Measured on 2 busy cores, 1 GB into fresh memory: small pages one by one 0.45 GB/s, made ahead 0.60; huge pages
0.14 GB/s when the host had taken them back, and 1.8 GB/s when it had not.
"""

import ctypes
import mmap
import sys
import time
from collections.abc import Callable
from functools import cache

import torch

SLICE_BYTES = 4 << 20
LEAST_BYTES = 64 << 10
"""Of less, pages are made as they are touched."""
_TRIALS_GROW = 4
_MADV_HUGEPAGE, _MADV_NOHUGEPAGE, _MADV_POPULATE_WRITE = 14, 15, 23


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return memory that is about to be filled."""
    return torch.empty(shape, dtype=dtype, device=device)


class Pages:
    """Makes the pages of memory that is about to be written, of the size that was faster so far in this load."""

    def __init__(self) -> None:
        self.seconds = {True: 0.0, False: 0.0}  # of the last slice of huge pages, and of small ones
        self.slices, self.next_trial = 0, 0
        self.huge_storages: set[int] = set()  # addresses of those whose rest was said to be huge

    def make(self, tensor: torch.Tensor) -> None:
        """Make the pages of a tensor in CPU memory; no harm where there are pages, or the system can't.

        A tensor may be a part of a larger one: slices that begin in it are made whole, of that before only its pages.
        """
        advise = _madvise()
        if advise is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return
        storage = tensor.untyped_storage()
        if storage.nbytes() < LEAST_BYTES:
            return
        first, last = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        begin = _rounded_up(tensor.data_ptr(), mmap.PAGESIZE)
        end = min(_rounded_up(tensor.data_ptr() + tensor.nbytes, SLICE_BYTES), last) // mmap.PAGESIZE * mmap.PAGESIZE
        while begin < end:
            stop = min(_rounded_up(begin + 1, SLICE_BYTES), end)
            self._make_slice(advise, begin, stop - begin, first, last)
            begin = stop

    def _make_slice(
        self, advise: Callable[[int, int, int], int], address: int, nbytes: int, first: int, last: int
    ) -> None:
        if nbytes < SLICE_BYTES:  # before the first boundary, or behind the last
            advise(address, nbytes, _MADV_POPULATE_WRITE)
            return
        self.slices += 1
        trial = self.slices >= self.next_trial
        huge = (self.seconds[True] < self.seconds[False]) != trial
        if huge != (first in self.huge_storages):
            said = nbytes if trial else (last - address) // mmap.PAGESIZE * mmap.PAGESIZE
            advise(address, said, _MADV_HUGEPAGE if huge else _MADV_NOHUGEPAGE)
            if not trial:
                (self.huge_storages.add if huge else self.huge_storages.discard)(first)
        begin = time.thread_time()  # not by the clock: other work on the machine must not count
        advise(address, nbytes, _MADV_POPULATE_WRITE)
        self.seconds[huge] = time.thread_time() - begin
        if trial:
            self.next_trial = 1 + _TRIALS_GROW * self.slices


def _rounded_up(value: int, step: int) -> int:
    return -(-value // step) * step


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """Return the system's own call: Python has it for its own maps only."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    call.restype = ctypes.c_int
    return call

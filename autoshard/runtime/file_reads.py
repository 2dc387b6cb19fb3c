"""Bytes of mapped files into other memory of this process, by reading, not through the mapping.

in the page cache      copied out of it
not, the first time    disk ─▶ buffer ─▶ memory       past the page cache, whose fresh memory may cost more than the
                                                      disk, and which may have no room for it
not, and again         nothing is read here: through the mapping it comes to stay in the page cache, if there is room
"""

import contextlib
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator

from autoshard.host_memory import available_bytes
from autoshard.runtime.mapped import MappedFile, Region, is_cached, stamp_of
from autoshard.runtime.pages import written_ranges

BLOCK_BYTES = 4096
"""Disks are read past the page cache in whole blocks; of most this is a multiple."""
LEAST_BYTES = 256 << 10
"""Less is not worth a request of its own to the disk."""
_CAN_TELL = hasattr(os, "O_DIRECT")  # Linux


class FileReads:
    """Reads parts of files; many threads may call it."""

    def __init__(self) -> None:
        self.opened: weakref.WeakKeyDictionary[MappedFile, tuple[int, int] | None] = weakref.WeakKeyDictionary()
        self.missed: set[tuple[int, int]] = set()
        self.buffers: deque[mmap.mmap] = deque()
        self.lock = threading.Lock()

    def read(self, region: Region, into: memoryview, address: int) -> bool:
        """Fill memory, `into`, which begins at `address`, with a part of a file as this process sees it.

        False if that is better done through the mapping: there are changes in it, the file can't be read so, or it
        pays to keep what is read; the memory may then hold anything.
        """
        files = self._files(region.map)
        if files is None or written_ranges(region.map.address + region.start, region.nbytes) != []:
            return False
        cached, direct = files
        if region.nbytes < LEAST_BYTES or is_cached(region):
            with contextlib.suppress(OSError):  # the mapping will tell
                return os.preadv(cached, [into], region.start) == region.nbytes
            return False
        key = region.map.address, region.start
        if key in self.missed and len(region.map) < (available_bytes() or 0):
            return False
        self.missed.add(key)
        with self._buffer(region.nbytes) as buffer, contextlib.suppress(OSError):
            first = region.start // BLOCK_BYTES * BLOCK_BYTES
            skipped = region.start - first
            room = -(-(skipped + region.nbytes) // BLOCK_BYTES) * BLOCK_BYTES
            if os.preadv(direct, [memoryview(buffer)[:room]], first) >= skipped + region.nbytes:
                source = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) + skipped
                ctypes.memmove(address, source, region.nbytes)
                return True
        return False

    def _files(self, mapped: MappedFile) -> tuple[int, int] | None:
        """Return descriptors of a mapped file: for what is in the page cache, and past it. None if there are none."""
        with self.lock:
            if mapped not in self.opened:
                self.opened[mapped] = _open_twice(mapped) if _CAN_TELL else None
            return self.opened[mapped]

    @contextlib.contextmanager
    def _buffer(self, nbytes: int) -> Iterator[mmap.mmap]:
        """Lend a buffer, in whole blocks, that begins with one."""
        try:
            buffer = self.buffers.pop()
        except IndexError:
            buffer = None
        if buffer is None or len(buffer) < nbytes + 2 * BLOCK_BYTES:
            buffer = mmap.mmap(-1, nbytes + 2 * BLOCK_BYTES)
        yield buffer
        self.buffers.append(buffer)


def _open_twice(mapped: MappedFile) -> tuple[int, int] | None:
    """Open a file that is mapped, unless there is another one under its name by now."""
    opened: list[int] = []
    for flags in (os.O_RDONLY, os.O_RDONLY | os.O_DIRECT):
        with contextlib.suppress(OSError):
            descriptor = os.open(mapped.path, flags)
            weakref.finalize(mapped, os.close, descriptor).atexit = False
            opened += [descriptor] if stamp_of(os.fstat(descriptor)) == mapped.stamp else []
    return (opened[0], opened[1]) if len(opened) == 2 else None

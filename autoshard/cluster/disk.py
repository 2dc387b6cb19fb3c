"""How fast the disk of a directory gives what is not in memory, measured with a file of its own.

4 MiB blocks ──write──▶ file without a name ──read, past the page cache, a few at a time, as weights are──▶ buffers
"""

import contextlib
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

BLOCK_BYTES = 4 << 20
MOST_BYTES = 128 << 20
WRITE_SECONDS = 0.8
READ_SECONDS = 0.5
READERS = 4
SMALL_BYTES = 4096


def measure_disk(directory: str) -> tuple[float, float] | None:
    """Return bytes per second and the latency of a small read, in about 1.5 s; None if it can't be measured there.

    A disk may give what was just written faster than the rest, out of a cache of its own.
    """
    direct = getattr(os, "O_DIRECT", None)  # Linux
    if direct is None:
        return None
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        blocks = _write(file.fileno())
        reopened = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDONLY | direct)
        try:
            return _read_rate(reopened, blocks), _latency(reopened, blocks)
        finally:
            os.close(reopened)
    return None


def _write(file: int) -> int:
    """Write blocks that no disk can make smaller, and have them out of memory; returns how many."""
    block, blocks = bytearray(os.urandom(BLOCK_BYTES)), 0
    deadline = time.perf_counter() + WRITE_SECONDS
    while blocks * BLOCK_BYTES < MOST_BYTES and (blocks < READERS or time.perf_counter() < deadline):
        block[:8] = blocks.to_bytes(8, "little")
        if os.write(file, block) < BLOCK_BYTES:
            raise OSError("the disk is full")
        os.fsync(file)  # else most of the time would be spent here after the last one
        blocks += 1
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return blocks


def _read_rate(file: int, blocks: int) -> float:
    """Bytes per second of the fastest pass over the file."""
    buffers = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(READERS)]

    def read(reader: int) -> None:
        for block in range(reader, blocks, READERS):
            if os.preadv(file, [buffers[reader]], block * BLOCK_BYTES) < BLOCK_BYTES:
                raise OSError("the file became shorter")

    least, deadline = float("inf"), time.perf_counter() + READ_SECONDS
    with ThreadPoolExecutor(READERS) as readers:
        while least == float("inf") or time.perf_counter() < deadline:
            started = time.perf_counter()
            list(readers.map(read, range(READERS)))
            least = min(least, time.perf_counter() - started)
    return blocks * BLOCK_BYTES / least


def _latency(file: int, blocks: int) -> float:
    buffer, found = mmap.mmap(-1, SMALL_BYTES), []
    for block in range(min(blocks, 16)):
        started = time.perf_counter()
        os.preadv(file, [buffer], block * BLOCK_BYTES)
        found.append(time.perf_counter() - started)
    return min(found)

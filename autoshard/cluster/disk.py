"""How fast the disk of a directory gives what is not in memory, measured with a file without a name."""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

BLOCK_BYTES, SMALL_BYTES = 4 << 20, 4096
LEAST_BLOCKS, MOST_BLOCKS = 4, 32
WRITE_SECONDS = 0.8
READERS = 4


def measure_disk(directory: str) -> tuple[float, float] | None:
    """Return bytes per second and the latency of a small read, in about 1.5 s; None if it can't be measured there.

    A disk may give what was just written faster than the rest, out of a cache of its own.
    """
    if not hasattr(os, "posix_fadvise"):  # Linux has it
        return None
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        number, blocks = file.fileno(), 0
        deadline = time.perf_counter() + WRITE_SECONDS
        while blocks < LEAST_BLOCKS or (blocks < MOST_BLOCKS and time.perf_counter() < deadline):
            if os.write(number, os.urandom(BLOCK_BYTES)) < BLOCK_BYTES:  # which no disk can make smaller
                raise OSError("the disk is full")
            os.fsync(number)  # else most of the time would be spent here after the last one
            blocks += 1

        def seconds(read: Callable[[], object]) -> float:
            """Of reading what is not in memory."""
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            read()
            return time.perf_counter() - started

        def read(at: int) -> int:
            return os.preadv(number, [bytearray(BLOCK_BYTES)], at * BLOCK_BYTES)

        with ThreadPoolExecutor(READERS) as readers:  # a few at a time, as weights are read
            whole = min(seconds(lambda: list(readers.map(read, range(blocks)))) for _ in range(2))
        small = min(seconds(lambda at=at: os.pread(number, SMALL_BYTES, at * BLOCK_BYTES)) for at in range(blocks))  # type: ignore[misc]
        return blocks * BLOCK_BYTES / whole, small
    return None

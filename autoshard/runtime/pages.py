"""Which pages of this process's memory hold what is not in their file: those of a private mapping that were written to.

Linux tells since 6.7 by one call, which passes over large pages as a whole; before, by eight bytes for each page.
"""

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys

import numpy

PAGE_BYTES = mmap.PAGESIZE
_SCAN = 0xC0606610  # _IOWR('f', 16, struct pm_scan_arg), linux/fs.h
_ARGUMENTS = struct.Struct("12Q")  # size, flags, start, end, walk_end, vec, vec_len, max_pages, four masks
_IS_FILE, _IS_PRESENT, _IS_SWAPPED = 1 << 2, 1 << 3, 1 << 4
_RANGES = 256
_WRITTEN = numpy.array([top >> 5 in (2, 4, 6) for top in range(256)])
"""By the highest byte of an entry of pagemap: present (bit 63) or swapped (62), and not of a file (61)."""


def written_ranges(address: int, nbytes: int) -> list[tuple[int, int]] | None:
    """Return where written pages begin and end in some memory, as addresses; None if the system does not tell."""
    begin = address // PAGE_BYTES * PAGE_BYTES
    end = -(-(address + nbytes) // PAGE_BYTES) * PAGE_BYTES
    if not sys.platform.startswith("linux"):
        return None
    try:
        file = os.open("/proc/self/pagemap", os.O_RDONLY)
    except OSError:
        return None
    try:
        return _scan(file, begin, end)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL, errno.EPERM, errno.ENOSYS):
            return None
        return _read(file, begin, end)
    finally:
        os.close(file)


def _scan(file: int, begin: int, end: int) -> list[tuple[int, int]]:
    """Ask for ranges of pages that are not of a file, and present or swapped. Raises `OSError` if it can't be asked."""
    found = (ctypes.c_uint64 * (3 * _RANGES))()
    ranges: list[tuple[int, int]] = []
    while begin < end:
        arguments = bytearray(
            _ARGUMENTS.pack(
                _ARGUMENTS.size, 0, begin, end, 0, ctypes.addressof(found), _RANGES, 0,
                _IS_FILE, _IS_FILE, _IS_PRESENT | _IS_SWAPPED, _IS_FILE,
            )
        )  # fmt: skip
        count = fcntl.ioctl(file, _SCAN, arguments, True)
        ranges += [(found[3 * i], found[3 * i + 1]) for i in range(count)]
        walked = _ARGUMENTS.unpack(arguments)[4]
        if walked <= begin:
            raise OSError(errno.EINVAL, "nothing walked")
        begin = walked
    return _joined(ranges)


def _read(file: int, begin: int, end: int) -> list[tuple[int, int]] | None:
    """Read the entry of each page. None if they can't be read."""
    try:
        raw = os.pread(file, (end - begin) // PAGE_BYTES * 8, begin // PAGE_BYTES * 8)
    except OSError:
        return None
    if len(raw) != (end - begin) // PAGE_BYTES * 8:
        return None
    written = _WRITTEN[numpy.frombuffer(raw, dtype=numpy.uint8)[7::8]]
    if not written.any():
        return []
    padded = numpy.concatenate(([False], written, [False]))
    edges = (numpy.flatnonzero(padded[1:] != padded[:-1]) * PAGE_BYTES + begin).tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for begin, end in ranges:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined

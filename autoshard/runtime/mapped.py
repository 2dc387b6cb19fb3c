"""Parameters in files: ordinary CPU tensors whose memory is a file, privately mapped.

    model-00003.safetensors   ········[ layers.7.q ][ layers.7.k ]········
                                       │ pages come when they are read (or ahead, on request) and go on request
    layers.7.q.weight         torch.Tensor on the CPU, no copy; what is written to it stays in this process

So state_dict, save and any op work on them, and they take no memory of the process until they are touched. Pages that
were written to are kept: only those that still are the file's are let go.
"""

import bisect
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autoshard.errors import ApplyError
from autoshard.runtime.pages import PAGE_BYTES, written_ranges

LARGE_PAGE_BYTES = 2 << 20
PART_BYTES = 8 << 20
"""The least that is read as a part: what Linux reads ahead at a time."""
ALIGNMENT_BYTES = 64  # what torch gives the tensors that it allocates itself
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: a file larger than the memory may be mapped
_POPULATE_READ, _HUGE_PAGES = 22, 14  # MADV_POPULATE_READ (Linux 5.14), MADV_HUGEPAGE


class MappedFile(mmap.mmap):
    """A private mapping of a whole file; tensors in it keep it alive."""

    path: Path
    address: int
    stamp: tuple[int, int, int]


_maps: "weakref.WeakValueDictionary[int, MappedFile]" = weakref.WeakValueDictionary()  # by address
_addresses: list[int] = []  # of these and of some that are gone, sorted


@dataclass(frozen=True, slots=True)
class Region:
    """`nbytes` of a mapped file at `start`, in bytes from its begin."""

    map: MappedFile
    start: int
    nbytes: int


def map_tensor(mapped: MappedFile, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor, row-major, whose memory is the file from `offset` on; nothing is read yet.

    Raises `ApplyError` if the file is too short.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if offset % dtype.itemsize:  # torch computes on whole elements; no writer of safetensors does this
        raise ApplyError(
            f"{mapped.path}: the tensor at byte {offset} is not aligned to its {dtype}, so it can't be mapped."
        )
    if offset + nbytes > len(mapped):
        raise ApplyError(
            f"{mapped.path} ends before byte {offset + nbytes}, where a tensor in it should end. Is it whole?"
        )
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset)
    return raw.view(dtype).view(shape)


def map_file(path: Path) -> MappedFile:
    """Map a file anew: what is written to one mapping is not seen in others. Raises `ApplyError` if it can't be."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ApplyError(f"can't open {path}: {error.strerror}.") from None
    try:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        made = MappedFile(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        made.path, made.stamp = Path(path), stamp_of(os.fstat(descriptor))
        made.address = torch.frombuffer(made, dtype=torch.uint8).data_ptr()
        _advise(Region(made, 0, len(made)), _HUGE_PAGES)  # fewer, larger pages to come and go
        _maps[made.address] = made
        _addresses[:] = sorted(_maps.keys())
        return made
    except (OSError, ValueError, OverflowError) as error:
        raise ApplyError(f"can't map {path}: {error}.") from None
    finally:
        os.close(descriptor)


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Return what differs between files, and after one was written to."""
    return status.st_ino, status.st_size, status.st_mtime_ns


def region_of(tensor: torch.Tensor) -> Region | None:
    """Return the part of a file that the memory of a tensor is, None for a tensor in ordinary memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type != "cpu":
        return None
    storage = tensor.untyped_storage()
    address = storage.data_ptr()
    index = bisect.bisect_right(_addresses, address) - 1
    mapped = _maps.get(_addresses[index]) if index >= 0 else None
    if mapped is None or address >= mapped.address + len(mapped):
        return None
    return Region(mapped, address - mapped.address, storage.nbytes())


def merged(regions: Iterable[Region]) -> list[Region]:
    """Join regions that touch or share a page: few long calls instead of many short ones."""
    found: list[Region] = []
    for region in sorted(regions, key=lambda region: (region.map.address, region.start)):
        last = found[-1] if found else None
        if last is not None and last.map is region.map and region.start <= last.start + last.nbytes + PAGE_BYTES:
            end = max(region.start + region.nbytes, last.start + last.nbytes)
            found[-1] = Region(last.map, last.start, end - last.start)
        else:
            found.append(region)
    return found


def check_unchanged(regions: Iterable[Region]) -> None:
    """Raise `ApplyError` if a mapped file is not what it was: pages that come later would be of something else.

    A file that was replaced (another one under its name) does no harm: the mapping holds the old one.
    """
    for mapped in {id(region.map): region.map for region in regions}.values():
        try:
            now = stamp_of(os.stat(mapped.path))
        except OSError:
            now = None  # removed; the mapping holds it
        if now is not None and now[0] == mapped.stamp[0] and now != mapped.stamp:
            raise ApplyError(
                f"{mapped.path} was changed while weights in it were in use (offloaded to disk). Load the model again."
            )


def parts(regions: Iterable[Region], number: int) -> list[Region]:
    """Divide regions into about so many parts, between large pages, none of them small."""
    found = list(regions)
    room = max(sum(region.nbytes for region in found) // number, PART_BYTES) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES
    divided: list[Region] = []
    for region in found:
        start, end = region.start, region.start + region.nbytes
        while start < end:
            cut = (start + room) // LARGE_PAGE_BYTES * LARGE_PAGE_BYTES  # a mapping begins with a large page
            following = cut if end - cut > PART_BYTES // 2 else end
            divided.append(Region(region.map, start, following - start))
            start = following
    return divided


def bring(regions: Iterable[Region]) -> None:
    """Have regions in memory when this returns, as far as there is room; the kernel brings the rest on touch.

    Pages come by the largest ones that the file system has, which is 100 times less work than small ones; asking for
    them before (MADV_WILLNEED) would have them come as small ones.

    Raises `ApplyError` if the disk fails, or the file was cut short.
    """
    for region in regions:
        problem = _advise(region, _POPULATE_READ)
        if problem == errno.EINVAL:  # Linux before 5.14
            _advise(region, mmap.MADV_WILLNEED)
        if problem in (errno.EFAULT, errno.EIO, errno.ENODATA):
            raise ApplyError(
                f"can't read {region.map.path}: {os.strerror(problem)}. Is it whole? Load the model again."
            )


def is_cached(region: Region) -> bool:
    """Whether the first and the last page of a region are in memory, be it for others; also if nobody can tell.

    To ask for each page takes a fifth of the time in which they are copied.
    """
    call = _libc_call("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    if call is None:
        return True
    found = ctypes.create_string_buffer(1)
    for position in (region.start, region.start + region.nbytes - 1):
        page = region.map.address + position // PAGE_BYTES * PAGE_BYTES
        if call(page, 1, found) == 0 and not found.raw[0] & 1:
            return False
    return True


def let_go(regions: Iterable[Region]) -> None:
    """Give the memory of regions back, except pages that were written to; the next read brings them from the file."""
    for region in regions:
        for clean in _clean_parts(region):
            _advise(clean, mmap.MADV_DONTNEED)


def let_go_unwritten(regions: Iterable[Region]) -> None:
    """Give the memory of regions back that nobody has written to: not a page of them is looked at."""
    for region in regions:
        _advise(region, mmap.MADV_DONTNEED)


def written_part(region: Region) -> tuple[list[tuple[int, int]], bytes] | None:
    """Return which pages of a region were written to, and what is in them; None if the system does not tell."""
    written = written_ranges(region.map.address + region.start, region.nbytes)
    if not written:
        return None if written is None else ([], b"")
    raw, start = memoryview(region.map), region.map.address
    return written, b"".join(raw[begin - start : end - start] for begin, end in written)


def _clean_parts(region: Region) -> list[Region]:
    """The parts of a region, in whole pages, that hold no written page. None where the system does not tell."""
    base = region.map.address
    first = base + region.start
    written = written_ranges(first, region.nbytes)
    if written is None:
        return []
    last = -(-(first + region.nbytes) // PAGE_BYTES) * PAGE_BYTES
    begins = [first // PAGE_BYTES * PAGE_BYTES, *(end for _, end in written)]
    ends = [*(begin for begin, _ in written), last]
    return [
        Region(region.map, begin - base, min(end - base, len(region.map)) - (begin - base))
        for begin, end in zip(begins, ends, strict=True)
        if begin < end
    ]


def _advise(region: Region, advice: int) -> int:
    """Call madvise on the pages of a region, without the interpreter's lock; returns errno, 0 if all is well."""
    call = _libc_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if call is None or (sys.platform != "linux" and advice in (_POPULATE_READ, _HUGE_PAGES)):
        return 0
    first = region.start // PAGE_BYTES * PAGE_BYTES
    length = min(region.start + region.nbytes, len(region.map)) - first
    if call(region.map.address + first, length, advice) == 0:
        return 0
    return ctypes.get_errno()


@functools.cache
def _libc_call(name: str, *kinds: Any) -> "ctypes._NamedFuncPointer | None":
    """Return a call of the system; None on one without it."""
    try:
        call: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError, TypeError):
        return None
    call.argtypes = kinds
    return call


def computes_as_in_memory(address: int, dtype: torch.dtype, dims: int) -> bool:
    """Whether computing with a tensor that begins at this address gives the bits that it gives in torch's own memory.

    An offset in a file will do: files are mapped at multiples of `ALIGNMENT_BYTES`.
    """
    return address % ALIGNMENT_BYTES == 0 or not dtype.is_floating_point or dims < 2 or computes_anywhere(dtype)


@functools.cache
def computes_anywhere(dtype: torch.dtype) -> bool:
    """Whether products with a matrix come out the same bits wherever in memory it begins, tried on this machine.

    Some libraries read a matrix in other steps if it does not begin at a multiple of 16 or 64 bytes, and sum in another
    order. torch's own tensors always do; tensors in a file may not.
    """
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((64, 64), (257, 129), (512, 1024)):
        matrix = torch.randn(rows, columns, generator=generator).to(dtype)
        nbytes = matrix.numel() * matrix.element_size()
        for count in (1, 2, 16):
            x, y = (torch.randn(count, n, generator=generator).to(dtype) for n in (columns, rows))
            for shift in (dtype.itemsize, 8, 24, 32):
                elsewhere = torch.empty(nbytes + ALIGNMENT_BYTES, dtype=torch.uint8)
                moved = elsewhere[shift : shift + nbytes].view(dtype).view(rows, columns).copy_(matrix)
                if not (torch.equal(x @ matrix.t(), x @ moved.t()) and torch.equal(y @ matrix, y @ moved)):
                    return False
    return True

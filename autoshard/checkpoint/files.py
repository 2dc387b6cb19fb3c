"""Open files of a load: read to the last byte, or an error that names the file."""

import contextlib
import mmap
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

from autoshard.errors import CheckpointError

MADV_POPULATE_READ = 22
"""Linux 5.14; Python does not name it."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is read; `mark` tells whether it is still the same. `pages`: all of it, if it was mapped."""

    path: Path
    descriptor: int
    mark: tuple[int, int]
    pages: "list[mmap.mmap]" = field(default_factory=list)


class OpenFiles:
    """The files of a list of reads: each opened at its first, checked and closed after its last."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.left = Counter(files)
        self.opened: dict[Path, OpenFile] = {}
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def use(self, path: Path) -> Iterator[OpenFile]:
        """Lend a file for one read. Raises `CheckpointError` for what the system says, and for a file that changed."""
        try:
            yield self._get(path)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}. Is its disk still there?") from None
        with self.lock:
            self.left[path] -= 1
            if self.left[path]:
                return
            opened = self.opened.pop(path)
        try:
            if _mark(opened.descriptor) != opened.mark:
                raise CheckpointError(f"{path} was changed while it was read. Load again when nothing writes to it.")
        finally:
            os.close(opened.descriptor)

    def _get(self, path: Path) -> OpenFile:
        with self.lock:
            if path not in self.opened:
                descriptor = os.open(path, os.O_RDONLY)
                self.opened[path] = OpenFile(path, descriptor, _mark(descriptor))
            return self.opened[path]

    def advise(self, path: Path, begin: int, end: int) -> None:
        """Tell the system that a stretch will be read soon; no harm if it can't be told."""
        with contextlib.suppress(OSError, AttributeError):
            os.posix_fadvise(self._get(path).descriptor, begin, end - begin, os.POSIX_FADV_WILLNEED)

    def __enter__(self) -> "OpenFiles":
        return self

    def __exit__(self, *error: object) -> None:
        """Close what an error left open."""
        while self.opened:
            os.close(self.opened.popitem()[1].descriptor)


def _mark(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def read_fully(file: OpenFile, begin: int, memory: torch.Tensor) -> None:
    """Fill bytes in one stretch of CPU memory from a position of a file."""
    view = memory.numpy().data
    while view:
        count = os.preadv(file.descriptor, [view], begin)
        if count == 0:
            raise _ended(file, begin)
        view, begin = view[count:], begin + count


@contextlib.contextmanager
def mapped_stretch(file: OpenFile, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Lend bytes of the page cache that are a stretch of a file, within the block.

    That they can be read is made sure first, as an error of the disk, or a file that ends too early, would otherwise
    end the process when the bytes are touched.
    """
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    if os.fstat(file.descriptor).st_size < end:
        raise _ended(file, begin)
    if not file.pages:  # two threads may map it twice, which does no harm
        file.pages.append(mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_COPY))
    pages = file.pages[0]
    if _populates():
        pages.madvise(MADV_POPULATE_READ, first, end - first)
    try:
        yield torch.frombuffer(pages, dtype=torch.uint8, count=end - begin, offset=begin)
    finally:
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            pages.madvise(mmap.MADV_DONTNEED, first, last - first)


@cache
def _populates() -> bool:
    """Whether this system can bring in the pages of a map and report failures."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        try:
            page.madvise(MADV_POPULATE_READ)
        except (OSError, AttributeError):
            return False
    return True


def _ended(file: OpenFile, position: int) -> CheckpointError:
    return CheckpointError(
        f"{file.path} became shorter while it was read: it ends before byte {position + 1}. Download or copy it again."
    )

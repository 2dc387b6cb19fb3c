"""Open files of a load: read to the last byte, or an error that names the file.

What is in the page cache is copied out of it. The rest is read past it, as it is needed once: to fill the page cache
takes as much memory again, and on a virtual machine, where fresh memory comes from its host, longer than the disk.
"""

import contextlib
import ctypes
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from autoshard.errors import ApplyError, CheckpointError
from autoshard.runtime.file_reads import FileReads
from autoshard.runtime.mapped import MappedFile, Region, bring, let_go_unwritten, map_file

PIECE_BYTES = 4 << 20
"""The most that is read at a time past the page cache: some readers with that much keep a disk at work."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is read; `mark` tells whether it is still the same. `mapped`: all of it, unless that can't be."""

    path: Path
    descriptor: int
    mark: tuple[int, int]
    mapped: MappedFile | None
    reads: FileReads


class OpenFiles:
    """The files of a list of reads: each opened at its first, checked and closed after its last."""

    def __init__(self, files: Iterable[Path]) -> None:
        self.left = Counter(files)
        self.opened: dict[Path, OpenFile] = {}
        self.lock = threading.Lock()
        self.reads = FileReads()

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
                mapped = None
                with contextlib.suppress(ApplyError):
                    mapped = map_file(path)
                self.opened[path] = OpenFile(path, descriptor, _mark(descriptor), mapped, self.reads)
            return self.opened[path]

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
        nbytes = min(len(view), PIECE_BYTES)
        if file.mapped is None or not _read_past(file, file.mapped, begin, view[:nbytes]):
            nbytes = os.preadv(file.descriptor, [view], begin)
            if nbytes == 0:
                raise _ended(file, begin)
        view, begin = view[nbytes:], begin + nbytes


def _read_past(file: OpenFile, mapped: MappedFile, begin: int, view: memoryview) -> bool:
    address = ctypes.addressof(ctypes.c_char.from_buffer(view))
    return begin + len(view) <= len(mapped) and file.reads.read(Region(mapped, begin, len(view)), view, address)


@contextlib.contextmanager
def mapped_stretch(file: OpenFile, begin: int, end: int) -> Iterator[torch.Tensor]:
    """Lend bytes of the page cache that are a stretch of a file, within the block.

    That they can be read is made sure first, as an error of the disk, or a file that ends too early, would otherwise
    end the process when the bytes are touched.
    """
    if file.mapped is None or os.fstat(file.descriptor).st_size < end:
        raise _ended(file, begin)
    region = [Region(file.mapped, begin, end - begin)]
    try:
        bring(region)
    except ApplyError as error:
        raise CheckpointError(str(error)) from None
    try:
        yield torch.frombuffer(file.mapped, dtype=torch.uint8, count=end - begin, offset=begin)
    finally:
        let_go_unwritten(region)


def _ended(file: OpenFile, position: int) -> CheckpointError:
    return CheckpointError(
        f"{file.path} became shorter while it was read: it ends before byte {position + 1}. Download or copy it again."
    )

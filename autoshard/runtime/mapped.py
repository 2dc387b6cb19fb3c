"""Parameters in files: ordinary CPU tensors whose memory is a file, privately mapped.

    model-00003.safetensors   ········[ layers.7.q ][ layers.7.k ]········
                                       │ pages come when they are touched, and the system takes them back as it needs
    layers.7.q.weight         torch.Tensor on the CPU, no copy; what is written to it stays in this process

So state_dict, save and any op work on them, and they take no memory of the process that the system could not take back
until they are written to.
"""

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from autoshard.common.packed import stored_tensors
from autoshard.errors import ApplyError

_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: a file larger than the memory may be mapped


class MappedFile(mmap.mmap):
    """A private mapping of a whole file; tensors in it keep it alive. `stamp`: inode, size, nanoseconds of writing."""

    path: Path
    stamp: tuple[int, int, int]


_FILE = "autoshard_file"
"""The attribute of a storage that says in which mapping it is."""


def map_file(path: Path) -> MappedFile:
    """Map a file anew: what is written to one mapping is not seen in others. Raises `ApplyError` if it can't be."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ApplyError(f"cannot read {path}: {error.strerror}. Is its disk still there?") from None
    try:
        flags = mmap.MAP_PRIVATE | _NO_RESERVE
        made = MappedFile(descriptor, 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        made.path, made.stamp = Path(path), _stamp(os.fstat(descriptor))
    except (OSError, ValueError, OverflowError) as error:
        raise ApplyError(f"cannot map {path}: {error}. Is it whole?") from None
    finally:
        os.close(descriptor)
    return made


def map_tensor(mapped: MappedFile, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a CPU tensor, row-major, whose memory is the file from `offset` on; nothing is read yet.

    Raises `ApplyError` if the file is too short.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if offset + nbytes > len(mapped):
        raise ApplyError(f"{mapped.path} became shorter than its header says. Download or copy it again.")
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=nbytes, offset=offset)
    setattr(raw.untyped_storage(), _FILE, mapped)
    if raw.data_ptr() % dtype.itemsize:  # torch computes on whole elements; no writer of safetensors does this
        raw = raw.clone()
    return raw.view(dtype).view(shape)


def file_of(tensor: torch.Tensor) -> MappedFile | None:
    """Return the file that the memory of a tensor is, None for a tensor in ordinary memory."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return None
    return getattr(tensor.untyped_storage(), _FILE, None)


def check_unchanged(mapped: MappedFile) -> None:
    """Raise `ApplyError` if a mapped file is not what it was: pages that come later would be of something else.

    A file that was replaced (another one under its name) does no harm: the mapping holds the old one.
    """
    with contextlib.suppress(FileNotFoundError):  # removed; the mapping holds it
        now = _stamp(os.stat(mapped.path))
        if now[0] == mapped.stamp[0] and now != mapped.stamp:
            raise ApplyError(f"{mapped.path} was changed while weights in it were in use. Load the model again.")


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def bring(tensors: Iterable[torch.Tensor]) -> None:
    """Have what tensors are in files in memory when this returns, as far as there is room.

    Raises `ApplyError` if a file was changed.
    """
    found = [(part, file_of(part)) for tensor in tensors for part in stored_tensors(tensor)]
    for changed in {id(mapped): mapped for _, mapped in found if mapped is not None}.values():
        check_unchanged(changed)
    for part, mapped in found:
        if mapped is not None and part.is_contiguous():
            part.detach().reshape(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()

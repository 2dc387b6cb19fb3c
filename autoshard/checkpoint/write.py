"""Write safetensors files, and exchange a whole directory for another in one step.

    out/                 the old checkpoint, whole until the last moment
    .out.saving-3f2a…/   the new one, written and synced beside it ──exchange──▶ out/; what was there is deleted then

The library's own writer wants all tensors of a file in memory at once; this one takes them one after another and writes
the same bytes.
"""

import contextlib
import ctypes
import errno
import fcntl
import json
import os
import re
import shutil
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from autoshard.checkpoint.header import DTYPES, INDEX_FILE, SINGLE_FILE
from autoshard.errors import CheckpointError

CHUNK_BYTES = 1 << 28
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The library writes what needs the widest alignment first; this is its order, checked by a test.
_ORDER = (
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
    "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL",
)  # fmt: skip
_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD of fcntl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What a header says of a tensor, apart from where it is."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the tensor takes in a file."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


AnyDescribed = TypeVar("AnyDescribed", bound=Described)


def in_file_order(tensors: "Sequence[AnyDescribed]") -> "list[AnyDescribed]":
    """Sort the tensors of a file as the safetensors library does: by dtype, then by name."""
    rank = {name: place for place, name in enumerate(_ORDER)}
    return sorted(tensors, key=lambda one: (rank[dtype_name(one.name, one.dtype)], one.name))


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """What the format calls a dtype. Raises `CheckpointError` for one that it does not have."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{name} is of {dtype}, which safetensors files can't hold. Convert it before saving.")
    return _NAMES[dtype]


def header_of(tensors: Sequence[Described], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the first tensor, for tensors that follow each other in this order."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for one in tensors:
        dtype = dtype_name(one.name, one.dtype)
        shape = [*one.shape[:-1], one.shape[-1] * 2] if dtype == "F4" else list(one.shape)  # torch counts pairs
        entries[one.name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [position, position + one.nbytes],
        }
        position += one.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Writer:
    """One file being written, from its header on."""

    def __init__(self, file: Path, header: bytes) -> None:
        self.file = file
        self.descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        self._write(memoryview(header))

    def add(self, tensor: torch.Tensor) -> None:
        """Append the values of a tensor on the CPU, row by row."""
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if tensor.numel():
            self._write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def _write(self, data: memoryview) -> None:
        while data:
            data = data[os.write(self.descriptor, data[:CHUNK_BYTES]) :]

    def finish(self) -> None:
        """Wait until the file is on the disk."""
        os.fsync(self.descriptor)
        self.close()

    def close(self) -> None:
        """Let go of the file, whatever is in it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@contextlib.contextmanager
def replacing(path: Path, *, carry_over: bool = True) -> Iterator[Path]:
    """Give a new directory that takes the place of `path` when the block ends, and vanishes if it raises.

    Until then, and if this process is killed, `path` is as it was. With `carry_over` files of the old directory that
    are no weights and that the block did not write are kept. `path` must be a directory, or not exist.

    Two directories are exchanged, and not their files one by one, for then a kill in between would leave the weights of
    one model with the configuration of another, or files of both under names that only the index tells apart.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = path.is_dir() and (os.path.ismount(path) or not os.access(path.parent, os.W_OK))
    if inside:
        _check_no_weights(path)
    elif path.is_dir() and Path(os.path.realpath(".")).is_relative_to(path):
        raise CheckpointError(f"{path} is, or holds, the working directory, and can't be replaced. Start from another.")
    folder, lock = _start(path / path.name if inside else path)
    try:
        yield folder
        if inside:
            _move_into(folder, path)
        else:
            with _locked(path.parent):  # others may save to the same place
                if carry_over and path.is_dir():
                    _carry_over(path, folder)
                _sync(folder)
                _commit(folder, path)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _check_no_weights(path: Path) -> None:
    """Where nothing can be made beside a directory, there is nothing to exchange it for."""
    if any(_is_weights(name) for name in os.listdir(path)):
        reason = "is a mount point" if os.path.ismount(path) else f"lies in {path.parent}, which you may not write to"
        raise CheckpointError(
            f"{path} {reason}, so the checkpoint in it can't be replaced in one step. Save to a directory inside it."
        )


def _move_into(folder: Path, path: Path) -> None:
    """Move what was written into a directory without weights; the file that makes it a checkpoint comes last."""
    _sync(folder)
    for name in sorted(os.listdir(folder), key=lambda name: (name == INDEX_FILE, name == SINGLE_FILE, name)):
        (folder / name).rename(path / name)
    _sync(path)
    folder.rmdir()


def _start(path: Path) -> tuple[Path, int]:
    """Make the new directory, locked as long as this process lives, and clear away what killed processes left."""
    with _locked(path.parent) as locked:
        if locked:
            _clear(path)
        folder = path.with_name(f".{path.name}.saving-{uuid.uuid4().hex[:12]}")
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        _lock(lock)
    return folder, lock


def _clear(path: Path) -> None:
    """Remove half-written directories of saves to `path` that were killed: those that nobody has locked."""
    prefixes = (f".{path.name}.saving-", f".{path.name}.replaced-")
    for name in sorted(os.listdir(path.parent)):
        left = path.with_name(name)
        if not name.startswith(prefixes) or left.is_symlink() or not left.is_dir():
            continue
        if name.startswith(prefixes[1]) and not path.exists():  # killed between the two steps of `_swap`
            left.rename(path)
            continue
        with contextlib.suppress(OSError):
            descriptor = os.open(left, os.O_RDONLY | os.O_CLOEXEC)
            try:
                if _lock(descriptor):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(descriptor)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of a directory while names in it change; whether this file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _lock(descriptor, wait=True)
    finally:
        os.close(descriptor)


def _lock(descriptor: int, wait: bool = False) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _carry_over(old: Path, new: Path) -> None:
    """Give the new directory what else is in the old one: a tokenizer, notes. Links, which cost no space."""
    for item in os.scandir(old):
        target = new / item.name
        if _is_weights(item.name) or target.exists():
            continue
        if item.is_dir(follow_symlinks=False):
            shutil.copytree(item.path, target, symlinks=True, copy_function=_link)
        else:
            _link(item.path, str(target))
    shutil.copystat(old, new)
    os.utime(new)


def _is_weights(name: str) -> bool:
    return name == INDEX_FILE or _WEIGHTS.fullmatch(name) is not None


def _link(source: str, target: str, follow_symlinks: bool = True) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no links on this file system, or none to files of others
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _commit(folder: Path, path: Path) -> None:
    try:
        folder.rename(path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        _swap(folder, path)
    _sync(path.parent)
    shutil.rmtree(folder, ignore_errors=True)  # now the old one, if any; the next save would remove what is left


def _swap(one: Path, other: Path) -> None:
    """Exchange two directories: in one step where the system can, else in two, which `_clear` completes."""
    exchange = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if exchange is not None:
        if exchange(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
            raise OSError(code, os.strerror(code), str(other))
    aside = one.with_name(one.name.replace(".saving-", ".replaced-"))
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)


def _sync(directory: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # some file systems have nothing to wait for
            os.fsync(descriptor)
    finally:
        os.close(descriptor)

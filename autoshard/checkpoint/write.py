"""Put a whole directory in the place of another, so that at any moment one of both can be read.

    out/            the old checkpoint, whole until the last moment
    .out.saving/    the new one, written and synced beside it, then exchanged for out/; what was there is deleted
    .out.old/       where a system can't exchange directories: the old one, between its two renames

Directories are exchanged, and not their files one by one, for then a kill in between would leave the weights of one
model with the configuration of another.
"""

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from autoshard.checkpoint.header import INDEX_FILE
from autoshard.errors import CheckpointError

_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD of fcntl.h, RENAME_EXCHANGE of linux/fs.h


@contextlib.contextmanager
def replacing(path: Path, *, carry_over: bool = True) -> Iterator[Path]:
    """Give a new directory that takes the place of `path` when the block ends, and vanishes if it raises.

    Until then, and if this process is killed, `path` is as it was. With `carry_over` files of the old directory that
    are no weights and that the block did not write are kept. Who else saves beside it waits. Raises `CheckpointError`
    for a directory that nothing can take the place of.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    _check_replaceable(path)
    new, old = _beside(path, "saving"), _beside(path, "old")
    with _locked(path.parent):
        _finish_interrupted(path, new, old)  # what a killed save left
        new.mkdir()
        try:
            yield new
            if carry_over and path.is_dir():
                _carry_over(path, new)
            _sync(new)
            if path.is_dir() and not _exchanged(new, path):
                path.rename(old)
            if not path.is_dir():
                new.rename(path)
            _sync(path.parent)
        finally:
            _finish_interrupted(path, new, old)


def standing(path: Path) -> Path:
    """Where to read what was saved to `path`: beside it, if a kill came between two renames."""
    beside = _beside(path.absolute(), "old")
    return path if path.exists() or not beside.is_dir() else beside


def _beside(path: Path, purpose: str) -> Path:
    return path.with_name(f".{path.name}.{purpose}")


def _finish_interrupted(path: Path, new: Path, old: Path) -> None:
    """Leave only `path`, as it was last whole."""
    if old.is_dir() and not path.exists():
        old.rename(path)
    for left in (new, old):
        shutil.rmtree(left, ignore_errors=True)


def _check_replaceable(path: Path) -> None:
    if not path.is_dir():
        return
    if os.path.ismount(path) or not os.access(path.parent, os.W_OK):
        reason = "is a mount point" if os.path.ismount(path) else f"lies in {path.parent}, which you may not write to"
        raise CheckpointError(
            f"{path} {reason}, so a checkpoint in it can't be replaced in one step. Save to a directory inside it."
        )
    if Path(os.path.realpath(".")).is_relative_to(path):
        raise CheckpointError(f"{path} is, or holds, the working directory, and can't be replaced. Start from another.")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, where its file system has locks."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _carry_over(old: Path, new: Path) -> None:
    """Give the new directory what else is in the old one: a tokenizer, notes. Links, which cost no space."""

    def left_out(folder: str, names: list[str]) -> list[str]:
        if Path(folder) != old:
            return []
        return [n for n in names if n == INDEX_FILE or _WEIGHTS.fullmatch(n) or os.path.lexists(new / n)]

    shutil.copytree(old, new, symlinks=True, ignore=left_out, copy_function=_link, dirs_exist_ok=True)
    os.utime(new)


def _link(source: str, target: str) -> str:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # no links on this file system, or none to files of others
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def _exchanged(new: Path, path: Path) -> bool:
    """Exchange two directories in one step, which Linux can on most file systems; whether it was done."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(new), _HERE, os.fsencode(path), _EXCHANGE) == 0


def _sync(directory: Path) -> None:
    """Wait until a directory and the files in it are on the disk."""
    inside = [Path(item) for item in os.scandir(directory) if item.is_file(follow_symlinks=False)]
    for path in (*inside, directory):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with contextlib.suppress(OSError):  # some file systems have nothing to wait for
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

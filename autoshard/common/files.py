"""Files that a person asked for: whole or not at all, and refused before the work that fills them."""

import os
import tempfile
from pathlib import Path

from autoshard.errors import SpecError


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raise `SpecError` unless a file can be written there."""
    target = Path(path)
    if target.is_dir():
        raise SpecError(f"cannot write to {target}: it is a folder. Name a file in it, such as {target / 'out'}.")
    if _is_device(target):
        return
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        raise _refused(target, error) from None


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file under a temporary name, then rename it, so that it appears whole. Raises `SpecError`."""
    target, data = Path(path), content.encode() if isinstance(content, str) else content
    check_writable(target)
    try:
        if _is_device(target):  # renaming would put a file in its place
            target.write_bytes(data)
            return
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
        try:
            with open(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)  # mkstemp makes it private
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise _refused(target, error) from None


def _is_device(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder, such as /dev/null or a pipe."""
    return path.exists() and not path.is_file()


def _refused(path: Path, error: OSError) -> SpecError:
    return SpecError(f"cannot write to {path}: {error.strerror}. Choose a folder that exists and may be written to.")

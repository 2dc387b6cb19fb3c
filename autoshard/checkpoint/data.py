"""What is known of a checkpoint before a byte of it is read, and what is to be read from it.

model.safetensors.index.json ┐
model-00001-of-00003…        ├─ headers ──▶ Checkpoint: name -> Entry (file, offset, bytes, dtype, shape)
model-00002-of-00003…        ┘

Entry ──expression──▶ one tensor of the model (Source) ──boxes──▶ what one device has of it (Box)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from autoshard.checkpoint.traced import Expression, leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint: `nbytes` at `offset` (from the start of the file), in row-major order."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """All tensors of a directory, or of one file."""

    path: Path
    entries: Mapping[str, Entry]
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How one tensor of the model, of this shape and dtype, is made of tensors of the checkpoint.

    Attributes:
        made: what is done to entries, by name; mostly an entry itself.
        pack: makes the packed tensor (`packed.py`) that the model has of rows of this one, of any number of them; the
            values of a row do not depend on others. None: the model has an ordinary tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    made: Expression
    pack: "Callable[[torch.Tensor], torch.Tensor] | None" = None


def whole_entry(entry: Entry, dtype: torch.dtype | None = None) -> Source:
    """A source that is one tensor of the files; `dtype`: another than it has there."""
    return Source(shape=entry.shape, dtype=dtype or entry.dtype, made=leaf(entry.name, entry.shape, entry.dtype))

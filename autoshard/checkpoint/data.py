"""What is known of a checkpoint before a byte of it is read, and what is to be read from it.

    model.safetensors.index.json ┐
    model-00001-of-00003…        ├─ headers ──▶ Checkpoint: name -> Entry (file, offset, bytes, dtype, shape)
    model-00002-of-00003…        ┘

    Entry ──views──▶ Piece ──region──▶ one tensor of the model (Source) ──runs──▶ what one device has of it (Target)

A plain checkpoint has one piece per tensor of the model, with no view and the whole as its region. Fused experts have
one piece per expert and matrix; what no such pieces can say is computed from whole tensors by `Source.compute`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


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
    """All tensors of a directory, or of one file; `metadata` is that of the first header."""

    path: Path
    entries: Mapping[str, Entry]
    files: tuple[Path, ...]
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of the checkpoint that is one region of a tensor of the model.

    Attributes:
        views: calls that turn the file's tensor into the region, in order, each a view: ("transpose", 0, 1),
            ("narrow", 0, 128, 64), ("reshape", (8, -1)), ("select", 0, 3), ("unsqueeze", 0) …
        region: (start, length) along every dimension of the model's tensor; None: all of it.
    """

    entry: str
    views: tuple[tuple, ...] = ()
    region: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """How one tensor of the model, of this shape and dtype, is made: of disjoint pieces, or computed.

    Attributes:
        pieces: they cover the tensor; read, cast and written each on its own.
        compute: entries and a function of their values on the CPU; for what is not made of pieces. It needs all of
            them, and the result, in host memory at once.
        pack: makes the packed tensor (`packed.py`) that the model has of rows of this one, of any number of them; the
            values of a row do not depend on others. None: the model has an ordinary tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...] = ()
    compute: "tuple[tuple[str, ...], Callable[..., torch.Tensor]] | None" = None
    pack: "Callable[[torch.Tensor], torch.Tensor] | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Memory to be filled, on any device: all of a source, or the runs of it that a rank has.

    Attributes:
        tensor: allocated; its shape is the source's, or what the runs leave of it.
        dim, runs: along this one dimension only [start, stop) of each run, one after the other; None: everything.
    """

    source: str
    tensor: torch.Tensor
    dim: int = 0
    runs: tuple[tuple[int, int], ...] | None = None

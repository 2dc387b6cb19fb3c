"""Fill targets from files: each tensor is mapped, and what a target needs of it is copied out of the mapping.

    file ──map──▶ entries ──expression──▶ box ──copy, cast──▶ CPU target
                                              ──pinned buffers, a stream──▶ target on a GPU

Pages that no target needs are never touched, and none are kept once their tensor is read. A few threads each take one
source after the other, in the order of the files, so that a disk always has something to do.
"""

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait

import torch
from torch import nn

from autoshard.checkpoint.boxes import Box
from autoshard.checkpoint.data import Checkpoint, Entry, Source
from autoshard.checkpoint.traced import fill, leaves
from autoshard.common.packed import is_packed, stored_tensors
from autoshard.common.progress import tell
from autoshard.errors import ApplyError, CheckpointError
from autoshard.runtime.mapped import map_file, map_tensor
from autoshard.runtime.pinned import Uploads, has_streams

THREADS = 4
"""While one waits for the disk, others copy."""
SHOWN_SECONDS = 0.1
PACKED_ELEMENTS = 1 << 19
"""Packed at once: what that makes on the way stays in the processor's caches (measured: 5 times as fast as 2**24)."""


def read_into(checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Sequence[tuple[str, Box]]) -> int:
    """Fill every target from the files, cast to its dtype, on its device; return how many bytes of them were read.

    How far it is, in bytes, is told from this thread a few times per second (`common.progress`). Raises
    `CheckpointError` that names the file if it can't be read or is changed meanwhile, and if a source or a target does
    not fit; the targets may then hold anything.
    """
    by_source: dict[str, list[Box]] = {}
    for name, box in targets:
        _check_fits(checkpoint, name, sources[name], box)
        by_source.setdefault(name, []).append(box)
    names = sorted(by_source, key=lambda name: _place(checkpoint, sources[name]))
    nbytes = {name: _wanted_bytes(checkpoint, sources[name], by_source[name]) for name in names}
    uploads = Uploads(box.value.device for _, box in targets if has_streams(box.value.device))
    before = _stamps(checkpoint)
    mode, done, total = torch.is_inference_mode_enabled(), 0, sum(nbytes.values())

    def read(name: str) -> int:
        with torch.inference_mode(mode), torch.no_grad():
            _read(checkpoint, name, sources[name], by_source[name], uploads)
        return nbytes[name]

    with ThreadPoolExecutor(THREADS, thread_name_prefix="autoshard-reader") as pool:
        left: set[Future[int]] = {pool.submit(read, name) for name in names}
        try:
            while left:
                finished, left = wait(left, SHOWN_SECONDS, FIRST_EXCEPTION)
                done += sum(one.result() for one in finished)
                tell("bytes", done, total)
        finally:
            pool.shutdown(cancel_futures=True)
            uploads.finish()  # also where it failed: nobody may free a target that is still written to
    if _stamps(checkpoint) != before:
        raise CheckpointError(f"{checkpoint.path} was changed while it was read. Load again when nothing writes to it.")
    tell("bytes", done, total)
    return done


def _check_fits(checkpoint: Checkpoint, name: str, source: Source, box: Box) -> None:
    """Raise `CheckpointError` unless a source is made of what is there, and a target has the shape of a box of it."""
    shape = tuple(box.value.shape)
    missing = [entry for entry in leaves(source.made) if entry not in checkpoint.entries]
    if missing:
        raise CheckpointError(f"{checkpoint.path} has no tensor {missing[0]!r}, which {name} is made of.")
    begin = box.offset or (0,) * len(source.shape)
    ends = tuple(first + length for first, length in zip(begin, shape, strict=False))
    if len(shape) != len(source.shape) or any(end > size for end, size in zip(ends, source.shape, strict=True)):
        raise CheckpointError(f"{name} of shape {list(source.shape)} has no box of {list(shape)} at {list(begin)}.")
    if not box.offset and shape != source.shape:
        raise CheckpointError(f"{name} needs the shape {list(source.shape)}, and its memory has {list(shape)}.")
    if box.value.is_meta:
        raise CheckpointError(f"{name} has no memory: it is on the meta device.")


def _place(checkpoint: Checkpoint, source: Source) -> tuple[str, int]:
    entry = checkpoint.entries[leaves(source.made)[0]]
    return str(entry.file), entry.offset


def _wanted_bytes(checkpoint: Checkpoint, source: Source, targets: Sequence[Box]) -> int:
    """Bytes of the files that are copied or computed with; what several targets have alike is counted once."""
    entries = [checkpoint.entries[name] for name in leaves(source.made)]
    boxes = {(box.offset, box.value.shape): box.value.numel() for box in targets}
    nbytes = sum(entry.nbytes for entry in entries)
    return nbytes * min(sum(boxes.values()), size) // size if (size := math.prod(source.shape)) else nbytes


def _stamps(checkpoint: Checkpoint) -> list[tuple[int, int]]:
    """Size and time of writing of the files. Raises `CheckpointError` for one that is gone."""
    try:
        return [(found.st_size, found.st_mtime_ns) for found in map(os.stat, checkpoint.files)]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}. Is its disk still there?") from None


def map_entries(entries: Collection[Entry]) -> list[torch.Tensor]:
    """Return CPU tensors that privately map their bytes in the files, each file once; nothing is read yet."""
    try:
        files = {path: map_file(path) for path in dict.fromkeys(entry.file for entry in entries if entry.nbytes)}
        return [
            map_tensor(files[entry.file], entry.offset, entry.dtype, entry.shape) if entry.nbytes
            else torch.empty(entry.shape, dtype=entry.dtype) for entry in entries
        ]  # fmt: skip
    except ApplyError as error:
        raise CheckpointError(str(error)) from error


def read_entry(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Read one tensor of the files to the CPU."""
    return map_entries([checkpoint.entries[name]])[0].clone()


def _read(checkpoint: Checkpoint, name: str, source: Source, targets: Sequence[Box], uploads: Uploads) -> None:
    """Fill the targets of one source."""

    def copy(into: torch.Tensor, value: torch.Tensor) -> None:
        if into.shape != value.shape:
            raise CheckpointError(
                f"{name} has the shape {list(source.shape)}, and what {checkpoint.path} holds gives "
                f"{list(value.shape)} for {list(into.shape)} of it."
            )
        if uploads.send(into, value):
            return
        if type(into) in (torch.Tensor, nn.Parameter):
            into.copy_(value)
            return
        with uploads.lock:  # tensors of other types may keep counters in Python
            into.copy_(value)

    def entry(one: str) -> torch.Tensor:
        return map_entries([checkpoint.entries[one]])[0]  # a mapping of its own: no pages are kept after it

    for box in targets:
        if source.pack is not None:
            _read_packed(source, box.value.detach(), entry, copy)
        else:
            fill(box.value.detach(), source.made, entry, copy, box.offset)


def _write(into: torch.Tensor, value: torch.Tensor) -> None:
    into.copy_(value)


def _read_packed(
    source: Source, packed: torch.Tensor, entry: Callable[[str], torch.Tensor],
    copy: Callable[[torch.Tensor, torch.Tensor], None],
) -> None:  # fmt: skip
    """Pack some rows at a time: the values of a row do not depend on others, and few whole rows are ever in memory."""
    assert source.pack is not None and is_packed(packed)
    count, row = source.shape[0], max(1, math.prod(source.shape[1:]))
    by_rows = all(part.dim() and part.shape[0] == count for part in stored_tensors(packed))
    step = max(1, PACKED_ELEMENTS // row) if by_rows else count
    for start in range(0, count, step):
        values = torch.empty((min(step, count - start), *source.shape[1:]), dtype=source.dtype)
        fill(values, source.made, entry, _write, (start, *(0,) * (len(source.shape) - 1)))
        for part, made in zip(stored_tensors(packed), stored_tensors(source.pack(values)), strict=True):
            copy(part.narrow(0, start, len(values)) if by_rows else part, made)

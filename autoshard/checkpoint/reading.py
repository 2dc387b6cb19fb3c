"""Fill targets from files: each tensor is mapped, and what a target needs of it is copied out of the mapping.

    file ──map──▶ entry ──views──▶ piece ──runs──▶ part ──copy, cast──▶ CPU target
                                                        ──pinned buffers, a stream──▶ target on a GPU

Pages that no target needs are never touched, and none are kept once their tensor is read. A few threads each take one
source after the other, in the order of the files, so that a disk always has something to do.
"""

import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Entry, Piece, Source, Target
from autoshard.errors import CheckpointError
from autoshard.packed import is_packed, stored_tensors
from autoshard.runtime.pinned import Uploads, has_streams

Progress = Callable[[int, int], None]
THREADS = 4
"""While one waits for the disk, others copy."""
SHOWN_SECONDS = 0.1
PACKED_ELEMENTS = 1 << 19
"""Packed at once: what that makes on the way stays in the processor's caches (measured: 5 times as fast as 2**24)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadReport:
    """What a load read of the files, in bytes, and how long it took."""

    bytes_read: int
    seconds: float


def read_into(
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    targets: Sequence[Target],
    *,
    progress: Progress | None = None,
) -> ReadReport:
    """Fill every target from the files; values are cast to the target's dtype, on its device.

    `progress(bytes done, bytes in all)` is called from this thread a few times per second. Raises `CheckpointError`
    that names the file if it can't be read or is changed meanwhile, and if a source or a target does not fit; the
    targets may then hold anything.
    """
    started = time.perf_counter()
    by_source: dict[str, list[Target]] = {}
    for target in targets:
        check_target(sources[target.source], target)
        by_source.setdefault(target.source, []).append(target)
    for name in by_source:
        check_source(checkpoint, name, sources[name])
    names = sorted(by_source, key=lambda name: _place(checkpoint, sources[name]))
    nbytes = {name: _wanted_bytes(checkpoint, sources[name], by_source[name]) for name in names}
    uploads = Uploads(target.tensor.device for target in targets if has_streams(target.tensor.device))
    before = _stamps(checkpoint)
    mode, done, total = torch.is_inference_mode_enabled(), 0, sum(nbytes.values())

    def fill(name: str) -> int:
        with torch.inference_mode(mode), torch.no_grad():
            _fill(checkpoint, name, sources[name], by_source[name], uploads)
        return nbytes[name]

    with ThreadPoolExecutor(THREADS, thread_name_prefix="autoshard-reader") as pool:
        left: set[Future[int]] = {pool.submit(fill, name) for name in names}
        try:
            while left:
                finished, left = wait(left, SHOWN_SECONDS, FIRST_EXCEPTION)
                done += sum(one.result() for one in finished)
                if progress is not None:
                    progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
            uploads.finish()  # also where it failed: nobody may free a target that is still written to
    if _stamps(checkpoint) != before:
        raise CheckpointError(f"{checkpoint.path} was changed while it was read. Load again when nothing writes to it.")
    if progress is not None:
        progress(done, total)
    return ReadReport(bytes_read=done, seconds=time.perf_counter() - started)


def check_source(checkpoint: Checkpoint, name: str, source: Source) -> None:
    """Raise `CheckpointError` unless what a source is made of is in the checkpoint, and fills its shape."""
    missing = [entry for entry in _entries(source) if entry not in checkpoint.entries]
    if missing:
        raise CheckpointError(f"{checkpoint.path} has no tensor {missing[0]!r}, which {name} is made of.")
    if source.compute is not None:
        return
    regions = [_region(source, piece) for piece in source.pieces]
    covered = sum(math.prod(length for _, length in region) for region in regions)
    inside = all(
        start >= 0 and length >= 0 and start + length <= size
        for region in regions
        for (start, length), size in zip(region, source.shape, strict=True)
    )
    if not inside or covered != math.prod(source.shape):
        raise CheckpointError(f"the {len(regions)} pieces of {name} do not fill its shape {list(source.shape)}.")


def check_target(source: Source, target: Target) -> None:
    """Raise `CheckpointError` unless the target's memory has the shape of what it is to hold, and is on a device."""
    shape = list(source.shape)
    if target.runs is not None:
        if any(not 0 <= start <= stop <= shape[target.dim] for start, stop in target.runs):
            raise CheckpointError(f"{target.source} of shape {shape} has no {target.runs} along {target.dim}.")
        shape[target.dim] = sum(stop - start for start, stop in target.runs)
    if list(target.tensor.shape) != shape:
        raise CheckpointError(f"{target.source} needs the shape {shape}, and its memory has {[*target.tensor.shape]}.")
    if target.tensor.is_meta:
        raise CheckpointError(f"{target.source} has no memory: it is on the meta device.")


def _entries(source: Source) -> list[str]:
    return [*source.compute[0]] if source.compute is not None else [piece.entry for piece in source.pieces]


def _place(checkpoint: Checkpoint, source: Source) -> tuple[str, int]:
    entry = checkpoint.entries[_entries(source)[0]]
    return str(entry.file), entry.offset


def _region(source: Source, piece: Piece) -> tuple[tuple[int, int], ...]:
    return piece.region if piece.region is not None else tuple((0, size) for size in source.shape)


def _wanted_bytes(checkpoint: Checkpoint, source: Source, targets: Sequence[Target]) -> int:
    """Bytes of the files that are copied or computed with; what several targets have alike is counted once."""
    if source.compute is not None or source.pack is not None:
        return sum(checkpoint.entries[name].nbytes for name in dict.fromkeys(_entries(source)))
    parts = {(target.dim, target.runs): target.tensor.numel() for target in targets}
    return min(sum(parts.values()), math.prod(source.shape)) * checkpoint.entries[_entries(source)[0]].dtype.itemsize


def _stamps(checkpoint: Checkpoint) -> list[tuple[int, int]]:
    """Size and time of writing of the files. Raises `CheckpointError` for one that is gone."""
    try:
        return [(found.st_size, found.st_mtime_ns) for found in map(os.stat, checkpoint.files)]
    except OSError as error:
        raise CheckpointError(f"cannot read {error.filename}: {error.strerror}. Is its disk still there?") from None


def _in_file(entry: Entry) -> torch.Tensor:
    """A tensor where it is in its file; nothing is read yet. It must not be written to."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.dtype)
    skipped = entry.offset % mmap.ALLOCATIONGRANULARITY
    try:
        with open(entry.file, "rb") as file:
            if os.fstat(file.fileno()).st_size < entry.offset + entry.nbytes:  # to touch it would end the process
                raise CheckpointError(f"{entry.file} became shorter while it was read. Download or copy it again.")
            length, begin = skipped + entry.nbytes, entry.offset - skipped
            mapped = mmap.mmap(file.fileno(), length, offset=begin, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise CheckpointError(f"cannot read {entry.file}: {error.strerror}. Is its disk still there?") from None
    raw = torch.frombuffer(mapped, dtype=torch.uint8, count=entry.nbytes, offset=skipped)
    if entry.offset % entry.dtype.itemsize:  # torch computes on whole elements; no writer of safetensors does this
        raw = raw.clone()
    return raw.view(entry.dtype).view(entry.shape)


def _fill(checkpoint: Checkpoint, name: str, source: Source, targets: Sequence[Target], uploads: Uploads) -> None:
    if source.pack is not None:
        _fill_packed(checkpoint, name, source, [target.tensor.detach() for target in targets], uploads)
        return
    if source.compute is not None:
        entries, function = source.compute
        value = function(
            *(_in_file(checkpoint.entries[entry]).clone() for entry in entries)
        )  # it may write into what it is given
        if tuple(value.shape) != source.shape:
            raise CheckpointError(
                f"{name} has the shape {list(source.shape)}, and what {checkpoint.path} holds gives "
                f"{list(value.shape)}."
            )
        whole = [(tuple((0, size) for size in source.shape), value)]
    else:
        whole = [(_region(source, piece), _viewed(checkpoint, name, source, piece)) for piece in source.pieces]
    for region, value in whole:
        for target in targets:
            for into, part in _parts(target, region, value):
                _copy(into, part, uploads)


def _viewed(checkpoint: Checkpoint, name: str, source: Source, piece: Piece) -> torch.Tensor:
    """A piece in its file, in the shape of its region."""
    entry = checkpoint.entries[piece.entry]
    value = _in_file(entry)
    begin, end = value.data_ptr(), value.data_ptr() + max(value.nbytes, 1)
    for view, *arguments in piece.views:
        value = getattr(value, view)(*arguments)
    if value.numel() and not begin <= value.data_ptr() < end:
        raise CheckpointError(f"{piece.views} is no view of a tensor of shape {list(entry.shape)}.")
    room = [length for _, length in _region(source, piece)]
    if list(value.shape) != room:
        raise CheckpointError(
            f"{entry.file}: {entry.name!r} of shape {list(entry.shape)} gives the shape {list(value.shape)}, and "
            f"{name} has room for {room} there."
        )
    return value


def _parts(
    target: Target, region: Sequence[tuple[int, int]], value: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (memory, values) for what a target needs of a region: all of it, or one part per run that meets it."""
    memory = target.tensor.detach()
    for dim, (start, length) in enumerate(region):
        if target.runs is None or dim != target.dim:
            memory = memory.narrow(dim, start, length)
    if target.runs is None:
        yield memory, value
        return
    begin, length = region[target.dim]
    position = 0
    for start, stop in target.runs:
        low, high = max(start, begin), min(stop, begin + length)
        if low < high:
            into = memory.narrow(target.dim, position + low - start, high - low)
            yield into, value.narrow(target.dim, low - begin, high - low)
        position += stop - start


def _copy(into: torch.Tensor, value: torch.Tensor, uploads: Uploads) -> None:
    """Copy values of a file to a device, cast on their way."""
    if uploads.send(into, value):
        return
    if type(into) in (torch.Tensor, nn.Parameter):
        into.copy_(value)
        return
    with uploads.lock:  # tensors of other types may keep counters in Python
        into.copy_(value)


def _fill_packed(
    checkpoint: Checkpoint, name: str, source: Source, targets: Sequence[torch.Tensor], uploads: Uploads
) -> None:
    """Pack some rows at a time: the values of a row do not depend on others, and few whole rows are ever in memory."""
    assert source.pack is not None
    count = source.shape[0]
    row = max(1, math.prod(source.shape[1:]))
    by_rows = source.compute is None and all(map(_is_by_rows, targets))
    step = max(1, PACKED_ELEMENTS // row) if by_rows else count
    plain = Source(shape=source.shape, dtype=source.dtype, pieces=source.pieces, compute=source.compute)
    for start in range(0, count, step):
        stop = min(start + step, count)
        values = torch.empty((stop - start, *source.shape[1:]), dtype=source.dtype)
        _fill(checkpoint, name, plain, [Target(source=name, tensor=values, runs=((start, stop),))], uploads)
        made = stored_tensors(source.pack(values))
        for packed in targets:
            for part, packed_values in zip(stored_tensors(packed), made, strict=True):
                _copy(part.narrow(0, start, stop - start) if by_rows else part, packed_values, uploads)


def _is_by_rows(packed: torch.Tensor) -> bool:
    assert is_packed(packed)
    return all(part.dim() and part.shape[0] == packed.shape[0] for part in stored_tensors(packed))

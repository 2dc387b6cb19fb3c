"""Fill targets from files: each file is mapped, and what a target needs is copied out of the mapping.

    file ──map──▶ entry ──views──▶ piece ──runs──▶ part ──copy, cast──▶ CPU target
                                                        ──pinned buffers, a stream──▶ target on a GPU

Pages that no target needs are never touched. A few threads each take one source after the other, in the order of the
files, so that a disk always has something to do.
"""

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.errors import ApplyError, CheckpointError
from autoshard.packed import is_packed, stored_tensors
from autoshard.runtime.mapped import MappedFile, check_unchanged, map_file, map_tensor
from autoshard.runtime.pinned import Uploads, has_streams

Progress = Callable[[int, int], None]
DEFAULT_THREADS = 4
"""While one waits for the disk, others copy."""
SHOWN_SECONDS = 0.1
PACKED_ELEMENTS = 1 << 19
"""Packed at once: what that makes on the way stays in the processor's caches (measured: 5 times as fast as 2**24)."""
_ALONE_ELEMENTS = 32_000
"""What torch copies in one thread (at::internal::GRAIN_SIZE is 32,768)."""


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
    threads: int | None = None,
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
    files = _Files(checkpoint, [sources[name] for name in names])
    uploads = Uploads(target.tensor.device for target in targets if has_streams(target.tensor.device))
    mode, done, total = torch.is_inference_mode_enabled(), 0, sum(nbytes.values())

    def fill(name: str) -> int:
        with torch.inference_mode(mode), torch.no_grad():
            _fill(files, name, sources[name], by_source[name], uploads)
        files.release(sources[name])
        return nbytes[name]

    with ThreadPoolExecutor(threads or DEFAULT_THREADS, thread_name_prefix="autoshard-reader") as pool:
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


class _Files:
    """The mapped files of a load: each is mapped when it is first needed, and let go of after its last source."""

    def __init__(self, checkpoint: Checkpoint, sources: Sequence[Source]) -> None:
        self.checkpoint = checkpoint
        self.left = Counter(file for source in sources for file in self._of(source))
        self.mapped: dict[Path, MappedFile] = {}
        self.lock = threading.Lock()

    def _of(self, source: Source) -> set[Path]:
        return {self.checkpoint.entries[name].file for name in _entries(source)}

    def tensor(self, name: str) -> torch.Tensor:
        """An entry where it is in its file; nothing is read yet."""
        entry = self.checkpoint.entries[name]
        with self.lock:
            try:
                mapped = self.mapped.get(entry.file) or map_file(entry.file)
                check_unchanged(mapped)  # to touch what is not there any more would end the process
                self.mapped[entry.file] = mapped
                return map_tensor(mapped, entry.offset, entry.dtype, entry.shape)
            except ApplyError as error:
                raise CheckpointError(str(error)) from None

    def release(self, source: Source) -> None:
        """A source is read. Raises `CheckpointError` if a file was changed meanwhile."""
        with self.lock:
            for file in self._of(source):
                self.left[file] -= 1
                mapped = self.mapped[file] if self.left[file] else self.mapped.pop(file)
                if os.stat(mapped.path).st_mtime_ns != mapped.stamp[2]:
                    raise CheckpointError(
                        f"{file} was changed while it was read. Load again when nothing writes to it."
                    )


def _fill(files: _Files, name: str, source: Source, targets: Sequence[Target], uploads: Uploads) -> None:
    if source.pack is not None:
        _fill_packed(files, name, source, [target.tensor.detach() for target in targets], uploads)
        return
    if source.compute is not None:
        entries, function = source.compute
        value = function(*(files.tensor(entry).clone() for entry in entries))  # it may write into what it is given
        if tuple(value.shape) != source.shape:
            raise CheckpointError(
                f"{name} has the shape {list(source.shape)}, and what {files.checkpoint.path} holds gives "
                f"{list(value.shape)}."
            )
        whole = [(tuple((0, size) for size in source.shape), value)]
    else:
        whole = [(_region(source, piece), _viewed(files, name, source, piece)) for piece in source.pieces]
    for region, value in whole:
        for target in targets:
            for into, part in _parts(target, region, value):
                _copy(into, part, uploads)


def _viewed(files: _Files, name: str, source: Source, piece: Piece) -> torch.Tensor:
    """A piece in its file, in the shape of its region."""
    entry = files.checkpoint.entries[piece.entry]
    value = files.tensor(piece.entry)
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
    """Copy values of a file to a device; in this thread, as torch would divide each copy over threads of its own."""
    if uploads.send(into, value):
        return
    if type(into) not in (torch.Tensor, nn.Parameter):
        with uploads.lock:  # tensors of other types may keep counters in Python
            into.copy_(value)
        return
    if into.is_contiguous() and value.is_contiguous():
        into, value = into.reshape(-1), value.reshape(-1)
    if into.dim() == 0 or into.numel() <= _ALONE_ELEMENTS or torch.get_num_threads() == 1:
        into.copy_(value)
        return
    rows = max(1, _ALONE_ELEMENTS * len(into) // into.numel())
    for mine, its in zip(into.split(rows), value.split(rows), strict=True):
        mine.copy_(its)


def _fill_packed(files: _Files, name: str, source: Source, targets: Sequence[torch.Tensor], uploads: Uploads) -> None:
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
        _fill(files, name, plain, [Target(source=name, tensor=values, runs=((start, stop),))], uploads)
        made = stored_tensors(source.pack(values))
        for packed in targets:
            for part, packed_values in zip(stored_tensors(packed), made, strict=True):
                _copy(part.narrow(0, start, stop - start) if by_rows else part, packed_values, uploads)


def _is_by_rows(packed: torch.Tensor) -> bool:
    assert is_packed(packed)
    return all(part.dim() and part.shape[0] == packed.shape[0] for part in stored_tensors(packed))

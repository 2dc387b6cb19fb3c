"""Which bytes of which file go where: from sources and targets to one list of reads, in the order of the files.

    down.weight [4, 6], columns cut over two ranks:          only rank 0 here:           both ranks here:

      file   a a a b b b | a a a b b b | a a a b b b | …     mapped: a a a, a a a, …     staged: read whole rows once,
      rank 0 a a a         a a a         a a a               copied from the page cache  copy a's to rank 0, b's to
      rank 1       b b b         b b b         b b b                                     rank 1

A region of a file is described as torch describes a view: shape, strides and offset in elements of its entry.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Entry, Piece, Source, Target
from autoshard.errors import CheckpointError

DIRECT_BYTES = 16 << 20
"""The most that is read at once straight into a tensor."""
CONTIGUOUS_BYTES = 64 << 10
"""Runs of a file this long are worth a read of their own; shorter ones are copied out of pages."""
MAPPED_BYTES = 32 << 20
"""The most that is copied out of pages at once: of four readers half of the memory that they may use."""

Kind = Literal["direct", "staged", "mapped"]


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided region of an entry, and the part of a target that it fills; `into` has the same shape."""

    entry: Entry
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    into: torch.Tensor

    @property
    def begin(self) -> int:
        """The first byte in the file."""
        return self.entry.offset + self.offset * self.entry.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte after the last one in the file."""
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return self.begin + (last + 1) * self.entry.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.entry.dtype.itemsize

    def narrow(self, dim: int, start: int, length: int) -> "Copy":
        if (start, length) == (0, self.shape[dim]):
            return self
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        offset = self.offset + start * self.stride[dim]
        return Copy(self.entry, shape, self.stride, offset, self.into.narrow(dim, start, length))


@dataclass(frozen=True, slots=True)
class Read:
    """A stretch of a file and what is made of it.

    direct   read into the memory of its one copy
    staged   read into a buffer; every copy takes its region from there
    mapped   only the copies' bytes are wanted, which are scattered: they are copied out of the page cache
    """

    file: Path
    begin: int
    end: int
    kind: Kind
    copies: tuple[Copy, ...]

    @property
    def wanted_bytes(self) -> int:
        """What is read of the file, holes of mapped stretches left out."""
        return sum(copy.nbytes for copy in self.copies) if self.kind == "mapped" else self.end - self.begin


def list_reads(
    checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Iterable[Target], *, staged_bytes: int
) -> list[Read]:
    """Return the reads that fill all targets of sources made of pieces, none longer than `staged_bytes` if staged.

    Every byte is read once, whatever number of targets needs it. Raises `CheckpointError` where a target or a piece
    does not fit its source.
    """
    by_entry: dict[str, list[Copy]] = {}
    for target in targets:
        source = sources[target.source]
        check_target(source, target)
        for piece in source.pieces:
            for copy in _copies(checkpoint, target.source, source, piece, target):
                by_entry.setdefault(piece.entry, []).append(copy)
    reads = [read for copies in by_entry.values() for read in _reads_of(copies, staged_bytes)]
    reads.sort(key=lambda read: (read.file, read.begin))
    return [*_joined(reads, staged_bytes)]


def check_sources(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> None:
    """Raise `CheckpointError` unless the pieces of every source are in the checkpoint and fill it, each place once."""
    for name, source in sources.items():
        wanted = source.compute[0] if source.compute is not None else [piece.entry for piece in source.pieces]
        missing = [entry for entry in wanted if entry not in checkpoint.entries]
        if missing:
            raise CheckpointError(f"{checkpoint.path} has no tensor {missing[0]!r}, which {name} is made of.")
        if source.compute is not None:
            continue
        regions = [_region(source, piece) for piece in source.pieces]
        covered = sum(math.prod(length for _, length in region) for region in regions)
        inside = all(
            start >= 0 and length >= 0 and start + length <= size
            for region in regions
            for (start, length), size in zip(region, source.shape, strict=True)
        )
        if not inside or covered != math.prod(source.shape) or _overlap(regions):
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


def _region(source: Source, piece: Piece) -> tuple[tuple[int, int], ...]:
    return piece.region if piece.region is not None else tuple((0, size) for size in source.shape)


def _overlap(regions: Sequence[tuple[tuple[int, int], ...]]) -> bool:
    """Whether two boxes share a place; swept along the first dimension, so that stacks of many are fast."""
    if len(regions) < 2:
        return False
    boxes = sorted(box for box in regions if all(length for _, length in box))
    active: list[tuple[tuple[int, int], ...]] = []
    for box in boxes:
        active = [other for other in active if other[0][0] + other[0][1] > box[0][0]]
        for other in active:
            if all(a < c + d and c < a + b for (a, b), (c, d) in zip(box, other, strict=True)):
                return True
        active.append(box)
    return False


def _copies(checkpoint: Checkpoint, name: str, source: Source, piece: Piece, target: Target) -> Iterator[Copy]:
    """Yield what of a piece a target needs: one region, or one per run that it has a part of."""
    entry = checkpoint.entries[piece.entry]
    region = _region(source, piece)
    shape, stride, offset = geometry(entry.shape, entry.dtype, piece.views)
    if shape != tuple(length for _, length in region):
        raise CheckpointError(
            f"{entry.file}: {entry.name!r} of shape {list(entry.shape)} gives the shape {list(shape)}, and {name} has "
            f"room for {[length for _, length in region]} there."
        )
    if not math.prod(shape):
        return
    memory = target.tensor.detach()
    for dim, (start, length) in enumerate(region):
        if (target.runs is None or dim != target.dim) and (start, length) != (0, memory.shape[dim]):
            memory = memory.narrow(dim, start, length)
    if target.runs is None:
        yield Copy(entry, shape, stride, offset, memory)
        return
    dim, (begin, length), position = target.dim, region[target.dim], 0
    for start, stop in target.runs:
        low, high = max(start, begin), min(stop, begin + length)
        if low < high:
            into = memory.narrow(dim, position + low - start, high - low)
            cut = (*shape[:dim], high - low, *shape[dim + 1 :])
            yield Copy(entry, cut, stride, offset + (low - begin) * stride[dim], into)
        position += stop - start


@cache
def geometry(
    shape: tuple[int, ...], dtype: torch.dtype, views: tuple[tuple, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides and offset of what the views make of a contiguous tensor."""
    base = torch.empty(shape, dtype=dtype, device="meta")
    value = base
    for name, *arguments in views:
        value = getattr(value, name)(*arguments)
    if value.untyped_storage()._cdata != base.untyped_storage()._cdata or value.dtype != dtype:
        raise CheckpointError(f"{views} is no view of a tensor of shape {list(shape)}.")
    return tuple(value.shape), value.stride(), int(value.storage_offset())


def _reads_of(copies: list[Copy], staged_bytes: int) -> Iterator[Read]:
    """Yield the reads of one entry: copies that lie apart in the file each on their own, others together."""
    copies.sort(key=lambda copy: copy.begin)
    group: list[Copy] = []
    end = 0
    for copy in copies:
        if group and copy.begin >= end:
            yield from _reads_of_group(group, end, staged_bytes)
            group = []
        group.append(copy)
        end = max(end, copy.end) if len(group) > 1 else copy.end
    yield from _reads_of_group(group, end, staged_bytes)


def _reads_of_group(group: list[Copy], end: int, staged_bytes: int) -> Iterator[Read]:
    begin = group[0].begin
    if len(group) == 1 and _is_direct(group[0]):
        for part in _split(group[0], DIRECT_BYTES):
            yield Read(part.entry.file, part.begin, part.end, "direct", (part,))
    elif _wanted_bytes(group) < end - begin and min(map(_run_bytes, group)) >= CONTIGUOUS_BYTES:
        yield from _reads_of([part for copy in group for part in _contiguous(copy)], staged_bytes)
    else:
        kind: Kind = "staged" if _wanted_bytes(group) >= end - begin else "mapped"
        limit = staged_bytes if kind == "staged" else MAPPED_BYTES
        yield from _together(kind, [part for copy in group for part in _split(copy, limit)], limit)


def _wanted_bytes(group: list[Copy]) -> int:
    """Bytes that copies want, each region once: as many as lie between the first and the last if there are no holes."""
    return sum({(copy.offset, copy.shape, copy.stride): copy.nbytes for copy in group}.values())


def _is_direct(copy: Copy) -> bool:
    """Whether bytes of the file are bytes of the target, in one stretch."""
    return (
        copy.into.dtype == copy.entry.dtype
        and _is_plain(copy.into)
        and copy.into.is_contiguous()
        and _run_bytes(copy) == copy.nbytes
    )


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, nn.Parameter)


def _run_bytes(copy: Copy) -> int:
    """Bytes that follow one another in the file and, in the same order, in the copy's region."""
    run = 1
    for size, stride in zip(reversed(copy.shape), reversed(copy.stride), strict=True):
        if size > 1 and stride != run:
            break
        run *= size
    return run * copy.entry.dtype.itemsize


def _contiguous(copy: Copy) -> Iterator[Copy]:
    """Split until every part is contiguous in the file."""
    run = _run_bytes(copy)
    if run == copy.nbytes:
        yield copy
        return
    dim = next(dim for dim, size in enumerate(copy.shape) if size > 1)
    for index in range(copy.shape[dim]):
        yield from _contiguous(copy.narrow(dim, index, 1))


def _split(copy: Copy, limit: int) -> Iterator[Copy]:
    """Split along the dimension that is outermost in the file, at multiples of the same number of its rows.

    So regions beside each other in the same rows (columns of several ranks) are split at the same rows.
    """
    if copy.end - copy.begin <= limit:
        yield copy
        return
    wide = [dim for dim, size in enumerate(copy.shape) if size > 1 and copy.stride[dim]]
    dim = max(wide, key=lambda dim: copy.stride[dim])
    stride, size = copy.stride[dim], copy.shape[dim]
    step = max(1, limit // (stride * copy.entry.dtype.itemsize))
    row = copy.offset // stride
    start = 0
    while start < size:
        stop = min(size, ((row + start) // step + 1) * step - row)
        yield from _split(copy.narrow(dim, start, stop - start), limit)
        start = stop


def _together(kind: Kind, copies: list[Copy], limit: int) -> Iterator[Read]:
    """Put copies whose stretches overlap into one read, as long as it fits a buffer."""
    copies.sort(key=lambda copy: copy.begin)
    group: list[Copy] = []
    end = 0
    for copy in copies:
        if group and (copy.begin >= end or max(end, copy.end) - group[0].begin > limit):
            yield Read(group[0].entry.file, group[0].begin, end, kind, tuple(group))
            group = []
        end = max(end, copy.end) if group else copy.end
        group.append(copy)
    if group:
        yield Read(group[0].entry.file, group[0].begin, end, kind, tuple(group))


def _joined(reads: list[Read], limit: int) -> Iterator[Read]:
    """Join small staged reads that follow each other without a gap worth speaking of: one call of the system each."""
    group: list[Read] = []
    for read in reads:
        if group and not _can_join(group[0], group[-1], read, limit):
            yield _join(group)
            group = []
        group.append(read)
    if group:
        yield _join(group)


def _can_join(first: Read, last: Read, read: Read, limit: int) -> bool:
    if not (last.kind == read.kind == "staged" and last.file == read.file):
        return False
    return 0 <= (read.begin - last.end) * 256 <= read.end - first.begin <= limit


def _join(group: list[Read]) -> Read:
    if len(group) == 1:
        return group[0]
    copies = tuple(copy for read in group for copy in read.copies)
    return Read(group[0].file, group[0].begin, group[-1].end, "staged", copies)

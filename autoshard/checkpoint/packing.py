"""Fill packed tensors (quantised weights) as the whole ones are read: only a few rows of those are ever in memory.

file ──read──▶ rows 0 … 1023, 16 bits ──pack──▶ rows 0 … 1023 of int8 values and of scales, on their device
               rows 1024 … 2047, read while the ones before are packed
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from autoshard.checkpoint.data import Checkpoint, Source, Target
from autoshard.checkpoint.memory import allocate
from autoshard.packed import stored_tensors

BATCH_BYTES = 32 << 20
"""Read at once; two batches are in memory."""
PACKED_ELEMENTS = 1 << 19
"""Packed at once: what that makes on the way stays in the processor's caches (measured: 5 times as fast as 2**24)."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of one source, from `start` on, and the packed tensors that they are for."""

    source: Source
    start: int
    values: torch.Tensor
    into: tuple[torch.Tensor, ...]


def fill_packed(
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    targets: Sequence[Target],
    read: Callable[[Sequence[Target]], None],
) -> None:
    """Have sources read by `read`, pack their rows and fill packed targets, on any device.

    Beside the targets, host memory of two batches is used, and what the packing of a few rows makes.
    """
    inference = torch.is_inference_mode_enabled()
    with ThreadPoolExecutor(1, thread_name_prefix="autoshard-packer") as packer:
        packing: Future[None] | None = None
        for batch in _batches(checkpoint, sources, targets):
            read([_target(name, rows) for name, rows in batch])
            if packing is not None:
                packing.result()
            packing = packer.submit(_pack, [rows for _, rows in batch], inference)
        if packing is not None:
            packing.result()


def _target(name: str, rows: _Rows) -> Target:
    whole = len(rows.values) == rows.source.shape[0]
    runs = None if whole else ((rows.start, rows.start + len(rows.values)),)
    return Target(source=name, tensor=rows.values, runs=runs)


def _batches(
    checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Sequence[Target]
) -> Iterator[list[tuple[str, _Rows]]]:
    """Yield the rows of all sources in the order of the files, a batch at a time, with memory to read them into."""
    into: dict[str, tuple[torch.Tensor, ...]] = {}
    for target in targets:
        into[target.source] = (*into.get(target.source, ()), target.tensor.detach())
    batch: list[tuple[str, _Rows]] = []
    room = BATCH_BYTES
    for name in sorted(into, key=lambda name: _place(checkpoint, sources[name])):
        source = sources[name]
        count = source.shape[0]
        row_bytes = max(1, torch.Size(source.shape[1:]).numel() * source.dtype.itemsize)
        whole = source.compute is not None or not all(map(_is_by_rows, into[name]))
        start = 0
        while start < count:
            rows = count if whole else min(count - start, max(1, room // row_bytes))
            values = allocate((rows, *source.shape[1:]), source.dtype)
            batch.append((name, _Rows(source, start, values, into[name])))
            start, room = start + rows, room - rows * row_bytes
            if room <= 0:
                yield batch
                batch, room = [], BATCH_BYTES
    if batch:
        yield batch


def _place(checkpoint: Checkpoint, source: Source) -> tuple[str, int]:
    names = source.compute[0] if source.compute is not None else [piece.entry for piece in source.pieces]
    entry = checkpoint.entries[names[0]]
    return str(entry.file), entry.offset


def _is_by_rows(packed: torch.Tensor) -> bool:
    return all(part.dim() and part.shape[0] == packed.shape[0] for part in stored_tensors(packed))


def _pack(batch: list[_Rows], inference: bool) -> None:
    with torch.inference_mode(inference), torch.no_grad():
        for rows in batch:
            assert rows.source.pack is not None
            by_rows = all(map(_is_by_rows, rows.into))
            step = max(1, PACKED_ELEMENTS // max(1, rows.values[0].numel())) if by_rows else len(rows.values)
            for start in range(0, len(rows.values), step):
                made = stored_tensors(rows.source.pack(rows.values[start : start + step]))
                for packed in rows.into:
                    for part, values in zip(stored_tensors(packed), made, strict=True):
                        (part.narrow(0, rows.start + start, len(values)) if by_rows else part).copy_(values)

"""Fill targets from files: every byte read once, several readers, a few reused buffers, copies on streams of their own.

file ──preadv──▶ memory of the one CPU target that has these bytes                             (direct)
file ──preadv──▶ buffer ──copy──▶ targets: other dtypes, columns, replicas, other devices      (staged)
page cache ──────map────copy──▶ columns of one rank                                            (mapped)
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.checkpoint.files import OpenFiles, mapped_stretch, read_fully
from autoshard.checkpoint.memory import allocate
from autoshard.checkpoint.packing import fill_packed
from autoshard.checkpoint.read_list import Read, check_sources, check_target, list_reads
from autoshard.checkpoint.staging import Copier, Slot, buffer_bytes
from autoshard.collector import no_collection
from autoshard.errors import CheckpointError

Progress = Callable[[int, int], None]
DEFAULT_THREADS = 4
"""Readers: while one waits for the disk, others copy."""
SHOWN_SECONDS = 0.1


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

    `progress(bytes done, bytes in all)` is called from this thread a few times per second. `threads`: how many readers;
    4 by default. Beside the targets, host memory of at most 256 MiB is used, and what
    sources with `compute` need. Raises `CheckpointError` that names the file if it can't be read, ends too early or is
    changed meanwhile, and if a source or a target does not fit; the targets may then hold anything.
    """
    started = time.perf_counter()
    used = {target.source: sources[target.source] for target in targets}
    check_sources(checkpoint, used)
    for target in targets:
        check_target(used[target.source], target)
    plain = [target for target in targets if used[target.source].pack is None]
    packed = [target for target in targets if used[target.source].pack is not None]
    pieced = [target for target in plain if used[target.source].compute is None]
    computed = [target for target in plain if used[target.source].compute is not None]
    devices = [target.tensor.device for target in targets]
    limit = buffer_bytes(devices)
    with no_collection():  # of what comes with torch, which would take as long as to read a gigabyte
        reads = list_reads(checkpoint, used, pieced, staged_bytes=limit)
    total = sum(read.wanted_bytes for read in reads) + _read_later_bytes(checkpoint, used, [*computed, *packed])
    load = _Load(Copier(devices, limit), total, progress, threads or DEFAULT_THREADS)

    def read_rows(rows: Sequence[Target]) -> None:
        of_pieces = [target for target in rows if used[target.source].compute is None]
        load.run(list_reads(checkpoint, used, of_pieces, staged_bytes=limit))
        _fill_computed(checkpoint, used, [target for target in rows if used[target.source].compute is not None], load)

    with torch.no_grad():
        load.run(reads)
        _fill_computed(checkpoint, used, computed, load)
        fill_packed(checkpoint, used, packed, read_rows)
    load.show()
    return ReadReport(bytes_read=load.done_bytes, seconds=time.perf_counter() - started)


def _read_later_bytes(checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Sequence[Target]) -> int:
    """Bytes of all entries that computed and packed targets need; nothing else needs a part of them, or it is small."""
    needed = {sources[target.source] for target in targets}
    whole = {
        entry
        for source in needed
        for entry in (source.compute[0] if source.compute is not None else [piece.entry for piece in source.pieces])
    }
    return sum(checkpoint.entries[entry].nbytes for entry in whole)


class _Load:
    """Readers that take one read after the other, in the order of the files, until all are done or one failed."""

    def __init__(self, copier: Copier, total_bytes: int, progress: Progress | None, threads: int) -> None:
        self.copier, self.total_bytes, self.progress, self.threads = copier, total_bytes, progress, threads
        self.done_bytes = 0
        self.error: BaseException | None = None
        self.lock = threading.Lock()
        self.inference = torch.is_inference_mode_enabled()
        self.reads: list[Read] = []
        self.taken = 0

    def run(self, reads: list[Read]) -> None:
        """Do all reads; returns when every target is filled."""
        self.reads, self.taken = reads, 0
        with OpenFiles(read.file for read in reads) as files:
            readers = [
                threading.Thread(target=self._work, args=(files,), name="autoshard-reader", daemon=True)
                for _ in range(min(self.threads, len(reads)))
            ]
            try:
                for reader in readers:
                    reader.start()
                for reader in readers:
                    while reader.is_alive():
                        reader.join(SHOWN_SECONDS)
                        self.show()
            except BaseException as error:  # an interrupt, or the progress failed: the readers must not go on
                self.error = self.error or error
                raise
            finally:
                for reader in readers:
                    if reader.ident is not None:
                        reader.join()
                self.copier.finish()  # also where it failed: nobody may free a target that is still written to
        if self.error is not None:
            raise self.error

    def show(self) -> None:
        if self.progress is not None:
            self.progress(self.done_bytes, self.total_bytes)

    def _take(self) -> Read | None:
        """Return the next read, None if nothing is left to do."""
        with self.lock:
            if self.error is not None or self.taken == len(self.reads):
                return None
            self.taken += 1
            return self.reads[self.taken - 1]

    def _work(self, files: OpenFiles) -> None:
        try:
            with torch.inference_mode(self.inference), torch.no_grad():
                slots = self.copier.slots()
                number = 0
                while (read := self._take()) is not None:
                    slot = slots[number % len(slots)]
                    number += 1
                    self._do(read, files, slot)
                    with self.lock:
                        self.done_bytes += read.wanted_bytes
                for slot in slots:
                    slot.wait()
        except BaseException as error:
            with self.lock:
                self.error = self.error or error

    def _do(self, read: Read, files: OpenFiles, slot: Slot) -> None:
        with files.use(read.file) as opened:
            if read.kind == "direct":
                memory = read.copies[0].into.reshape(-1).view(torch.uint8)
                self.copier.pages.make(memory)
                read_fully(opened, read.begin, memory)
                return
            slot.wait()
            if read.kind == "staged":
                data = slot.memory[: read.end - read.begin]
                read_fully(opened, read.begin, data)
                self.copier.copy(read.copies, data, read.begin, slot)
            else:
                with mapped_stretch(opened, read.begin, read.end) as data:
                    self.copier.copy(read.copies, data, read.begin, slot)


def _compute_of(source: Source) -> tuple[tuple[str, ...], Callable[..., torch.Tensor]]:
    assert source.compute is not None
    return source.compute


def _fill_computed(
    checkpoint: Checkpoint, sources: Mapping[str, Source], targets: Sequence[Target], load: _Load
) -> None:
    """Fill the targets of sources that are computed, one source after the other; entries are read once."""
    by_source: dict[str, list[Target]] = {}
    for target in targets:
        by_source.setdefault(target.source, []).append(target)
    uses = Counter(entry for name in by_source for entry in set(_compute_of(sources[name])[0]))
    values: dict[str, torch.Tensor] = {}
    for name, wanted in by_source.items():
        entries, function = _compute_of(sources[name])
        _read_whole(checkpoint, dict.fromkeys(entries), values, load)
        for entry in set(entries):
            uses[entry] -= 1
        # what others still need is lent as a copy: the function may write into what it is given
        result = function(*(values[entry].clone() if uses[entry] else values[entry] for entry in entries))
        for entry in set(entries):
            if not uses[entry]:
                del values[entry]
        if tuple(result.shape) != sources[name].shape:
            raise CheckpointError(
                f"{name} has the shape {list(sources[name].shape)}, and what {checkpoint.path} holds gives "
                f"{list(result.shape)}."
            )
        for target in wanted:
            _write(result, target)


def _read_whole(
    checkpoint: Checkpoint, entries: Mapping[str, None], values: dict[str, torch.Tensor], load: _Load
) -> None:
    """Read entries that are not read yet into CPU memory."""
    wanted = [checkpoint.entries[name] for name in entries if name not in values]
    values.update({entry.name: allocate(entry.shape, entry.dtype) for entry in wanted})
    sources = {e.name: Source(shape=e.shape, dtype=e.dtype, pieces=(Piece(entry=e.name),)) for e in wanted}
    targets = [Target(source=entry.name, tensor=values[entry.name]) for entry in wanted]
    load.run(list_reads(checkpoint, sources, targets, staged_bytes=load.copier.limit))


def _write(value: torch.Tensor, target: Target) -> None:
    memory = target.tensor.detach()
    if target.runs is None:
        memory.copy_(value)
        return
    position = 0
    for start, stop in target.runs:
        part = value.narrow(target.dim, start, stop - start)
        memory.narrow(target.dim, position, stop - start).copy_(part)
        position += stop - start

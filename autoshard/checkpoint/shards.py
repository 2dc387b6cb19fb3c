"""Fill the shards of sharded replicas from a checkpoint: a rank reads its rows, of its part where matrices are cut.

    q.weight  [8, 6]   columns cut over 2 ranks, rows sharded over 2      rank 0      rank 1
                                                                         a a a . . .   . . . a a a     rows 0 … 3
                                                                         rank 2      rank 3
                                                                         a a a . . .   . . . a a a     rows 4 … 7

The whole of a parameter never has memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.checkpoint.reading import Progress
from autoshard.checkpoint.targets import FileLoader, check_complete, targets_of
from autoshard.errors import CheckpointError
from autoshard.runtime.cut_state import CutRecord
from autoshard.runtime.devices import META
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.sharded import is_sharded, rows_of
from autoshard.runtime.slices import runs_of, runs_within


@dataclass(slots=True)
class ShardLoader(FileLoader):
    """Fills a model whose parameters are sharded while they are on meta; see `runtime.cuts.Loader`."""

    @classmethod
    def of(
        cls, model: nn.Module, checkpoint: Checkpoint, sources: Mapping[str, Source], progress: Progress | None,
        threads: int | None,
    ) -> "ShardLoader":  # fmt: skip
        """Prepare for a model. Raises `CheckpointError` for what can't be filled."""
        tensors = named_tensors(model)
        check_complete(model, {name for name, tensor in tensors.items() if tensor.is_meta}, sources)
        packed = next((name for name in sources if sources[name].pack is not None), None)
        if packed is not None:
            raise CheckpointError(
                f"{packed} is quantised, and can't be divided by rows. Load the model in its own dtype."
            )
        return cls(checkpoint, sources, progress, threads)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    def fill(self, model: nn.Module, record: CutRecord) -> None:
        return None

    def in_file(self, model: nn.Module, streamed: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
        return {}

    def fill_shards(self, model: nn.Module, record: CutRecord | None) -> None:
        sources, targets = dict(self.sources), []
        tensors = named_tensors(model)
        for name in self.sources:
            tensor: Any = tensors[name]
            if is_sharded(tensor):
                sources[name], target = _sharded(name, tensor, sources[name], record)
                targets += [target] if target.tensor.numel() else []
            elif record is not None:
                targets += targets_of(name, tensor, record)
            else:
                targets.append(Target(source=name, tensor=tensor))
        self.read(sources, targets)


def _sharded(name: str, tensor: Any, source: Source, record: CutRecord | None) -> tuple[Source, Target]:
    """What of a source is read for the shard of this rank, and where to."""
    begin, end = rows_of(tensor)
    local = tensor.to_local()
    cut = record.tensors.get(name) if record is not None else None
    if cut is None or record is None:
        return source, Target(source=name, tensor=local, dim=0, runs=((begin, end),))
    runs = runs_of(cut, record.ranks.rank or 0)
    if cut.dim == 0:
        return source, Target(source=name, tensor=local, dim=0, runs=runs_within(runs, begin, end))
    return _rows(source, begin, end), Target(source=name, tensor=local, dim=cut.dim, runs=runs)


def _rows(source: Source, begin: int, end: int) -> Source:
    """A source of which only these rows are made."""
    shape = (end - begin, *source.shape[1:])
    if source.compute is not None:
        entries, function = source.compute
        return replace(source, shape=shape, compute=(entries, _narrowed(function, begin, end)))
    pieces = []
    for piece in source.pieces:
        region = piece.region or tuple((0, size) for size in source.shape)
        first, last = max(begin, region[0][0]), min(end, region[0][0] + region[0][1])
        if first < last:
            views = (*piece.views, ("narrow", 0, first - region[0][0], last - first))
            pieces.append(Piece(entry=piece.entry, views=views, region=((first - begin, last - first), *region[1:])))
    return replace(source, shape=shape, pieces=tuple(pieces))


def _narrowed(function: Callable[..., torch.Tensor], begin: int, end: int) -> Callable[..., torch.Tensor]:
    return lambda *values: function(*values).narrow(0, begin, end - begin)

"""Give a model on meta its memory where a plan has it, fill it from a checkpoint, and apply the plan.

    placed     meta ──▶ memory on the device of each tensor ──read──▶ filled ──▶ hooks
                        or, on the CPU and as the file has it, a mapping of the file: nothing to read
    cut        meta ──▶ memory for the part of each rank here ──read──▶ filled ──▶ scales and actions
    sharded    meta ──▶ cut, if it is ──▶ sharded ──▶ memory for the rows of this rank ──read──▶ filled

Nothing is read that no device here needs. If anything fails, the model is on meta again.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.checkpoint.mapped import mapped_tensors
from autoshard.checkpoint.reading import Progress, ReadReport, read_into
from autoshard.errors import ApplyError, CheckpointError, first_line
from autoshard.packed import repacked
from autoshard.placement import resolve_homes
from autoshard.plan import Plan
from autoshard.runtime.apply import check_belongs
from autoshard.runtime.cut_state import CutRecord
from autoshard.runtime.devices import CPU, META, resolve_device
from autoshard.runtime.dispatch import apply_plan
from autoshard.runtime.moves import named_tensors, tied_groups
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.resting import resting, streamed_module
from autoshard.runtime.sharded import is_sharded, rows_of
from autoshard.runtime.slices import Undo, replace_all, runs_of, runs_within
from autoshard.sizes import format_bytes


def load_applied(
    model: nn.Module,
    plan: Plan | None,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    *,
    mapped: bool = False,
    progress: Progress | None = None,
) -> ReadReport:
    """Fill a model whose parameters are on meta from a checkpoint, in place, and apply a plan; None: all on the CPU.

    `sources`: for one name of each tensor on meta, and of others that are to be read over, how it is made. `mapped`:
    what stays on the CPU as the files have it is not read but mapped, where no cut divides it. With cuts in several
    processes all call it, and each reads only what it has. Raises `CheckpointError` for what the files lack,
    and what `apply_plan` raises; the model is then as it was.
    """
    if plan is not None and plan.cuts:
        loader = FileLoader(checkpoint, sources, progress)
        apply_plan(model, plan, loader=loader)
        assert loader.report is not None
        return loader.report
    tensors = named_tensors(model)
    devices = dict.fromkeys(tensors, CPU) if plan is None else _devices_between_calls(model, plan, tensors)
    streamed = plan.streamed if plan is not None else {}
    empty = {name for name, tensor in tensors.items() if tensor.is_meta}
    check_complete(model, empty, sources)
    kept = {name for name in empty if devices[name] == CPU and streamed_module(name, streamed) is None}
    in_file = mapped_tensors(tensors, streamed, kept if mapped else (), checkpoint, sources)

    def memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in in_file:
            return in_file[name]
        if not tensor.is_meta:
            return tensor
        return repacked(tensor, lambda stored: memory_like(name, stored, devices[name]))

    log: list[Undo] = []
    try:
        replace_all(tensors, memory, log)
        targets = [Target(source=name, tensor=tensors[name]) for name in sources if name not in in_file]
        report = read_into(checkpoint, sources, targets, progress=progress)
        if plan is not None:
            apply_plan(model, plan)
    except BaseException:
        while log:
            log.pop()()
        raise
    return report


def _devices_between_calls(
    model: nn.Module, plan: Plan, tensors: Mapping[str, torch.Tensor]
) -> Mapping[str, torch.device]:
    check_belongs(model, plan, tensors)
    homes = resolve_homes(plan.placements, [path for path, _ in model.named_modules()], tensors)
    known = {name: resolve_device(name) for name in dict.fromkeys(homes.entries.values())}
    return resting(tensors, {name: known[device] for name, device in homes.entries.items()}, plan.streamed)


def check_complete(model: nn.Module, empty: Collection[str], sources: Mapping[str, Source]) -> None:
    """Raise `CheckpointError` unless every tensor among `empty` has a source, under one of its names."""
    if all(name in sources for name in empty):
        return
    groups = tied_groups(named_tensors(model))
    missing = [names[0] for names in groups if names[0] in empty and not any(name in sources for name in names)]
    if missing:
        listed = ", ".join(missing[:5]) + (" and more" if len(missing) > 5 else "")
        raise CheckpointError(
            f"nothing says how {len(missing)} tensors of this {type(model).__name__} are filled: {listed}."
        )


def allocate_named(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a tensor. Raises `ApplyError` that says for what there is no room."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
        nbytes = dtype.itemsize * torch.Size(shape).numel()
        reason = first_line(error).rstrip(".")
        raise ApplyError(
            f"no room for {name} ({format_bytes(nbytes)}) on {device}: {reason}. Place less on {device}, or free "
            "memory there."
        ) from error


def memory_like(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on meta, with its strides."""
    made = allocate_named(name, tuple(tensor.shape), tensor.dtype, device)
    return made if tensor.is_contiguous() else torch.empty_like(tensor, device=made.device)


@dataclass(slots=True)
class FileLoader:
    """Fills a model that is cut, or sharded, while it is on meta; see `runtime.cuts.Loader`.

    Attributes:
        sharded: parameters get memory, and values, when they are sharded, not when they are cut.
        report: what was read, once it was.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, Source]
    progress: Progress | None
    sharded: bool = False
    report: ReadReport | None = None

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return allocate_named("a part of the model", shape, dtype, META if self.sharded else device)

    def fill(self, model: nn.Module, record: CutRecord) -> None:
        if self.sharded:
            return
        check_complete(model, {name for name, device in record.devices.items() if device == META}, self.sources)
        tensors = named_tensors(model)
        self._read(
            self.sources, [target for name in self.sources for target in targets_of(name, tensors[name], record)]
        )

    def fill_shards(self, model: nn.Module, record: CutRecord | None) -> None:
        sources, targets = dict(self.sources), list[Target]()
        tensors = named_tensors(model)
        for name in self.sources:
            if is_sharded(tensors[name]):
                sources[name], target = _sharded(name, tensors[name], sources[name], record)
                targets += [target] if target.tensor.numel() else []
            else:
                targets += targets_of(name, tensors[name], record)
        self._read(sources, targets)

    def _read(self, sources: Mapping[str, Source], targets: list[Target]) -> None:
        self.report = read_into(self.checkpoint, sources, targets, progress=self.progress)


def check_shardable(model: nn.Module, sources: Mapping[str, Source]) -> None:
    """Raise `CheckpointError` for a model on meta that can't be filled when it is sharded."""
    check_complete(model, {name for name, tensor in named_tensors(model).items() if tensor.is_meta}, sources)
    packed = next((name for name in sources if sources[name].pack is not None), None)
    if packed is not None:
        raise CheckpointError(f"{packed} is quantised, and can't be divided by rows. Load the model in its own dtype.")


def targets_of(name: str, tensor: torch.Tensor, record: CutRecord | None) -> Iterator[Target]:
    """Yield what the ranks in this process have of a tensor."""
    cut = record.tensors.get(name) if record is not None else None
    own = (record.ranks.rank or 0) if record is not None else 0
    parts = dict(enumerate(tensor.parts)) if isinstance(tensor, RankTensor) else {own: tensor}
    for rank, part in parts.items():
        if cut is None:
            yield Target(source=name, tensor=part)
        else:
            yield Target(source=name, tensor=part, dim=cut.dim, runs=runs_of(cut, rank))


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

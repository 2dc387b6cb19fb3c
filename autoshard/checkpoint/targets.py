"""Give a model on meta its memory where a plan has it, fill it from a checkpoint, and apply the plan.

    placed     meta ──▶ memory on the device of each tensor ──read──▶ filled ──▶ hooks
                        or, on the CPU and as the file has it, a mapping of the file: nothing to read
    cut        meta ──▶ memory for the part of each rank here ──read──▶ filled ──▶ scales and actions

Nothing is read that no device here needs. If anything fails, the model is on meta again.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Source, Target
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
from autoshard.runtime.slices import Undo, replace_all, runs_of
from autoshard.sizes import format_bytes


def load_applied(
    model: nn.Module,
    plan: Plan | None,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    *,
    mapped: bool = False,
    progress: Progress | None = None,
    threads: int | None = None,
) -> ReadReport:
    """Fill a model whose parameters are on meta from a checkpoint, in place, and apply a plan; None: all on the CPU.

    `sources`: for one name of each tensor on meta, and of others that are to be read over, how it is made. `mapped`:
    what stays on the CPU as the files have it is not read but mapped, where no cut divides it. With cuts in several
    processes all call it, and each reads only what it has. Raises `CheckpointError` for what the files lack,
    and what `apply_plan` raises; the model is then as it was.
    """
    if plan is not None and plan.cuts:
        loader = _CutLoader(checkpoint, sources, progress, threads)
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
        report = read_into(checkpoint, sources, targets, progress=progress, threads=threads)
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
    """What fills a model that is being applied is read from; `report`: what was read, once it was."""

    checkpoint: Checkpoint
    sources: Mapping[str, Source]
    progress: Progress | None
    threads: int | None
    report: ReadReport | None = None

    def read(self, sources: Mapping[str, Source], targets: list[Target]) -> None:
        """Fill the targets."""
        self.report = read_into(self.checkpoint, sources, targets, progress=self.progress, threads=self.threads)


@dataclass(slots=True)
class _CutLoader(FileLoader):
    """Fills a model while it is being cut; see `runtime.cuts.Loader`."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return allocate_named("a part of the model", shape, dtype, device)

    def fill(self, model: nn.Module, record: CutRecord) -> None:
        check_complete(model, {name for name, device in record.devices.items() if device == META}, self.sources)
        tensors = named_tensors(model)
        in_file = record.kept.in_file
        names = [name for name in self.sources if name not in in_file]
        self.read(self.sources, [target for name in names for target in targets_of(name, tensors[name], record)])

    def in_file(self, model: nn.Module, streamed: Mapping[str, str]) -> Mapping[str, torch.Tensor]:
        return mapped_tensors(named_tensors(model), streamed, (), self.checkpoint, self.sources)

    def fill_shards(self, model: nn.Module, record: CutRecord | None) -> None:
        raise AssertionError("parts of a cut model are filled while it is cut")


def targets_of(name: str, tensor: torch.Tensor, record: CutRecord) -> Iterator[Target]:
    """Yield what the ranks in this process have of a tensor."""
    cut = record.tensors.get(name)
    parts = dict(enumerate(tensor.parts)) if isinstance(tensor, RankTensor) else {record.ranks.rank or 0: tensor}
    for rank, part in parts.items():
        if cut is None:
            yield Target(source=name, tensor=part)
        else:
            yield Target(source=name, tensor=part, dim=cut.dim, runs=runs_of(cut, rank))

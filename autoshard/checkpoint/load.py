"""Give a model on meta its memory where a plan has it, fill it from a checkpoint, and apply the plan.

    placed     meta ──▶ memory on the device of each tensor ──read──▶ filled ──▶ hooks
                        or, on the CPU and as the file has it, a mapping of the file: nothing to read
    processes  meta ──▶ memory for whole tensors of this one's stages ──read──▶ filled ──▶ stages, replicas
    cut        meta ──▶ memory for the part of each rank here ──read──▶ filled ──▶ scales and actions
    sharded    meta ──▶ stages, cut, sharded ──▶ memory for what is then this rank's ──read──▶ filled

Nothing is read that no device here needs. If anything fails, the model is on meta again.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.checkpoint.boxes import Box, boxes_of
from autoshard.checkpoint.data import Checkpoint, Source
from autoshard.checkpoint.mapped import mapped_tensors
from autoshard.checkpoint.reading import read_into
from autoshard.common.packed import repacked
from autoshard.common.sizes import format_bytes
from autoshard.errors import ApplyError, CheckpointError, first_line
from autoshard.plan import Plan
from autoshard.plan.placement import resolve_execution_devices
from autoshard.runtime.agreement import together
from autoshard.runtime.apply import check_belongs
from autoshard.runtime.collectives import ProcessRanks, count_processes
from autoshard.runtime.cut_state import CutRecord
from autoshard.runtime.devices import CPU, META, resolve_device
from autoshard.runtime.dispatch import apply_plan, own_place
from autoshard.runtime.moves import Undo, named_tensors, replace_all, tied_groups
from autoshard.runtime.resting import offloaded_module, resting
from autoshard.runtime.sharded import shards
from autoshard.runtime.sharded_stages import shards_stages
from autoshard.runtime.staged import own_names


def load_applied(
    model: nn.Module,
    plan: Plan | None,
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
    *,
    mapped: bool = False,
) -> int:
    """Fill a model whose parameters are on meta from a checkpoint, in place, and apply a plan; None: all on the CPU.

    Returns how many bytes were read.

    `sources`: for one name of each tensor on meta, and of others that are to be read over, how it is made. `mapped`:
    what stays on the CPU as the files have it is not read but mapped, where no process has a part of it. Where the plan
    is for processes all of them call it, and each reads only what it has. Raises `CheckpointError` for what the files
    lack, what `apply_plan` raises, and `RankError` for what another process raised; the model is then as it was.
    """
    mesh = plan.mesh if plan is not None and count_processes() > 1 else None
    ranks = ProcessRanks.of() if mesh is not None else None
    staged = mesh is not None and mesh.pp > 1
    if plan is not None and (bool(plan.cuts) or shards_stages(plan) if staged else mesh is not None and shards(plan)):
        with together(ProcessRanks.of()):
            _check_divisible(model, sources)
        loader = FileLoader(checkpoint, sources, late=True)
    elif plan is not None and plan.cuts and (mesh is None or mesh.pp * mesh.data == 1):
        loader = FileLoader(checkpoint, sources)
    else:
        return _load_whole(model, plan, checkpoint, sources, ranks, mapped and mesh is None)
    apply_plan(model, plan, loader=loader)
    return loader.bytes_read


def _load_whole(
    model: nn.Module, plan: Plan | None, checkpoint: Checkpoint, sources: Mapping[str, Source],
    ranks: ProcessRanks | None, mapped: bool,
) -> int:  # fmt: skip
    """Fill whole tensors, then apply the plan; `ranks`: processes, which hear of each other's errors."""
    tensors = named_tensors(model)
    log: list[Undo] = []
    try:
        with together(ranks):
            devices = _devices_between_calls(model, plan, tensors, ranks)
            empty = {name for name, tensor in tensors.items() if tensor.is_meta and devices[name] != META}
            check_complete(model, empty, sources)
            offloaded = plan.offloaded if plan is not None else {}
            kept = {name for name in empty if devices[name] == CPU and offloaded_module(name, offloaded) is None}
            in_file = mapped_tensors(tensors, offloaded, kept if mapped else (), checkpoint, sources)

            def memory(name: str, tensor: torch.Tensor) -> torch.Tensor:
                if name in in_file:
                    return in_file[name]
                if not tensor.is_meta or devices[name] == META:
                    return tensor
                return repacked(tensor, lambda stored: _memory_like(name, stored, devices[name]))

            replace_all(tensors, memory, log)
            read = [name for name in sources if name not in in_file and not tensors[name].is_meta]
            targets = [(name, Box(tensors[name])) for name in read]
            bytes_read = read_into(checkpoint, sources, targets)
        if plan is not None:
            apply_plan(model, plan)
    except BaseException:
        while log:
            log.pop()()
        raise
    return bytes_read


def _devices_between_calls(
    model: nn.Module, plan: Plan | None, tensors: Mapping[str, torch.Tensor], ranks: ProcessRanks | None
) -> Mapping[str, torch.device]:
    """Where each tensor is filled; meta for what is another process's."""
    if plan is None:
        return dict.fromkeys(tensors, CPU)
    if ranks is not None:
        device, problem = own_place(plan, ranks, None)
        if device is None or problem is not None:
            raise problem or ApplyError("this process has no device.")
        staged = plan.mesh is not None and plan.mesh.pp > 1
        own = own_names(model, plan, ranks, tensors) if staged else set(tensors)
        return {name: device if name in own else META for name in tensors}
    check_belongs(model, plan, tensors)
    execution_devices = resolve_execution_devices(plan.placements, [path for path, _ in model.named_modules()], tensors)
    known = {name: resolve_device(name) for name in dict.fromkeys(execution_devices.entries.values())}
    return resting(tensors, {name: known[device] for name, device in execution_devices.entries.items()}, plan.offloaded)


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


def _check_divisible(model: nn.Module, sources: Mapping[str, Source]) -> None:
    """Raise `CheckpointError` for a model on meta that can't be filled once it is divided."""
    check_complete(model, {name for name, tensor in named_tensors(model).items() if tensor.is_meta}, sources)
    packed = next((name for name in sources if sources[name].pack is not None), None)
    if packed is not None:
        raise CheckpointError(f"{packed} is quantised, and can't be divided by rows. Load the model in its own dtype.")


def _allocate(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
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


def _memory_like(name: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a tensor on meta, with its strides."""
    made = _allocate(name, tuple(tensor.shape), tensor.dtype, device)
    return made if tensor.is_contiguous() else torch.empty_like(tensor, device=made.device)


@dataclass(slots=True)
class FileLoader:
    """Fills a model that is cut, or sharded, while it is on meta; see `runtime.cuts.Loader`.

    Attributes:
        late: parameters get memory, and values, when the model is divided in all ways, not when they are cut.
    """

    checkpoint: Checkpoint
    sources: Mapping[str, Source]
    late: bool = False
    bytes_read: int = 0

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return _allocate("a part of the model", shape, dtype, META if self.late else device)

    def fill(self, model: nn.Module, record: CutRecord) -> None:
        if not self.late:
            check_complete(model, {name for name, device in record.devices.items() if device == META}, self.sources)
            self._read(named_tensors(model), record)

    def fill_rest(
        self, model: nn.Module, record: CutRecord | None, device: torch.device, absent: Collection[str] = ()
    ) -> None:
        tensors = {name: tensor for name, tensor in named_tensors(model).items() if name not in absent}
        empty = {name: tensor for name, tensor in tensors.items() if tensor.is_meta}
        replace_all(empty, lambda name, tensor: _memory_like(name, tensor, device), [])
        self._read(tensors, record)

    def _read(self, tensors: Mapping[str, torch.Tensor], record: CutRecord | None) -> None:
        targets = [
            (name, box) for name in self.sources if name in tensors for box in boxes_of(name, tensors[name], record)
        ]
        self.bytes_read = read_into(self.checkpoint, self.sources, targets)

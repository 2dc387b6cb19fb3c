"""Tensors of a checkpoint that stay in their file: what a plan keeps on disk."""

from collections.abc import Mapping

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Entry, Source
from autoshard.errors import CheckpointError
from autoshard.packed import is_packed
from autoshard.plan import Plan
from autoshard.runtime.mapped import map_tensor
from autoshard.runtime.moves import named_tensors, tied_groups
from autoshard.runtime.resting import streamed_module


def mapped_tensor(entry: Entry) -> torch.Tensor:
    """Return a CPU tensor that privately maps its bytes in the file; nothing is read. Raises `ApplyError`."""
    return map_tensor(entry.file, entry.offset, entry.dtype, entry.shape)


def mapped_tensors(
    model: nn.Module, plan: Plan, checkpoint: Checkpoint, sources: Mapping[str, Source]
) -> dict[str, torch.Tensor]:
    """Return, under each of its names, the tensor in its file of every parameter that the plan keeps on disk.

    Raises `CheckpointError` for one that is in no file as the model has it.
    """
    if "disk" not in plan.streamed.values():
        return {}
    tensors, found = named_tensors(model), {}
    for names in tied_groups(tensors):
        paths = [streamed_module(name, plan.streamed) for name in names]
        source = next((name for name in names if name in sources), None)
        on_disk = any(path is not None and plan.streamed[path] == "disk" for path in paths)
        if source is not None and on_disk and isinstance(tensors[source], nn.Parameter):
            tensor = mapped_tensor(_entry(source, tensors[source], checkpoint, sources[source]))
            found.update(dict.fromkeys(names, tensor))
    return found


def not_in_files(model: nn.Module, checkpoint: Checkpoint, sources: Mapping[str, Source]) -> list[str]:
    """Return the names of the parameters that no file has as the model does: a plan can't keep them on disk."""
    tensors = named_tensors(model)
    found: list[str] = []
    for names in tied_groups(tensors):
        source = next((name for name in names if name in sources), None)
        if source is None or _why_not(tensors[source], checkpoint, sources[source])[0] is None:
            found += names
    return found


def _entry(name: str, tensor: torch.Tensor, checkpoint: Checkpoint, source: Source) -> Entry:
    """Return the entry of the checkpoint that is a parameter, byte for byte."""
    entry, reason = _why_not(tensor, checkpoint, source)
    if entry is not None:
        return entry
    raise CheckpointError(
        f"the plan keeps {name} on disk, but {checkpoint.path} does not have it as the model does ({reason}), and "
        "nothing else is written. Give the cpu enough memory to keep it, or load with the dtype of the checkpoint."
    )


def _why_not(tensor: torch.Tensor, checkpoint: Checkpoint, source: Source) -> tuple[Entry | None, str]:
    """Return the entry that is a parameter, byte for byte, or None and why there is none."""
    whole = source.pieces[0] if len(source.pieces) == 1 and not source.pieces[0].views else None
    if whole is None:
        return None, "the model makes it of several tensors of the checkpoint, or of parts of one"
    if is_packed(tensor):
        return None, "the model packs it"
    entry = checkpoint.entries[whole.entry]
    if (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype):
        return entry, ""
    reason = f"there it is {entry.dtype} {list(entry.shape)}, in the model {tensor.dtype} {list(tensor.shape)}"
    return None, reason

"""Tensors of a checkpoint that stay in their file: what a plan keeps on disk, and what the CPU has as the file has it.

    model.safetensors   ····[ q.weight bf16 ][ k.weight bf16 ]····      asked for: bf16      mapped: nothing is read
                                                                        asked for: float32   read, converted

Every load maps the files anew, so what is written to a weight is seen in that model only.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Entry, Source
from autoshard.checkpoint.read_list import geometry
from autoshard.errors import CheckpointError
from autoshard.packed import is_packed
from autoshard.runtime.mapped import MappedFile, computes_as_in_memory, map_file, map_tensor
from autoshard.runtime.moves import named_tensors, tied_groups
from autoshard.runtime.resting import streamed_module


def mapped_entries(entries: Iterable[Entry]) -> list[torch.Tensor]:
    """Return CPU tensors that privately map their bytes in the files; nothing is read. Raises `ApplyError`."""
    files = _Files()
    return [map_tensor(files[entry.file], entry.offset, entry.dtype, entry.shape) for entry in entries]


class _Files(dict[Path, MappedFile]):
    """The mappings of one load: each file is mapped when it is first asked for."""

    def __missing__(self, path: Path) -> MappedFile:
        self[path] = map_file(path)
        return self[path]


def mapped_tensors(
    tensors: Mapping[str, torch.Tensor],
    streamed: Mapping[str, str],
    in_memory: Collection[str],
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
) -> dict[str, torch.Tensor]:
    """Return, under each of its names, the tensor in its file of what the plan keeps on disk, or may stay there.

    `streamed`: as in a plan. `in_memory`: names of tensors for CPU memory; those among them that are in a file as the
    model has them, and compute there as in memory, stay in the file. Raises `CheckpointError` for a parameter that is
    to be kept on disk and is in no file as the model has it.
    """
    found: dict[str, torch.Tensor] = {}
    files, alone = _Files(), _unshared(checkpoint, sources) if in_memory else frozenset()
    for names in tied_groups(tensors) if in_memory or "disk" in streamed.values() else ():
        name = next((name for name in names if name in sources), None)
        if name is None:
            continue
        tensor, source = tensors[name], sources[name]
        paths = [streamed_module(one, streamed) for one in names]
        if isinstance(tensor, nn.Parameter) and any(path is not None and streamed[path] == "disk" for path in paths):
            entry = _entry(name, tensor, checkpoint, source)
            found.update(dict.fromkeys(names, map_tensor(files[entry.file], entry.offset, entry.dtype, entry.shape)))
        elif name in alone and names[0] in in_memory and len({tensors[one].shape for one in names}) == 1:
            offset = _mappable_offset(tensor, checkpoint, source)
            if offset is not None:
                file = checkpoint.entries[source.pieces[0].entry].file
                mapped = map_tensor(files[file], offset, tensor.dtype, tuple(tensor.shape))
                found.update(dict.fromkeys(names, mapped))
    return found


def _mappable_offset(tensor: torch.Tensor, checkpoint: Checkpoint, source: Source) -> int | None:
    """Return where a tensor begins in the file that has it, byte for byte and fit to compute with; None if none has."""
    entry = checkpoint.entries[source.pieces[0].entry]
    if source.pack is not None or is_packed(tensor) or entry.dtype != tensor.dtype or not tensor.is_contiguous():
        return None
    shape, stride, begin = geometry(entry.shape, entry.dtype, source.pieces[0].views)
    if shape != tuple(tensor.shape) or not math.prod(shape) or not _is_row_major(shape, stride):
        return None
    offset = entry.offset + begin * entry.dtype.itemsize
    fits = offset % entry.dtype.itemsize == 0 and computes_as_in_memory(offset, entry.dtype, tensor.dim())
    return offset if fits else None


def _is_row_major(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    wanted = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size > 1 and step != wanted:
            return False
        wanted *= size
    return True


def _unshared(checkpoint: Checkpoint, sources: Mapping[str, Source]) -> frozenset[str]:
    """Return the sources made of one piece whose entry nothing else is made of: others may be written to apart."""
    uses: dict[str, list[str]] = {}
    for name, source in sources.items():
        for entry in source.compute[0] if source.compute is not None else {piece.entry for piece in source.pieces}:
            uses.setdefault(entry, []).append(name)
    alone = (names[0] for names in uses.values() if len(names) == 1)
    return frozenset(name for name in alone if sources[name].compute is None and len(sources[name].pieces) == 1)


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

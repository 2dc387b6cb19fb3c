"""Tensors of a checkpoint that stay in their file: what a plan keeps on disk, and what the CPU has as the file has it.

    model.safetensors   ····[ q.weight bf16 ][ k.weight bf16 ]····      asked for: bf16      mapped: nothing is read
                                                                        asked for: float32   read, converted

Every load maps the files anew, so what is written to a weight is seen in that model only.
"""

from collections import Counter
from collections.abc import Collection, Mapping

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Entry, Source
from autoshard.checkpoint.reading import map_entries
from autoshard.checkpoint.traced import TracedSource, bare, leaves
from autoshard.common.packed import is_packed
from autoshard.errors import CheckpointError
from autoshard.runtime.moves import named_tensors, tied_groups
from autoshard.runtime.resting import offloaded_module


def mapped_tensors(
    tensors: Mapping[str, torch.Tensor],
    offloaded: Mapping[str, str],
    in_memory: Collection[str],
    checkpoint: Checkpoint,
    sources: Mapping[str, Source],
) -> dict[str, torch.Tensor]:
    """Return, under each of its names, the tensor in its file of what the plan keeps on disk, or may stay there.

    `offloaded`: as in a plan. `in_memory`: names of tensors for CPU memory; the parameters among them that are in a
    file as the model has them stay in the file, unless others are made of the same bytes, which may be written to
    apart. Raises `CheckpointError` for a parameter that is to be kept on disk and is in no file as the model has it.
    """
    if not in_memory and "disk" not in offloaded.values():
        return {}
    uses = Counter(entry for source in sources.values() for entry in leaves(source.made))
    wanted: dict[str, Entry] = {}
    for names in tied_groups(tensors):
        name = next((name for name in names if name in sources), None)
        if name is None or not isinstance(tensors[name], nn.Parameter):
            continue
        paths = [offloaded_module(one, offloaded) for one in names]
        on_disk = any(path is not None and offloaded[path] == "disk" for path in paths)
        if not on_disk and names[0] not in in_memory:
            continue
        entry, reason = _in_file(tensors[name], checkpoint, sources[name])
        if len({tensors[one].shape for one in names}) > 1:
            entry, reason = None, "its ties have other shapes"
        if entry is not None and (on_disk or uses[entry.name] == 1):
            wanted.update(dict.fromkeys(names, entry))
        elif on_disk:
            raise CheckpointError(
                f"the plan keeps {name} on disk, but {checkpoint.path} does not have it as the model does ({reason}), "
                "and nothing else is written. Give the cpu enough memory to keep it, or load with the dtype of the "
                "checkpoint."
            )
    entries = {entry.name: entry for entry in wanted.values()}
    mapped = dict(zip(entries, map_entries(entries.values()), strict=True))
    return {name: mapped[entry.name] for name, entry in wanted.items()}


def not_in_files(model: nn.Module, checkpoint: Checkpoint, sources: Mapping[str, Source]) -> list[str]:
    """Return the names of the parameters that no file has as the model does: a plan can't keep them on disk."""
    tensors = named_tensors(model)
    found: list[str] = []
    for names in tied_groups(tensors):
        source = next((name for name in names if name in sources), None)
        if source is None or _in_file(tensors[source], checkpoint, sources[source])[0] is None:
            found += names
    return found


def _in_file(tensor: torch.Tensor, checkpoint: Checkpoint, source: Source) -> tuple[Entry | None, str]:
    """Return the entry that is a parameter, byte for byte, or None and why there is none."""
    made = bare(source.made)
    if not isinstance(made, TracedSource):
        return None, "the model makes it of several tensors of the checkpoint, of parts of one, or in another dtype"
    if is_packed(tensor) or source.pack is not None:
        return None, "the model packs it"
    entry = checkpoint.entries[made.name]
    if (entry.shape, entry.dtype) == (tuple(tensor.shape), tensor.dtype) and tensor.is_contiguous():
        return entry, ""
    return None, f"there it is {entry.dtype} {list(entry.shape)}, in the model {tensor.dtype} {list(tensor.shape)}"

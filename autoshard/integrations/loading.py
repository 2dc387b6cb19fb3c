"""From a checkpoint straight to the devices of a plan: what `autoshard.load` does before and after planning."""

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Source, whole_entry
from autoshard.checkpoint.header import open_checkpoint
from autoshard.checkpoint.load import load_applied
from autoshard.checkpoint.write import standing
from autoshard.errors import CheckpointError, SpecError
from autoshard.integrations.pretrained import open_pretrained
from autoshard.integrations.quantised import INT8, mark_quantised, quantised
from autoshard.integrations.skeleton import without_weights
from autoshard.integrations.strictness import Differences, check_differences, other_kinds
from autoshard.integrations.unfilled import Unfilled
from autoshard.integrations.words import first, one_line
from autoshard.plan import Plan
from autoshard.runtime.devices import CPU
from autoshard.runtime.dispatch import apply_device_map, bring_back_to
from autoshard.runtime.moves import named_tensors, tied_groups


def _build(function: Callable[[], nn.Module]) -> nn.Module:
    """Run a function that builds a module, without giving memory to parameters."""
    try:
        with without_weights():
            return function()
    except Exception as error:  # whatever the user's code makes of parameters without values
        raise SpecError(
            f"the function given as model= stopped where parameters have no memory: {one_line(error)} "
            "Give the module itself, built beforehand."
        ) from error


def open_module(
    model: "nn.Module | Callable[[], nn.Module]", checkpoint: Checkpoint, *, allow: Collection[str] = ()
) -> Unfilled:
    """Say how the parameters of any module are filled from a checkpoint that has them under the same names.

    `model`: parameters on meta are filled; those that are not are read over. Or a function that builds the module,
    which is then called without giving memory to parameters. Raises `CheckpointError`.
    """
    if not isinstance(model, nn.Module):
        model = _build(model)
    entries, state = checkpoint.entries, model.state_dict(keep_vars=True)
    stuck = [name for name, tensor in model.named_buffers() if tensor.is_meta and name not in entries]
    if stuck:
        raise CheckpointError(
            f"{stuck[0]} is a buffer on meta, and the checkpoint has no values for it ({len(stuck)} such). Give a "
            "function that builds the model, model=lambda: MyModel(…): it runs so that only parameters have no memory."
        )
    tensors = named_tensors(model)
    wanted = [names for names in tied_groups(tensors) if any(name in state for name in names)]
    sources: dict[str, Source] = {}
    missing: list[str] = []
    shapes, known = {}, set[str]()
    for names in wanted:
        kept = [name for name in names if name in entries]
        known.update(names)
        if not kept:
            missing.append(names[0])
            continue
        tensor, entry = tensors[names[0]], entries[kept[0]]
        if entry.shape != tuple(tensor.shape):
            shapes[names[0]] = (entry.shape, tuple(tensor.shape))
            continue
        sources[names[0]] = whole_entry(entry, tensor.dtype)
    unexpected = [name for name in entries if name not in known]
    found = Differences(missing=missing, unexpected=unexpected, shapes=shapes, dtypes=other_kinds(checkpoint, sources))
    check_differences(checkpoint, type(model).__name__, found, allow)
    empty = [name for name in (*missing, *shapes) if tensors[name].is_meta]
    if empty:
        raise CheckpointError(
            f"{first(empty)}: not in {checkpoint.path} as this {type(model).__name__} has it, and without values of "
            "its own. Only what has values may be left out: give these memory and initialise them before loading."
        )
    return Unfilled(model=model, checkpoint=checkpoint, sources=sources)


def open_weights(
    path: "str | os.PathLike[str]",
    *,
    model: "nn.Module | Callable[[], nn.Module] | None" = None,
    dtype: "torch.dtype | str" = "auto",
    allow: Collection[str] = (),
    trust_remote_code: bool = False,
    local_files_only: bool = True,
) -> Unfilled:
    """Find out what is in a checkpoint and what of the model it fills; no parameter is read."""
    directory = local_directory(path, local_files_only=local_files_only, with_code=trust_remote_code)
    checkpoint = open_checkpoint(directory)
    kept = "auto" if dtype == INT8 else dtype
    if model is None:
        settings: dict[str, Any] = {"dtype": kept, "allow": allow, "trust_remote_code": trust_remote_code}
        unfilled = open_pretrained(checkpoint, name=None if directory.is_file() else str(path), **settings)
    elif kept == "auto":
        unfilled = open_module(model, checkpoint, allow=allow)
    else:
        raise SpecError("dtype is for models that load builds itself. Convert yours instead: model.to(dtype).")
    if dtype == INT8:
        unfilled = quantised(unfilled)
    return unfilled


def local_directory(path: "str | os.PathLike[str]", *, local_files_only: bool = True, with_code: bool = False) -> Path:
    """Return the path itself if it exists; a name such as "org/model" is that of a download of the Hugging Face hub.

    It is downloaded only if asked. Raises `CheckpointError` if it is not here.
    """
    found = standing(Path(path))
    if found.exists() or not _is_hub_name(str(path)):
        return found
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.json", *(["*.py"] if with_code else [])]
        return Path(snapshot_download(str(path), allow_patterns=patterns, local_files_only=local_files_only))
    except Exception as error:
        hint = "" if not local_files_only else " To download it, pass local_files_only=False."
        raise CheckpointError(
            f"{path} is no directory here, and no downloaded model of the hub: {one_line(error)}.{hint}"
        ) from None


def _is_hub_name(path: str) -> bool:
    return path.count("/") == 1 and not path.startswith((".", "/", "~"))


def fill(unfilled: Unfilled, plan: "Plan | Mapping[str, Any] | None", *, mapped: bool = True) -> nn.Module:
    """Give every parameter its values on the device it has in the plan, apply the plan and return the model.

    `plan`: a `Plan`, a `device_map`, or None for all on the CPU with nothing applied. `mapped`: what the CPU has as the
    files have it is not read but mapped. Raises `PlanError`, `ApplyError` and `CheckpointError`; the parameters are
    then on meta again.
    """
    model = unfilled.model
    placed = Plan.from_device_map(plan or {"": "cpu"}) if isinstance(plan, Mapping) else plan
    load_applied(model, placed, unfilled.checkpoint, unfilled.sources, mapped=mapped)
    if placed is not None:
        bring_back_to(model, CPU)
    if isinstance(plan, Mapping):
        apply_device_map(model, plan)  # nothing is known of the model's flow
    if unfilled.quantised:
        mark_quantised(model)
    return model

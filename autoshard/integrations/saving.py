"""Saving any model, and what is special about those of Transformers: their configuration and their names in files.

What such a model calls `experts.gate_up_proj` may be a hundred tensors in its files. The library's own function turns a
state dict into that of the files; it runs here on traced tensors, so that the whole model is never held twice.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.checkpoint.save import FileShard, SavedState, Stored, save_state, split, without_ties
from autoshard.checkpoint.traced import TracedTensor, leaf, traced
from autoshard.common.sizes import parse_bytes
from autoshard.errors import CheckpointError
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.scales import unscaled


def save(model: nn.Module, path: "str | os.PathLike[str]", *, max_shard_size: "int | str") -> None:
    """Save a model; see `autoshard.save`."""
    max_shard_bytes = parse_bytes(max_shard_size)
    of_transformers = is_of_transformers(model)

    def prepare(state: SavedState) -> list[FileShard]:
        if of_transformers:
            return split(file_tensors(model, state), {}, max_shard_bytes)
        return split(*without_ties(state), max_shard_bytes)

    write = functools.partial(write_configuration, model) if of_transformers else None
    record = cut_record(model)
    with unscaled(model, record.scales if record is not None else ()):  # a configuration may have a rank's sizes
        save_state(model, Path(path), prepare, write)


def is_of_transformers(model: nn.Module) -> bool:
    """Whether a model is of a class of that library, which is not imported for this."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def write_configuration(model: Any, folder: Path) -> None:
    """Write what the library puts beside the weights: configuration, generation settings, code that came along."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # of no weights
    try:
        model.save_pretrained(folder, state_dict={})
    finally:
        if shown:
            logging.enable_progress_bar()


def file_tensors(model: Any, state: SavedState) -> list[Stored]:
    """The tensors that the library's `save_pretrained` would write, in its order, and what they are made of."""
    from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "_hf_peft_config_loaded", False):
        raise CheckpointError(
            f"this {type(model).__name__} is quantised by Transformers or has adapters: only its own save_pretrained "
            "knows the names in their files. Call that, after autoshard.remove(model) if a plan is applied."
        )
    ignored = set(model._keys_to_ignore_on_save or ())
    # In the order of the library for models that were loaded; one that was not must not be divided otherwise.
    kept = sorted((name for name in state.values if name not in ignored), key=dot_natural_key)
    tied = _loaded_by_another(model, state)
    given = {name: state.described(name) for name in kept if name not in tied}
    try:
        made = revert_weight_conversion(model, {n: traced(leaf(n, o.shape, o.dtype)) for n, o in given.items()})
    except Exception as error:
        raise CheckpointError(
            f"the names that Transformers gives the tensors of {type(model).__name__} in files can't be found: {error}"
        ) from error
    return [_stored(name, tensor) for name, tensor in made.items()]


def _loaded_by_another(model: Any, state: SavedState) -> set[str]:
    """Names of tied tensors that the library fills from another name when it loads: it does not write them.

    A tie that it does not know of is written under each of its names, for it would not be made again.
    """
    known: dict[str, str] = model.all_tied_weights_keys
    left_out = set()
    for twins in state.twins():
        for name in twins:
            if known.get(name) in twins:
                left_out.add(name)
    return left_out


def _stored(name: str, tensor: torch.Tensor) -> Stored:
    if not isinstance(tensor, TracedTensor):
        raise CheckpointError(f"Transformers makes {name} out of nothing in the model; it is not known how to save it.")
    return Stored(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), made=tensor.expression)

"""A checkpoint of Transformers as its own library would load it, before a tensor of it is read.

headers ──▶ rehearsal of the loading ──▶ parameters on meta, buffers that are real, how each tensor is made
"""

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from autoshard.checkpoint.data import Checkpoint
from autoshard.checkpoint.reading import read_entry
from autoshard.checkpoint.traced import TracedSource, TracedTensor, leaf, traced
from autoshard.errors import CheckpointError, SpecError
from autoshard.integrations.huggingface import config_file, model_class_of, read_config
from autoshard.integrations.rehearsal import quiet, rehearse
from autoshard.integrations.strictness import Differences, check_differences, other_kinds
from autoshard.integrations.unfilled import Unfilled, leave_unfilled
from autoshard.integrations.words import one_line
from autoshard.torch_private import no_dispatch_modes


def open_pretrained(
    checkpoint: Checkpoint,
    *,
    name: str | None = None,
    dtype: "torch.dtype | str" = "auto",
    allow: Collection[str] = (),
    trust_remote_code: bool = False,
) -> Unfilled:
    """Build the model of a directory, with its parameters on meta, and say how each is made of the files.

    `name`: what the user called the directory. `dtype`: as in `from_pretrained`. `allow`: differences between files
    and model that are no error. Tensors that are then missing are real, as the library initialises them. Raises
    `SpecError` and `CheckpointError`.
    """
    directory = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    config = read_config(config_file(directory), trust_remote_code=trust_remote_code)
    _check_loadable(directory)
    model_class = model_class_of(config, directory if trust_remote_code else None)
    wanted = _dtype_named(dtype)
    if getattr(config, "quantization_config", None) is not None:
        return _read_quantised(model_class, config, checkpoint, directory, wanted, allow)
    unfilled = _open_rehearsed(checkpoint, model_class, config, wanted, allow)
    model: Any = unfilled.model
    kinds = other_kinds(checkpoint, unfilled.sources)
    check_differences(checkpoint, type(model).__name__, Differences(dtypes=kinds), allow)
    model.config.name_or_path = model.name_or_path = name or str(directory)
    _add_generation_config(model, directory, trust_remote_code)
    return unfilled


def _open_rehearsed(
    checkpoint: Checkpoint, model_class: Any, config: Any, wanted: Any, allow: Collection[str]
) -> Unfilled:
    """See what the library makes of the files, whatever that is."""
    rehearsed = functools.partial(rehearse, model_class, config, _state(checkpoint), wanted, where=checkpoint.path)
    model, differences = rehearsed(strict=not {"missing", "mismatched"} & {*allow})
    check_differences(checkpoint, type(model).__name__, differences, allow)
    if any(_stands_for_nothing(one) for one in (*model.parameters(), *model.buffers())):
        # What the library says need not be there; it initialises it, so let it.
        model, _ = rehearsed(strict=False)
    return leave_unfilled(model, checkpoint)


def _state(checkpoint: Checkpoint) -> dict[str, TracedTensor]:
    return {
        name: traced(leaf(name, entry.shape, entry.dtype, functools.partial(read_entry, checkpoint, name)))
        for name, entry in checkpoint.entries.items()
    }


def _stands_for_nothing(tensor: torch.Tensor) -> bool:
    return (
        isinstance(tensor, TracedTensor) and isinstance(tensor.expression, TracedSource) and tensor.expression.missing
    )


def _read_quantised(
    model_class: Any, config: Any, checkpoint: Checkpoint, directory: Path, dtype: Any, allow: Collection[str]
) -> Unfilled:
    """Let the library read a checkpoint that is quantised: only it knows how. The packed model is on the CPU then."""
    try:
        with quiet(), no_dispatch_modes():
            model, info = model_class.from_pretrained(
                str(directory), config=config, dtype=dtype, use_safetensors=True, local_files_only=True,
                output_loading_info=True,
            )  # fmt: skip
    except Exception as error:  # whatever the library of this method needs and does not find
        method = config.quantization_config
        name = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
        raise CheckpointError(
            f"the weights of {directory} are quantised ({name or 'see its quantization_config'}), and transformers "
            f"can't load them here: {one_line(error)}. Load them where it can, or take one that is not quantised."
        ) from error
    found = Differences(missing=info["missing_keys"], unexpected=info["unexpected_keys"])
    check_differences(checkpoint, type(model).__name__, found, allow)
    return Unfilled(model=model.eval(), checkpoint=checkpoint, sources={})


def _check_loadable(directory: Path) -> None:
    if (directory / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{directory} holds an adapter (adapter_config.json). Load the model it was made for with autoshard.load, "
            "then add it with model.load_adapter(…)."
        )


def _dtype_named(dtype: "torch.dtype | str") -> "torch.dtype | str":
    if isinstance(dtype, str) and dtype == "auto":
        return dtype
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize == 1:
        raise SpecError(f'dtype is {dtype!r}; write "auto", "int8", "bfloat16", "float16", "float32" or a torch.dtype.')
    return found


def _add_generation_config(model: Any, directory: Path, trust_remote_code: bool) -> None:
    """Give the model the generation settings of its directory, as `from_pretrained` does."""
    if not (model.can_generate() and hasattr(model, "adjust_generation_fn")):
        return
    with quiet():
        model.adjust_generation_fn(
            None, False, None, str(directory), cache_dir=None, force_download=False, proxies=None, token=None,
            local_files_only=True, revision=None, subfolder="", trust_remote_code=trust_remote_code,
        )  # fmt: skip

"""Models from a Hugging Face directory or a config.json alone, without allocating them.

Nothing here knows a model family: the configuration names its class, transformers has it.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autoshard.checkpoint.traced import leaf, traced
from autoshard.common.packed import is_packed
from autoshard.errors import SpecError
from autoshard.integrations.rehearsal import rehearse
from autoshard.integrations.skeleton import without_weights
from autoshard.integrations.words import one_line


def load_model(path: "str | os.PathLike[str]", *, with_weights: bool = False) -> nn.Module:
    """Build the model a directory or a config.json describes, in the configuration's dtype, ready for inference.

    Without weights its parameters are on meta: nothing is allocated. `with_weights` reads them from the directory, or
    draws them at random where there are none. Code that comes with the model is never run. Raises `SpecError`.
    """
    file = config_file(path)
    config = read_config(file)
    model_class = model_class_of(config)
    if with_weights and has_weights(file.parent):
        return model_class.from_pretrained(str(file.parent), local_files_only=True, dtype="auto").eval()
    try:
        with contextlib.nullcontext() if with_weights else without_weights(), _DefaultDtype(_dtype(config)):
            model = model_class(config)
    except Exception as error:  # likewise
        raise SpecError(f"{model_class.__name__} can't be built from {file}: {one_line(error)}") from error
    if with_weights:
        return model.eval()
    if getattr(config, "quantization_config", None) is not None:
        from autoshard.integrations.quantised import quantised_as_stored

        quantised_as_stored(model)
    else:
        _use_dtypes_of_loading(model, model_class, config, file)
    return model.eval()


def read_config(file: Path, *, trust_remote_code: bool = False) -> Any:
    """Read a config.json as its class in transformers. Code beside it runs only if trusted. Raises `SpecError`."""
    data = _read_json(file)
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise SpecError(f"{file} is not a model's configuration: it names no model_type.")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise SpecError("reading a Hugging Face model needs transformers. Run: pip install transformers") from None
    # Code is found beside the directory; a file alone is read as what the library knows.
    source = file.parent if trust_remote_code else file
    try:
        return AutoConfig.from_pretrained(str(source), local_files_only=True, trust_remote_code=trust_remote_code)
    except Exception as error:  # whatever the class of this configuration makes of wrong values
        raise SpecError(f"transformers does not accept {file}: {one_line(error)}") from error


def _use_dtypes_of_loading(model: Any, model_class: Any, config: Any, file: Path) -> None:
    """Give tensors the dtypes that the library gives them when it loads: a few classes keep some in float32."""
    if hasattr(model, "_get_dtype_plan") and not model._get_dtype_plan(_dtype(config)):
        return  # nothing is kept; asking is faster than the rehearsal
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {name: traced(leaf(name, tuple(one.shape), one.dtype)) for name, one in model.state_dict().items()}
    rehearsed, _ = rehearse(model_class, config, state, _dtype(config), where=file, strict=True)
    for name, other in (*rehearsed.named_parameters(), *rehearsed.named_buffers()):
        if name in tensors and tensors[name].dtype != other.dtype:
            tensors[name].data = tensors[name].data.to(other.dtype)


def config_file(path: "str | os.PathLike[str]") -> Path:
    """Return the config.json meant by a directory, by the file itself, or by the name of a model in the hub's cache.

    Nothing is downloaded. Raises `SpecError` if there is none.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if file.is_file():
        return file
    cached = cached_config(str(path))
    if cached is None:
        raise SpecError(f"{file} does not exist. Give a directory with a config.json, or a config.json.")
    return cached


def cached_config(name: str) -> Path | None:
    """Return the config.json of a model such as "org/model" that the Hugging Face cache has; None if it has none."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "config.json")
    except (ImportError, ValueError):  # it is not installed, or this can't be the name of a model
        return None
    return Path(found) if isinstance(found, str) else None


def has_weights(directory: Path) -> bool:
    """Tell whether a directory holds weights that can be read without running code from it."""
    return any(directory.glob("*.safetensors"))


def quantization_note(model: nn.Module) -> str | None:
    """Say so if the checkpoint is quantised and the model is not, for the plan is then made for larger sizes."""
    if getattr(getattr(model, "config", None), "quantization_config", None) is None:
        return None
    if any(map(is_packed, model.parameters())):
        return None
    return "The checkpoint is quantised; the model is planned in the dtype of its configuration, which is larger."


def model_class_of(config: Any, trusted: Path | None = None) -> Any:
    """The class the configuration names; else the one transformers uses for this type of configuration.

    `trusted`: a directory whose own code may be run where its configuration says so.
    """
    import transformers

    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    if trusted is not None:
        for reference in (getattr(config, "auto_map", None) or {}).values():
            if isinstance(reference, str) and reference.rpartition(".")[2] in names:
                from transformers.dynamic_module_utils import get_class_from_dynamic_module

                return get_class_from_dynamic_module(reference, str(trusted), local_files_only=True)
    for name in names:
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    if names:  # another class of the same configuration would have other layers, or leave some out
        raise SpecError(
            f"the configuration names the architecture {names[0]}, which transformers {transformers.__version__} does "
            'not have. Correct "architectures" in config.json, or give code that comes with the model '
            "trust_remote_code=True."
        )
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            return auto._model_mapping[type(config)]
    raise SpecError(
        f"transformers has no model for a configuration of type {config.model_type!r}. "
        f"Write a model.py that builds the model, and give that."
    )


def _dtype(config: Any) -> torch.dtype:
    """The dtype the checkpoint is stored in; float32 if the configuration does not say."""
    dtype = getattr(config, "dtype", None)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    return dtype if isinstance(dtype, torch.dtype) and dtype.is_floating_point else torch.float32


class _DefaultDtype:
    """Within it, floating-point tensors are made in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        # Factories can't make 8-bit floats; such checkpoints are quantised.
        self.dtype = dtype if dtype.itemsize > 1 else torch.bfloat16

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{file} can't be read as JSON: {one_line(error)}") from None

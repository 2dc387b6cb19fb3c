"""Models whose files hold their tensors as they are, name by name: built at once, with no rehearsal of the loading.

    config ──class, on meta──▶ model ──names, shapes as in the files?──▶ buffers filled in, ties made
                                        └─ no: None, and the library is asked what it does (rehearsal.py)

Everything here is what the library's own loading does in this simple case, by functions of its own.
"""

import contextlib
import copy
from typing import Any

import torch
from torch import nn

from autoshard.checkpoint.data import Checkpoint, Piece, Source, Target
from autoshard.checkpoint.reading import read_into
from autoshard.integrations.rehearsal import quiet
from autoshard.integrations.skeleton import no_fills
from autoshard.integrations.unfilled import Unfilled
from autoshard.module_paths import above
from autoshard.torch_private import no_dispatch_modes


def open_plainly(checkpoint: Checkpoint, model_class: Any, config: Any, dtype: Any) -> Unfilled | None:
    """Return the model with its parameters on meta, or None where the library does more than to load name by name."""
    wanted = getattr(config, "dtype", None) if dtype == "auto" else dtype
    if not isinstance(wanted, torch.dtype) or getattr(config, "fusion_config", None) is not None:
        return None
    try:
        with quiet(), no_dispatch_modes():
            model = _built(model_class, copy.deepcopy(config), wanted)
            transforms = _transforms(model)
            if not _is_plain(model, checkpoint, wanted, transforms):
                return None
            _finish(model, checkpoint)
            model._weight_conversions = [one for one in transforms if one.was_used()]  # which saving asks for
    except Exception:  # whatever this class or another version of the library makes of it; the rehearsal will say
        return None
    parameters = model.named_parameters(remove_duplicate=False)
    sources = {name: _source(name, parameter) for name, parameter in parameters if name in checkpoint.entries}
    return Unfilled(model=model, checkpoint=checkpoint, sources=sources)


def _source(name: str, tensor: torch.Tensor) -> Source:
    return Source(shape=tuple(tensor.shape), dtype=tensor.dtype, pieces=(Piece(entry=name),))


def _built(model_class: Any, config: Any, dtype: torch.dtype) -> Any:
    from transformers.monkey_patching import patch_output_recorders

    config.dtype = dtype
    for name in config.sub_configs:
        if getattr(config, name) is not None:
            getattr(config, name).dtype = dtype
    with contextlib.ExitStack() as stack:
        for context in model_class.get_init_context(dtype, False, False, None):
            stack.enter_context(context)
        stack.enter_context(no_fills())
        model = model_class(config)
        patch_output_recorders(model)
    return model


def _transforms(model: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping

    return list(get_model_conversion_mapping(model))


def _is_plain(model: Any, checkpoint: Checkpoint, dtype: torch.dtype, transforms: list[Any]) -> bool:
    """Whether the files have exactly the tensors of the model, under their names; of tied ones the first only."""
    from transformers.core_model_loading import WeightConverter, rename_source_key

    state, entries = model.state_dict(), checkpoint.entries
    if model._get_dtype_plan(dtype) or model.is_custom_code() or state.keys() - entries.keys() != _tied(model):
        return False
    if not all(type(parameter) is nn.Parameter and parameter.is_meta for parameter in model.parameters()):
        return False
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    renamings = [one for one in transforms if not isinstance(one, WeightConverter)]
    prefix = model.base_model_prefix
    for name, entry in entries.items():
        own = state.get(name)
        if own is None or tuple(own.shape) != entry.shape or own.is_floating_point() != entry.dtype.is_floating_point:
            return False
        if rename_source_key(name, renamings, converters, prefix, state) != (name, None):
            return False
    return True


def _tied(model: Any) -> set[str]:
    """Names of tensors that the library makes of others."""
    return {*model.all_tied_weights_keys}


def _finish(model: Any, checkpoint: Checkpoint) -> None:
    """Do what comes after the weights: other buffers, ties, evaluation mode. Weights are marked as having values."""
    buffers: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for own, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{own}" if path else own
            if tensor is None:
                continue
            if name not in checkpoint.entries:
                if own in module._non_persistent_buffers_set:
                    module._buffers[own] = torch.empty_like(tensor, device="cpu")
            elif own in module._buffers:
                buffers[name] = module._buffers[own] = _marked(torch.empty(tuple(tensor.shape), dtype=tensor.dtype))
            elif tensor.requires_grad == tensor.is_floating_point():
                _marked(tensor)
            else:  # loaded ones can all be trained, whatever the class made of them
                setattr(module, own, _marked(nn.Parameter(tensor.detach(), tensor.is_floating_point())))
    targets = [Target(source=name, tensor=buffer) for name, buffer in buffers.items()]
    read_into(checkpoint, {name: _source(name, buffer) for name, buffer in buffers.items()}, targets)
    for name in _tied(model):
        _marked(model.get_parameter(name))
    with_buffers = {path for name, _ in model.named_buffers(remove_duplicate=False) for path in above(name)}
    for path, module in model.named_modules():
        if path not in with_buffers:  # nothing is left to be computed in it
            _marked(module)
    model.initialize_weights()
    model.tie_weights(missing_keys=_tied(model), recompute_mapping=False)
    model.eval()
    model.set_use_kernels(False)


def _marked(tensor: Any) -> Any:
    tensor._is_hf_initialized = True
    return tensor

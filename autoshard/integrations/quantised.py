"""Weights as int8 with a scale per row, by torchao: which ones, and how they are made as a checkpoint is read.

Only matrices of linear layers are; embeddings, norms, biases and output heads keep the dtype they have. For a model of
Transformers its own rule says which, so that the model is the one that `from_pretrained` gives with
`quantization_config=TorchAoConfig(Int8WeightOnlyConfig())`.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from autoshard.errors import SpecError
from autoshard.integrations.unfilled import Unfilled
from autoshard.runtime.moves import named_tensors, tied_groups

INT8 = "int8"


def quantised(unfilled: Unfilled) -> Unfilled:
    """Give a model, in place, the packed weights it will have, on meta as before, and say that they are packed as read.

    Its sizes are then those of the quantised model, for capture and plans. Raises `SpecError`.
    """
    config = getattr(unfilled.model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        raise SpecError("the checkpoint is quantised already: load it with dtype='auto'.")
    names = quantise(unfilled.model, _int8())
    sources = {
        name: replace(source, pack=pack_int8) if name in names else source for name, source in unfilled.sources.items()
    }
    return replace(unfilled, sources=sources, quantised=True)


def quantised_as_stored(model: nn.Module) -> bool:
    """Give a model of Transformers on meta the packed weights that its files have by its configuration.

    False, and the model as it was, if another library than torchao quantised them, or in a way not known here.
    """
    stored = getattr(model.config, "quantization_config", None)
    if not isinstance(stored, dict) or stored.get("quant_method") != "torchao":
        return False
    try:
        from transformers import TorchAoConfig

        quantise(model, TorchAoConfig.from_dict(stored).get_apply_tensor_subclass())
    except Exception:  # whatever a newer or an older library makes of it; the plan then says what it was made for
        return False
    return True


def quantise(model: nn.Module, config: Any) -> frozenset[str]:
    """Quantise linear layers as torchao's `config` says, on meta or with values; return the names of what is packed.

    Raises `SpecError` if there is nothing to quantise.
    """
    tensors = named_tensors(model)
    packed = {name: _packed(tensors[name].detach(), config) for name in _chosen(model, config)}
    for name, weight in packed.items():
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, nn.Parameter(weight, requires_grad=False))
    return frozenset(packed)


def pack_int8(weight: torch.Tensor) -> torch.Tensor:
    """Quantise a matrix, or rows of one, as torchao does in a linear layer that has it."""
    return _packed(weight, _int8())


def _packed(weight: torch.Tensor, config: Any) -> torch.Tensor:
    from torchao.quantization import quantize_

    holder = nn.Linear(1, 1, bias=False, device="meta")
    holder.weight = nn.Parameter(weight, requires_grad=False)
    quantize_(holder, config)
    return holder.weight.detach()


def mark_quantised(model: nn.Module) -> None:
    """Let a filled model of Transformers know that it is quantised, as `from_pretrained` does."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None:
        quantizer.postprocess_model(model)


def _chosen(model: nn.Module, config: Any) -> frozenset[str]:
    linear = [
        f"{path}.weight".removeprefix(".")
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, NonDynamicallyQuantizableLinear)
    ]
    if hasattr(model, "all_tied_weights_keys"):
        found = _chosen_by_transformers(model, linear, config)
    else:
        alone = {names[0] for names in tied_groups(named_tensors(model)) if len(names) == 1}
        found = frozenset(name for name in linear if name in alone)
    if not found:
        raise SpecError(
            f"dtype='int8' quantises the weights of linear layers, and {type(model).__name__} has none for it. Load it "
            "with dtype='auto'."
        )
    return found


def _chosen_by_transformers(model: Any, linear: Collection[str], config: Any) -> frozenset[str]:
    from transformers import TorchAoConfig
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(TorchAoConfig(config), pre_quantized=False)
    quantizer.preprocess_model(model)
    model.hf_quantizer = quantizer
    return frozenset(name for name in linear if quantizer.param_needs_quantization(model, name))


def _int8() -> Any:
    """torchao's configuration, without the settings of torch's compiler that come with it."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError:
        raise SpecError("dtype='int8' needs torchao. Run: pip install torchao") from None
    return Int8WeightOnlyConfig(set_inductor_config=False)

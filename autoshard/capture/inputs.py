"""What to call the model with: the user's inputs in one form, or inputs derived from a config and a workload.

Derivation knows the words that configs and forward signatures share (`vocab_size`, `image_size`, `input_ids`,
`pixel_values` …), never a model. Where several shapes are plausible all are offered, and the first that runs is taken.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.nested import map_tensors, tensors_in
from autoshard.plan.workload import Workload

Call = tuple[tuple[Any, ...], dict[str, Any]]
DEFAULT_SEQUENCE = 512
"""Tokens per sequence where neither the workload nor the model's limit says otherwise."""
MOST_TOKENS = 2**27
"""Token ids that are made for one call, 1 GiB of them; the mask and the labels beside them are as large."""
_MAX_LENGTH = ("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions", "max_seq_len")


def as_call(inputs: Any, model: nn.Module) -> Call:
    """Bring a tensor, a tuple, a dict or a callable returning one of these into (args, kwargs)."""
    if callable(inputs) and not isinstance(inputs, (torch.Tensor, dict)):
        inputs = inputs()
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, dict):
        return (), {str(name): value for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise CaptureError(
        f"inputs for {type(model).__name__} must be a tensor, a tuple of positional arguments, a dict of keyword "
        f"arguments or a callable returning one of these, got {type(inputs).__name__}."
    )


def derive_inputs(model: nn.Module, workload: Workload) -> list[Call]:
    """Keyword inputs for a model with a `config`, most likely first; figures come from the config and the workload.

    Of a model in half precision, numbers are first in its type, as callers give them, and then in float32.

    Raises:
        CaptureError: there is no config, or nothing in the forward signature that it says enough about.
    """
    calls, dtype = _derived(model, workload), getattr(model, "dtype", None)
    if dtype not in (torch.float16, torch.bfloat16):
        return calls
    typed = [map_tensors(call, lambda one: one.to(dtype) if one.is_floating_point() else one) for call in calls]
    return [*typed, *calls] if any(one.is_floating_point() for _, one in tensors_in(calls)) else calls


def _derived(model: nn.Module, workload: Workload) -> list[Call]:
    """The same with numbers in float32."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "__dict__"):
        raise CaptureError(
            f"{name} has no config to derive inputs from: pass inputs=, a tuple or a dict of what forward takes."
        )
    parameters = inspect.signature(model.forward).parameters
    wanted = _wanted(model, parameters)
    offers: dict[str, list[torch.Tensor]] = {}
    for parameter in wanted:
        makers = _MAKERS.get(parameter)
        offers[parameter] = list(makers(config, workload)) if makers is not None else []
        if not offers[parameter]:
            raise CaptureError(
                f"the config of {name} does not say what its forward's argument {parameter!r} looks like: "
                "pass inputs= yourself."
            )
    calls: list[Call] = []
    for choice in product(*offers.values()):
        kwargs = dict(zip(offers, choice, strict=True))
        calls.append(((), _completed(model, kwargs, parameters, config, workload)))
    more = {
        name: next(_MAKERS[name](config, workload), None)
        for name in parameters
        if name in ("pixel_values", "input_features", "input_values") and name not in offers
    }
    if any(value is not None for value in more.values()):  # models that compare two kinds of input take neither alone
        calls.append(((), {**calls[0][1], **{name: value for name, value in more.items() if value is not None}}))
    if workload.sequence_length is None:  # the limit may count positions that no token can have
        calls += _derived(model, replace(workload, sequence_length=max(1, sequence_length(config, workload) // 2)))
    return calls


def _wanted(model: nn.Module, parameters: Any) -> list[str]:
    """The arguments to make: those without default, and the model's main input, or the first one that can be made."""
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    ]
    main = getattr(model, "main_input_name", None)
    if main in parameters and main not in required:
        required.append(main)
    if not any(name in _MAKERS for name in required):
        required += [name for name in parameters if name in _MAKERS and name not in required][:1]
    return required


def _completed(
    model: nn.Module, kwargs: dict[str, Any], parameters: Any, config: Any, workload: Workload
) -> dict[str, Any]:
    """Add what callers usually pass along: a mask of ones, the decoder's tokens, labels in training."""
    ids = kwargs.get("input_ids")
    if ids is not None and "attention_mask" in parameters:
        kwargs["attention_mask"] = torch.ones_like(ids)
    pair = getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters
    if pair and "decoder_input_ids" not in kwargs:
        kwargs["decoder_input_ids"] = next(_tokens(config, workload))
    if workload.training and "labels" in parameters and ids is not None and _predicts_tokens(model):
        kwargs["labels"] = (kwargs["decoder_input_ids"] if pair else ids).clone()
    return kwargs


def _predicts_tokens(model: nn.Module) -> bool:
    get = getattr(model, "get_output_embeddings", None)
    return callable(get) and get() is not None


def _look_up(config: Any, *names: str, kind: type | tuple[type, ...] = int) -> Any:
    """The first of `names` in a config or, breadth first, in the configs inside it."""
    level = [config]
    while level:
        for name in names:
            for part in level:
                value = getattr(part, name, None)
                if isinstance(value, kind) and not isinstance(value, bool):
                    return value
        inner = [value for part in level for value in vars(part).values()]
        level = [value for value in inner if hasattr(value, "to_dict") and hasattr(value, "__dict__")]
    return None


def sequence_length(config: Any, workload: Workload) -> int:
    """Tokens per sequence: the workload's, else `DEFAULT_SEQUENCE`, within the model's own limit."""
    if workload.sequence_length is not None:
        return workload.sequence_length
    limits = [_look_up(config, name) for name in _MAX_LENGTH]
    return min([DEFAULT_SEQUENCE, *(limit for limit in limits if limit and limit > 0)])


def _tokens(config: Any, workload: Workload) -> Iterator[torch.Tensor]:
    """Token ids that mean nothing special: (batch, sequence)."""
    vocabulary = _look_up(config, "vocab_size", "src_vocab_size")
    if vocabulary is None:
        return
    special = {
        value
        for name, value in vars(config).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }
    ordinary = [token for token in range(min(vocabulary, 64)) if token not in special] or [0]
    shape = (workload.batch_size or 1, sequence_length(config, workload))
    count = shape[0] * shape[1]
    if count > MOST_TOKENS:
        raise CaptureError(
            f"{shape[0]} x {shape[1]} tokens in one call are too many: give a smaller batch or shorter sequences."
        )
    yield torch.tensor(ordinary).repeat(-(-count // len(ordinary)))[:count].view(shape)


def _images(config: Any, workload: Workload) -> Iterator[torch.Tensor]:
    """Images (batch, channels, height, width), or videos (batch, frames, channels, height, width)."""
    size = _look_up(config, "image_size", "input_size", "img_size", kind=(int, list, tuple, dict))
    if isinstance(size, dict):
        size = list(size.values())
    sizes = (
        [tuple(size[-2:]) if isinstance(size, (list, tuple)) else (size, size)] if size is not None else [(224, 224)]
    )
    channels = _look_up(config, "num_channels", "in_channels", "in_chans", "image_channels") or 3
    frames = _look_up(config, "num_frames", "frames_per_clip")
    batch = workload.batch_size or 1
    for height, width in sizes:
        if frames:
            yield torch.zeros(batch, frames, channels, height, width)
        yield torch.zeros(batch, channels, height, width)
        yield torch.zeros(batch, 2, channels, height, width)


def _features(config: Any, workload: Workload) -> Iterator[torch.Tensor]:
    """Spectrogram features, channels first or last: (batch, channels, time), (batch, time, channels)."""
    channels = _look_up(
        config, "num_mel_bins", "input_feat_per_channel", "feature_size", "input_dim", "model_in_channels", "n_mels"
    )
    if channels is None:
        return
    batch = workload.batch_size or 1
    times = [workload.sequence_length] if workload.sequence_length else []
    positions = _look_up(config, "max_source_positions", "max_length")
    times += [2 * positions, positions] if positions else [1024]
    for time in times:
        yield torch.zeros(batch, channels, time)
        yield torch.zeros(batch, time, channels)


def _samples(config: Any, workload: Workload) -> Iterator[torch.Tensor]:
    """Audio samples (batch, time) or (batch, channels, time); one second unless the workload says otherwise."""
    time = workload.sequence_length or _look_up(config, "sampling_rate", "sample_rate") or 16000
    channels = _look_up(config, "audio_channels", "num_channels", "channels") or 1
    batch = workload.batch_size or 1
    yield torch.zeros(batch, time)
    yield torch.zeros(batch, channels, time)
    mels = _look_up(config, "num_mel_bins")
    if mels:
        yield torch.zeros(batch, workload.sequence_length or _look_up(config, "max_length") or 1024, mels)


def _embeddings(config: Any, workload: Workload) -> Iterator[torch.Tensor]:
    """Embedded tokens (batch, sequence, hidden)."""
    hidden = _look_up(config, "hidden_size", "d_model", "n_embd")
    if hidden is not None:
        yield torch.zeros(workload.batch_size or 1, sequence_length(config, workload), hidden)


_MAKERS: dict[str, Callable[[Any, Workload], Iterator[torch.Tensor]]] = {
    "input_ids": _tokens,
    "decoder_input_ids": _tokens,
    "pixel_values": _images,
    "pixel_values_videos": _images,
    "input_features": _features,
    "input_values": _samples,
    "inputs_embeds": _embeddings,
    "hidden_states": _embeddings,
}
"""How to make each kind of input, by the name of the forward argument; the order is that of preference."""

"""Generation after the prompt: a forward that keeps its state, then one step that uses it.

    forward   ids (batch, prompt + new - 1)  use_cache=True   ──▶  output with its state (a cache object, or tensors)
    decode    ids (batch, 1)                 state fed back   ──▶  one token on the longest context of the workload

What is state is read off the signature: a field of the output that `forward` takes back as an argument.
"""

import inspect
from collections import namedtuple
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from autoshard import nested
from autoshard.errors import CaptureError

Decoding = Literal["step", "generate"]
"""How to get at the cached step: call forward twice, or the model's own `generate`, which knows its own state."""
_TOKENS = ("decoder_input_ids", "input_ids")
_Encoded = namedtuple("_Encoded", "last_hidden_state hidden_states attentions", defaults=(None, None))


def run_decode(model: nn.Module, named: dict[str, Any], how: Decoding) -> tuple[Any, list[torch.Tensor]]:
    """Run a prompt (see `prompt_arguments`) and the step after it; return its output and the tensors of its state."""
    if how == "generate":
        if not callable(getattr(model, "generate", None)):
            raise CaptureError(
                f"{type(model).__name__} has no generate() to record a cached step with; set new_tokens=0."
            )
        plain = {name: value for name, value in named.items() if name not in ("use_cache", "logits_to_keep")}
        generate: Any = model.generate
        output = generate(  # an end token that no answer can be: the loop must run twice
            **plain, max_new_tokens=2, do_sample=False, use_cache=True, eos_token_id=-1, return_dict_in_generate=True
        )
        return output, list(opaque_tensors(output))
    output = model(**named)
    step = step_arguments(model, named, output)
    del output, named
    output = model(**step)  # the prompt's output is gone, but for the state in it
    fields = [value for name, value in _fields(output) if name in step]
    plain_state = [tensor for value in fields for _, tensor in nested.tensors_in(value)]
    return output, [*opaque_tensors(output), *plain_state]


def opaque_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that only objects of unknown classes hold: what `nested.tensors_in` passes by (a key/value cache)."""
    plain = {id(tensor) for _, tensor in nested.tensors_in(value)}
    seen: set[int] = set()

    def walk(item: Any) -> Iterator[torch.Tensor]:
        if isinstance(item, (str, bytes, int, float, bool, type(None), nn.Module, type)) or id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            if id(item) not in plain:
                yield item
        elif isinstance(item, (dict, list, tuple, set)):
            for part in item.values() if isinstance(item, dict) else item:
                yield from walk(part)
        elif not callable(item):
            for part in list(getattr(item, "__dict__", {}).values()):
                yield from walk(part)

    yield from walk(value)


def prompt_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any], new_tokens: int) -> dict[str, Any]:
    """Keyword arguments of the forward over all tokens but the last, keeping its state and only the last logits.

    `new_tokens - 1` columns are appended to the tokens and to every integer input as long as they are.
    """
    parameters = inspect.signature(model.forward).parameters
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    tokens = token_argument(named)
    length = named[tokens].shape[1]
    if new_tokens > 1:
        for name, value in named.items():
            if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.shape[1:] == (length,):
                named[name] = torch.cat([value, value[:, -1:].expand(-1, new_tokens - 1)], dim=1)
    named["use_cache"] = True
    if "logits_to_keep" in parameters:  # what `generate` asks for
        named["logits_to_keep"] = 1
    return named


def token_argument(named: dict[str, Any]) -> str:
    """The argument that holds the tokens to continue: the decoder's if there are two."""
    for name in _TOKENS:
        if isinstance(named.get(name), torch.Tensor) and named[name].dim() == 2:
            return name
    raise CaptureError("generation can be planned only for models that are called with input_ids; set new_tokens=0.")


def step_arguments(model: nn.Module, named: dict[str, Any], output: Any) -> dict[str, Any]:
    """Keyword arguments of the step after the prompt: one more token, the state handed back, the mask grown by one.

    Raises:
        CaptureError: the output holds nothing that forward takes back.
    """
    parameters = inspect.signature(model.forward).parameters
    state = {name: value for name, value in _fields(output) if name in parameters and _is_state(name, value, named)}
    if not state:
        raise CaptureError(
            f"the output of {type(model).__name__} holds no state that its forward takes back, so a cached step "
            "can't be recorded; set new_tokens=0."
        )
    tokens = token_argument(named)
    step: dict[str, Any] = {tokens: named[tokens][:, -1:].clone(), "use_cache": True, **state}
    length = named[tokens].shape[1]
    for name, value in named.items():
        if name in step or name not in parameters:
            continue
        mask = isinstance(value, torch.Tensor) and name.endswith("mask")
        if mask and tokens == _TOKENS[0] and not name.startswith("decoder_"):
            step[name] = value  # of the encoder's tokens, which stay
        elif mask and value.shape[1:] == (length,):
            step[name] = torch.cat([value, value[:, -1:]], dim=1)
        elif not any(True for _ in nested.tensors_in(value)):
            step[name] = value
    encoded = dict(_fields(output)).get("encoder_last_hidden_state")
    if encoded is not None and "encoder_outputs" in parameters:
        step["encoder_outputs"] = _Encoded(encoded)
    return step


def _fields(output: Any) -> list[tuple[str, Any]]:
    if isinstance(output, dict):
        return list(output.items())
    return list(getattr(output, "__dict__", {}).items())


def _is_state(name: str, value: Any, named: dict[str, Any]) -> bool:
    """Whether an output field is what the next call takes back: not a plain result such as hidden states or logits."""
    if value is None or name in named or isinstance(value, torch.Tensor):
        return False
    return not isinstance(value, (bool, int, float, str)) and name not in (
        "hidden_states",
        "attentions",
        "encoder_outputs",
    )

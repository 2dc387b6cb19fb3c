"""Generation after the prompt: a forward that keeps its state, then one step that uses it.

    forward   ids (batch, prompt)            use_cache=True   ──▶  output, thrown away
    context   ids (batch, prompt + new - 3)  use_cache=True   ──▶  output with its state (a cache object, or tensors)
              ids (batch, 1)                 state fed back   ──▶  the same, as a step leaves it
    decode    ids (batch, 1)                 state fed back   ──▶  one token, the last one of the workload

The context stands for the steps left out: it only makes the state that the last step finds, and counts nothing. (A
step of its own is needed: a window of keys is a slice of all of them after a long prompt, and its own size after a
step.) It is left out itself where the prompt makes that state (one or two new tokens).

What is state is read off the signature: a field of the output that `forward` takes back as an argument.
"""

import inspect
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import nn

from autoshard import nested
from autoshard.capture.graph import ModelGraph
from autoshard.errors import CaptureError

Decoding = Literal["step", "generate"]
"""How to get at the cached step: call forward twice, or the model's own `generate`, which knows its own state."""
NO_TOKEN = 2**31 - 1
"""An end token that no answer can be."""
TOKENS = ("decoder_input_ids", "input_ids")
"""Arguments with the tokens that an answer is added to: of the decoder, where there is an encoder, too."""
_Encoded = namedtuple("_Encoded", "last_hidden_state hidden_states attentions", defaults=(None, None))


def run_decode(
    model: nn.Module, prompts: list[dict[str, Any]], how: Decoding, begin_context: Callable[[], None]
) -> Any:
    """Run the prompt alone or, if a context follows it, both (see `prompt_arguments`), and one or two steps after that.

    `begin_context` is called between the two. Returns what `generate` or the last step returned, for as long as the
    caller holds it.
    """
    *first, named = prompts
    steps = 1 + len(first)
    if how == "generate":
        if not callable(getattr(model, "generate", None)):
            raise CaptureError(
                f"{type(model).__name__} has no generate() to record a cached step with; set new_tokens=0."
            )
        generate: Any = model.generate
        greedy: dict[str, Any] = {"do_sample": False, "eos_token_id": NO_TOKEN}  # the loop must run to its end
        for prompt in first:
            generate(**prompt, **greedy, max_new_tokens=1)
            begin_context()
        return generate(**named, **greedy, max_new_tokens=1 + steps)
    for prompt in first:
        model(**_keeping_state(model, prompt))
        begin_context()
    named = _keeping_state(model, named)
    output = model(**named)
    for _ in range(steps):
        step = step_arguments(model, named, output)
        named = _with_more(named, 1)
        del output
        output = model(**step)  # the output before is gone, but for the state in it
    return output


def state_tensors(model: nn.Module, output: Any) -> list[torch.Tensor]:
    """Return the tensors of the state in an output: those of unknown objects, and of fields that forward takes back."""
    parameters = inspect.signature(model.forward).parameters
    fields = [value for name, value in _fields(output) if name in parameters and _is_state(name, value, {})]
    plain = [tensor for value in fields for _, tensor in nested.tensors_in(value)]
    return [*opaque_tensors(output), *plain]


def opaque_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Tensors that only objects of unknown classes hold: what `nested.tensors_in` passes by (a key/value cache)."""
    seen = {id(tensor) for _, tensor in nested.tensors_in(value)}
    for _, tensor in nested.tensors_within(value):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def prompt_arguments(model: nn.Module, args: tuple, kwargs: dict[str, Any], more: int) -> dict[str, Any]:
    """Keyword arguments of a forward over the tokens given and `more` of them.

    The columns are appended to the tokens and to every integer input as long as they are. A decoder that is given no
    tokens of its own starts with one.
    """
    parameters = inspect.signature(model.forward).parameters
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    pair = getattr(getattr(model, "config", None), "is_encoder_decoder", False) and TOKENS[0] in parameters
    if more and pair and named.get(TOKENS[0]) is None and named.get("decoder_inputs_embeds") is None:
        given = next((value for value in named.values() if isinstance(value, torch.Tensor) and value.dim()), None)
        if given is not None:
            named[TOKENS[0]] = torch.full((len(given), 1), _start_token(model), dtype=torch.long)
    return _with_more(named, more)


def _start_token(model: nn.Module) -> int:
    """The token that the answer of a decoder starts with; `generate` puts it before any other that it is given."""
    holders = [getattr(model, name, None) for name in ("generation_config", "config")]
    for name in ("decoder_start_token_id", "bos_token_id"):
        for holder in holders:
            if isinstance(getattr(holder, name, None), int):
                return getattr(holder, name)
    return 0


def answered_values(graph: ModelGraph) -> tuple[str, set[int]]:
    """Return the argument with the tokens that an answer is added to, and the values that are made anew for each token.

    Not so what an encoder makes, or a tower for images: that is done with the prompt. ("", all values) where no such
    tokens were given by name. `graph`: captured with `composite=True`.
    """
    values = dict(zip((path.rpartition(".")[2] for path in graph.calls[0].input_paths), graph.inputs, strict=False))
    argument = next((name for name in TOKENS if name in values), "")
    if not argument:
        return "", set(range(len(graph.values)))
    made = {values[argument]}
    for op in graph.ops:
        if not made.isdisjoint(op.inputs):
            made.update(op.outputs, op.mutates)
    return argument, made


def _with_more(named: dict[str, Any], more: int) -> dict[str, Any]:
    """Arguments with `more` tokens: their last column, and that of what is as long as they are, so many times more."""
    if not more:
        return named
    tokens = token_argument(named)
    length = named[tokens].shape[1]
    grown = dict(named)
    for name, value in named.items():
        if isinstance(value, torch.Tensor) and not value.is_floating_point() and value.shape[1:] == (length,):
            if tokens == TOKENS[0] and not name.startswith("decoder_"):
                continue  # of the encoder, which may happen to have as many
            grown[name] = torch.cat([value, value[:, -1:].expand(-1, more)], dim=1)
    return grown


def _keeping_state(model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """Arguments with the flags that `generate` adds: keep the state, and of the logits only the last ones."""
    parameters = inspect.signature(model.forward).parameters
    return {**named, "use_cache": True, **({"logits_to_keep": 1} if "logits_to_keep" in parameters else {})}


def token_argument(named: dict[str, Any]) -> str:
    """The argument that holds the tokens to continue: the decoder's if there are two."""
    for name in TOKENS:
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
        if mask and tokens == TOKENS[0] and not name.startswith("decoder_"):
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

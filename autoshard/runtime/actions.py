"""Carry out the actions of a cut: at calls of modules by their hooks, at calls of torch functions by a function mode.

    _before, _after            pre-hook and hook: actions at the call of the module itself
    begin_watch, end_watch     pre-hook and hook: a mode around its forward, which counts calls and acts on some

Layers of torch that make one call (`nn.Linear` calls `linear`) need no mode: the call's result is the module's. So an
all-reduce behind such a layer costs a hook on it, and nothing else of the model is wrapped. Not where it has a bias,
which is to be added once, to the sum.
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import PlanError
from autoshard.plan.sharding import ATTENTION, DROPOUTS, LOSSES, Action
from autoshard.runtime.experts import install_dispatch
from autoshard.runtime.function_calls import Listed, begin_watch, end_watch
from autoshard.runtime.lengths import Lengths
from autoshard.runtime.recompute import runs_again
from autoshard.runtime.steps import ALONG, Step

ARGUMENTS = ("copy_to", "slice", "collect", "whole", "divide", "own")
"""Kinds of actions on what a call is given."""
_SIZED = (
    "slice", "gather", "spread", "lookup", "dropout", "length", "context", "dispatch", *LOSSES, "spread_tokens",
    "dropout_tokens",
)  # fmt: skip
"""Kinds of actions that say an axis, besides those along tokens."""
_DRAWN = {"dropout": {*DROPOUTS, ATTENTION}, "dropout_tokens": DROPOUTS}
"""Kinds of actions that draw masks -> functions at which they may be."""
_SINGLE = {
    nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d", nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}  # fmt: skip
"""Layers whose result is that of one call of a function, with (input, weight, bias)."""


def _before(steps: tuple[Step, ...], module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pre-hook: the steps on a module's arguments. Without gradients, nothing has to be done about what enters."""
    if not torch.is_grad_enabled() and all(step.action.kind == "copy_to" for step in steps):
        return None
    if runs_again(module):  # with what it was given after these steps
        return None
    arguments = args, kwargs
    with torch_private.no_overrides():
        for step in steps:
            arguments = step.before(arguments)
    return arguments


def _after(steps: tuple[Step, ...], module: nn.Module, args: tuple, result: Any) -> Any:
    """Hook: the steps on a module's result."""
    with torch_private.no_overrides():
        for step in steps:
            result = step.after(result)
        return result


def install(module: nn.Module, steps: Sequence[Step]) -> list[Any]:
    """Put the hooks for some steps on their module; returns the handles that take them off again."""
    at_call: list[Step] = []
    at_functions: Listed = {}
    dispatching = [step for step in steps if step.action.kind == "dispatch"]
    for step in steps:
        if step in dispatching:
            continue
        if step.action.function and not _at_module(module, step.action):
            if _SINGLE.get(type(module)) == step.action.function:  # it makes no other call, from wherever it is called
                step.action = replace(step.action, occurrence=-1)
            at_functions.setdefault(step.action.function, (step.action.function, []))[1].append(step)
        if not step.action.function or step.action.kind == "loss" or _at_module(module, step.action):
            step.paths = _paths(module, step.action)
            at_call.append(step)
    for step in at_call:
        step.kept = any(other.action.kind == "restore" for other in at_call)
    for name, (_, listed) in at_functions.items():
        lengths = [step for step in steps if (step.action.kind, step.action.occurrence) == ("length", -1)]
        lengths = [step for step in lengths if step in listed]
        if lengths:
            at_functions[name] = name, [*(step for step in listed if step not in lengths), Lengths(lengths)]
    handles = install_dispatch(module, dispatching, _paths)
    before = [step for step in at_call if step.action.kind in ARGUMENTS]
    after = [step for step in at_call if step.action.kind not in ARGUMENTS]
    if before:
        handles.append(module.register_forward_pre_hook(partial(_before, tuple(before)), with_kwargs=True))
    if at_functions:
        # First of all hooks, as its counterpart is the last: what hooks of the user call was counted in capture, too.
        handles.append(module.register_forward_pre_hook(partial(begin_watch, at_functions), prepend=True))
        handles.append(module.register_forward_hook(partial(end_watch, at_functions), always_call=True))
    if after:
        # Before hooks of the user, which keep or read what the whole model would give them.
        handles.append(module.register_forward_hook(partial(_after, tuple(after)), prepend=True))
    return handles


def _at_module(module: nn.Module, action: Action) -> bool:
    """Whether an action at a function call can as well be carried out at the call of the layer that makes it."""
    if _SINGLE.get(type(module)) != action.function or action.occurrence not in (-1, 0):
        return False
    if action.kind in ARGUMENTS:
        return action.argument == "0.0" and getattr(module, "padding_mode", "zeros") == "zeros"
    return not action.argument and not action.addend


def _paths(module: nn.Module, action: Action) -> tuple[str, ...]:
    """The paths under which a module may be given an argument: by its place and by its name.

    "0.1" or "1.mask"  ->  both of them        "1.mask.0"  ->  with the rest of the path
    """
    if action.kind not in ARGUMENTS:
        return (action.argument,)
    names = [
        name
        for name, parameter in inspect.signature(module.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    kind, _, rest = action.argument.partition(".")
    first, dot, rest = rest.partition(".")
    if kind == "0" and first.isdecimal() and int(first) < len(names):
        return action.argument, f"1.{names[int(first)]}{dot}{rest}"
    if kind == "1" and first in names:
        return action.argument, f"0.{names.index(first)}{dot}{rest}"
    return (action.argument,)


def check(action: Action, where: str) -> None:
    """Raise `PlanError` for an action that makes no sense."""
    problem = ""
    if action.kind in (*_SIZED, *ALONG) and not action.axis:
        problem = "says no axis"
    elif action.kind in ("lookup", "dropout", "dropout_tokens", "length", *LOSSES) and not action.function:
        problem = "names no function"
    elif action.kind == "lookup" and action.function != "embedding":
        problem = f"is at {action.function!r}; only embedding can look up in a cut table"
    elif action.kind in _DRAWN and action.function not in _DRAWN[action.kind]:
        problem = f"is at {action.function!r}; only {', '.join(sorted(_DRAWN[action.kind]))} can be drawn in parts"
    elif action.addend and (action.kind not in ("reduce", "scatter") or not action.function):
        problem = "has an addend without being the sum of a function's results"
    elif action.gathered and action.kind not in ("reduce", "mean"):
        problem = "is to be gathered and added without being a sum"
    if problem:
        raise PlanError(f"the {action.kind} action at {where} {problem}. Make the plan again.")

"""Watch the torch functions that a module calls, and carry out the steps at some of them: a mode around its forward."""

import functools
import sys
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.runtime.lengths import Lengths
from autoshard.runtime.steps import Step

Listed = dict[str, tuple[str, list[Step | Lengths]]]
"""Name of a function -> (the name, the steps at its calls)."""


class Watch(TorchFunctionMode):
    """While entered, counts the calls of some functions and carries out the steps at the listed ones.

    `frame` is that of the module's call: when it has ended and the mode is still entered, an interrupt was in between.
    """

    def __init__(self, listed: Listed, frame: Any) -> None:
        super().__init__()
        self.listed = listed
        self.frame = frame
        self.seen: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        listed = self.listed.get(getattr(func, "__name__", ""))
        if listed is None:
            body = torch_private.opened(func)
            if body is None:
                return func(*args, **(kwargs or {}))
            _check_maps(self.listed, args, kwargs or {})
            try:
                with self:
                    return body(*args, **(kwargs or {}))
            except RuntimeError as error:
                raise _explained(error, self.listed, args, kwargs or {}) from error
        name, steps = listed  # the name again: torch.compile can't count under what it was asked for
        if name == "unflatten" and torch.compiler.is_compiling():  # which can't see through the method's `super()`
            func = torch.unflatten
        occurrence = self.seen.get(name, 0)
        self.seen[name] = occurrence + 1
        call = func
        for step in steps:
            if step.action.occurrence in (-1, occurrence):
                call = functools.partial(step.around, call)
        return call(*args, **(kwargs or {}))


def _explained(error: RuntimeError, listed: Listed, args: tuple, kwargs: dict) -> Exception:
    """Say so if attention of torch failed for a padding mask, copied for all heads, that the plan does not know."""
    if not _has_some_heads(args) or kwargs.get("key_padding_mask") is None or "expand" in listed:
        return error
    return ApplyError(
        "attention that is cut by its heads was given a padding mask, and the plan was made where it was not. Plan "
        "again with inputs like these: such a plan wants a mask in every call, of which nothing need be set."
    )


def _has_some_heads(args: tuple) -> bool:
    """Whether the projection behind attention of torch (argument 11) is narrower than it says (argument 3)."""
    return len(args) > 11 and args[11].shape[-1] < args[3]


def _check_maps(listed: Listed, args: tuple, kwargs: dict) -> None:
    """Attention of torch with some of the heads has the mean of all maps only if the plan knows that it is asked."""
    asked = kwargs.get("need_weights", True) and kwargs.get("average_attn_weights", True)
    if asked and "mean" not in listed and _has_some_heads(args):
        raise ApplyError(
            "attention that is cut by its heads was asked for the mean of its weights, and the plan was made where it "
            "was not. Plan again with inputs and settings like these, or call it with need_weights=False."
        )


class Open:
    """Pre-hook: begin to watch the functions that a module calls."""

    __slots__ = ("listed",)

    def __init__(self, listed: Listed) -> None:
        self.listed = listed

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if torch.compiler.is_compiling():
            Watch(self.listed, None).__enter__()
            return
        _drop_interrupted()
        Watch(self.listed, sys._getframe(1)).__enter__()


class Close:
    """Hook, also after an exception: end what `Open` began."""

    __slots__ = ("listed",)

    def __init__(self, listed: Listed) -> None:
        self.listed = listed

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        watch = torch_private.innermost_function_mode()
        if isinstance(watch, Watch) and watch.listed is self.listed:
            watch.__exit__(None, None, None)


def _drop_interrupted() -> None:
    """Leave modes whose module's call was interrupted: for KeyboardInterrupt torch calls no hooks."""
    watch = torch_private.innermost_function_mode()
    while isinstance(watch, Watch) and watch.frame is not None and not _runs(watch.frame):
        watch.__exit__(None, None, None)
        watch = torch_private.innermost_function_mode()


def _runs(frame: Any) -> bool:
    current: Any = sys._getframe(1)
    while current is not None:
        if current is frame:
            return True
        current = current.f_back
    return False

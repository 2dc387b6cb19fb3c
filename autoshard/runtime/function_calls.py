"""Watch the torch functions that a module calls, and carry out the steps at some of them: a mode around its forward."""

import functools
import os
import sys
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard.common.attention import written_out
from autoshard.common.source_lines import calling_line
from autoshard.errors import ApplyError
from autoshard.nested import tensors_in
from autoshard.plan.sharding import LOSSES
from autoshard.runtime.collectives import Ranks
from autoshard.runtime.left_behind import attributes
from autoshard.runtime.lengths import Lengths
from autoshard.runtime.steps import Step
from autoshard.runtime.watches import entered, innermost

_TORCH = os.path.dirname(torch.__file__)
_COMPILER = os.path.join(_TORCH, "_dynamo")
Listed = dict[str, tuple[str, list[Step | Lengths]]]
"""Name of a function -> (the name, the steps at its calls)."""


class Watch(TorchFunctionMode):
    """While entered, counts the calls of some functions and carries out the steps at the listed ones."""

    def __init__(self, listed: Listed) -> None:
        super().__init__()
        self.listed = listed
        first = next(iter(listed.values()))[1][0]
        self.ranks = first.ranks if isinstance(first, Step) else first.steps[0].ranks
        steps = [step for _, one in listed.values() for step in one if isinstance(step, Step)]
        self.has_loss = any(step.action.kind in LOSSES for step in steps)
        self.tokens = next((step.memo.tokens for step in steps if step.action.kind in LOSSES), None)
        self.seen: dict[str, int] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if (inside := written_out(func, args, kwargs)) is not None:
            with self:
                return inside()
        called = getattr(func, "__name__", "")
        listed = self.listed.get(called)
        if called == "__getitem__" and self.tokens is not None:
            self.tokens.look_at(args[1], self.ranks.size)
        if listed is None or (not torch.compiler.is_compiling() and _in_compiled_graph(sys._getframe(1))):
            return func(*args, **(kwargs or {}))
        name, steps = listed  # the name again: torch.compile can't count under what it was asked for
        if name == "unflatten" and torch.compiler.is_compiling():  # which can't see through the method's `super()`
            func = torch.unflatten
        occurrence = self.seen.get(name, 0)
        self.seen[name] = occurrence + 1
        call = func
        for step in steps:
            if step.action.occurrence in (-1, occurrence):
                if isinstance(step, Step):
                    _check_line(step)
                call = functools.partial(step.around, call)
        return call(*args, **(kwargs or {}))


def _in_compiled_graph(caller: FrameType | None) -> bool:
    """Whether a function is called by a graph of torch.compile, where the steps at it were recorded with it."""
    if caller is None or not caller.f_code.co_filename.startswith("<eval_with_key>"):
        return False
    while caller is not None and caller.f_code.co_filename.startswith(("<eval_with_key>", _TORCH)):
        if caller.f_code.co_filename.startswith(_COMPILER):
            return True
        caller = caller.f_back
    return False


def begin_watch(listed: Listed, module: nn.Module, args: tuple) -> None:
    """Pre-hook: begin to watch the functions that a module calls."""
    watch = Watch(listed)
    watch.__enter__()
    entered().append(watch)


def end_watch(listed: Listed, module: nn.Module, args: tuple, result: Any) -> None:
    """Hook, also after an exception: end what `begin_watch` began."""
    watch = innermost()
    if watch is not None and watch.listed is listed:
        _leave(watch)
        if result is not None and not torch.compiler.is_compiling():
            _check_counts(watch, module)


def leave_interrupted(ranks: Ranks) -> None:
    """Leave what a forward on these ranks has entered that Ctrl-C cut short: torch calls no hooks for it."""
    while (watch := innermost()) is not None and watch.ranks is ranks:
        _leave(watch)


def _leave(watch: Watch) -> None:
    entered().pop()
    watch.__exit__(None, None, None)


_OTHER_WAY = (
    "the model has gone another way, and is cut for that one only. Plan again with inputs and settings like these, or "
    'place whole modules (strategy="balanced").'
)


def _check_line(step: Step) -> None:
    """Raise `ApplyError` if a call is made by another line of the model's code than when it was planned."""
    planned = step.action.line
    if step.action.occurrence < 0 or not planned or torch.compiler.is_compiling():
        return
    found = calling_line()
    if found != planned:
        raise ApplyError(
            f"call {step.action.occurrence} of {step.where} is made by {found} (function + line), and was made by "
            f"{planned} when the plan was made: {_OTHER_WAY}"
        )


def _check_counts(watch: Watch, module: nn.Module) -> None:
    """Actions are at the how-manieth call of a function, so another number of calls means that they were elsewhere.

    None at all is well where the module keeps tensors in attributes: an earlier forward may have made them. Raises
    `ApplyError`.
    """
    for name, (_, steps) in watch.listed.items():
        for step in (step for step in steps if isinstance(step, Step)):
            planned, found = step.action.calls, watch.seen.get(name, 0)
            if step.action.occurrence >= 0 and planned and found != planned and (found or not _keeps(module)):
                raise ApplyError(
                    f"{step.where} was called {found} times in one forward, and {planned} times when the plan was "
                    f"made: {_OTHER_WAY}"
                )


def _keeps(module: nn.Module) -> bool:
    return any(next(tensors_in(value), None) is not None for _, value in attributes(module))

"""Carry out the actions of a cut: at calls of modules by their hooks, at calls of torch functions by a function mode.

    Before / After    pre-hook and hook: actions at the call of the module itself
    Open / Close      pre-hook and hook: a mode around the module's forward, which counts calls and acts on some

Layers of torch that make one call (`nn.Linear` calls `linear`) need no mode: the call's result is the module's. So an
all-reduce behind such a layer costs a hook on it, and nothing else of the model is wrapped.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autoshard import torch_private
from autoshard.errors import ApplyError, PlanError
from autoshard.nested import map_tensors, replace_at, tensor_at, tensors_in
from autoshard.runtime.collectives import Axis, Ranks, enter, leave, reduce, tracked
from autoshard.sharding import DROPOUTS, Action

_SINGLE = {
    nn.Linear: "linear", nn.Conv1d: "conv1d", nn.Conv2d: "conv2d", nn.Conv3d: "conv3d",
    nn.ConvTranspose1d: "conv_transpose1d", nn.ConvTranspose2d: "conv_transpose2d",
    nn.ConvTranspose3d: "conv_transpose3d",
}  # fmt: skip
"""Layers whose result is that of one call of a function, with (input, weight, bias)."""
_BIASED = frozenset(_SINGLE.values())
_FRESH = {*_BIASED, "matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "addmm", "baddbmm", "sum"}
"""Functions whose result is new memory, which a sum over ranks may overwrite."""
_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


class Memo:
    """The tensors that have entered the cuts of one block in this forward: each enters once, whoever reads it.

    `given`: (as it was changed, as it was) of arguments that a module hands on.
    """

    __slots__ = ("entered", "given")

    def __init__(self) -> None:
        self.entered: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        self.given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter(self, tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
        """Return the alias of a tensor whose gradient is summed over ranks."""
        if not tracked(tensor):
            return tensor
        if torch.compiler.is_compiling():
            return enter(tensor, ranks)
        known = self.entered.get(id(tensor))
        if known is None or known[0] is not tensor or known[2] != tensor._version:
            known = self.entered[id(tensor)] = tensor, enter(tensor, ranks), tensor._version
        return known[1]

    def original(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a module was given where it hands a tensor on."""
        for changed, given in reversed(self.given):
            if tensor is changed:
                tensor = given
        return tensor

    def forget(self) -> None:
        """The forward is over."""
        self.entered.clear()
        self.given.clear()

    def __deepcopy__(self, memo: dict) -> "Memo":
        return Memo()


class Step:
    """One action, ready to be carried out. `where` names its place for messages."""

    __slots__ = ("action", "axis", "fresh", "kept", "memo", "paths", "ranks", "weight", "where")

    def __init__(self, action: Action, shares: tuple[int, ...], ranks: Ranks, memo: Memo, where: str) -> None:
        self.action = action
        self.ranks = ranks
        self.memo = memo
        self.where = where
        self.axis = Axis.of(ranks, action.axis, shares) if action.axis else None
        self.weight = shares[ranks.rank or 0] / sum(shares)
        self.paths: tuple[str, ...] = (action.argument,)
        self.fresh = action.function in _FRESH
        self.kept = False  # the module hands its argument on

    def before(self, arguments: tuple[tuple, dict]) -> tuple[tuple, dict]:
        """Act on the arguments of a call; one that was left out, or is None, needs nothing."""
        if self.action.kind == "enter":
            return self._changed(arguments, lambda tensor: self.memo.enter(tensor, self.ranks))
        if self.action.kind == "slice":
            return self._changed(arguments, self._slice)
        return arguments

    def _changed(self, arguments: tuple[tuple, dict], change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        for path in self.paths:
            tensor = tensor_at(arguments, path)
            if tensor is not None:
                changed = change(tensor)
                if self.kept and changed is not tensor:
                    self.memo.given.append((changed, tensor))
                return arguments if changed is tensor else replace_at(arguments, path, changed)
        return arguments

    def _slice(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self.axis is not None
        try:
            axis = self.axis.sized(tensor.shape[self.action.dim])
        except ValueError:
            raise ApplyError(
                f"{self.where} was given a tensor of shape {list(tensor.shape)}, and the plan is for "
                f"{self.axis.where.size} in dimension {self.action.dim}. Was it made before the model was cut?"
            ) from None
        return axis.take(self.memo.enter(tensor, self.ranks), self.action.dim)

    def _axis_of(self, part: torch.Tensor) -> Axis:
        """The axis of what this rank has a part of."""
        assert self.axis is not None
        try:
            return self.axis.sized_by_part(part.shape[self.action.dim])
        except ValueError:
            raise ApplyError(
                f"{self.where} has a tensor of shape {list(part.shape)}, and the plan is for {self.axis.width} on this "
                f"rank in dimension {self.action.dim}. Plan again with inputs like these."
            ) from None

    def after(self, result: Any) -> Any:
        """Act on the result of a call."""
        if self.action.kind == "restore":
            return map_tensors(result, self.memo.original)
        if self.action.kind not in ("reduce", "mean", "gather", "leave"):
            return result
        if not self.action.argument and isinstance(result, torch.Tensor):
            return self._after(result)
        tensor = tensor_at(result, self.action.argument)
        if tensor is None:
            raise ApplyError(
                f"{self.where} gave no tensor at {self.action.argument or 'its result'!r} this time, and the plan adds "
                "or gathers one there. Plan again with inputs like these."
            )
        return replace_at(result, self.action.argument, self._after(tensor))

    def _after(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.action.kind == "gather":
            return self._axis_of(tensor).gather(tensor, self.action.dim)
        if self.action.kind == "leave":
            return leave(tensor, self.ranks)
        if self.action.kind == "mean":
            return reduce(tensor * self.weight, self.ranks, fresh=True)
        return reduce(tensor, self.ranks, self.fresh)

    def around(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Act on one call of a torch function. Only the call itself is seen by the modes around this one."""
        if self.action.kind == "lookup":
            return self._lookup(call, args, kwargs)
        if self.action.kind == "dropout":
            return self._dropout(call, args, kwargs)
        with torch_private.no_overrides():
            args, kwargs = self.before((args, kwargs))
            addend, (args, kwargs) = self._without_addend(args, kwargs)
        result = call(*args, **kwargs)
        with torch_private.no_overrides():
            changed = self.after(result)
            if addend is not None:
                scale = kwargs.get("beta", 1)
                changed = changed + (addend if scale == 1 else addend * scale)
            # Not whatever is handed back: dropout that drops nothing returns what it was given.
            in_place = self.action.function.endswith("_")
            written = in_place and any(result is tensor for _, tensor in tensors_in((args, kwargs)))
            return result.copy_(changed) if written and changed is not result else changed

    def _without_addend(self, args: tuple, kwargs: dict) -> tuple[torch.Tensor | None, tuple[tuple, dict]]:
        """What is added once after the sum, shaped like it, and the arguments without it."""
        path = self.action.addend
        if not path:
            return None, (args, kwargs)
        if path == "0.2" and len(args) > 2 and self.action.function in _BIASED:  # the usual one, quickly
            return _broadcast(args[2], self.action.function, args), ((*args[:2], None, *args[3:]), kwargs)
        addend = tensor_at((args, kwargs), path)
        if addend is None:
            return None, (args, kwargs)
        without = replace_at((args, kwargs), path, torch.zeros_like(addend))
        return _broadcast(addend, self.action.function, args), without

    def _lookup(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """`embedding` with a table of which this rank has some rows."""
        given = dict(zip(_EMBEDDING, args, strict=False)) | kwargs
        if given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse"):
            raise ApplyError(
                f"{self.where} can't look up in a cut table with max_norm, scale_grad_by_freq or sparse gradients: "
                "they depend on which rows others look up. Plan with this table whole."
            )
        ids, padding = given["input"], given.get("padding_idx")
        with torch_private.no_overrides():
            assert self.axis is not None
            rows, missing = self.axis.rows(ids)
        found = call(rows, given["weight"])
        with torch_private.no_overrides():
            found = found.masked_fill(missing.unsqueeze(-1), 0)
            if padding is not None and tracked(found):  # the row that is never learned
                at = padding % self.axis.where.size
                found = torch.where((ids == at).unsqueeze(-1), found.detach(), found)
            return reduce(found, self.ranks, fresh=True)

    def _dropout(self, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Draw the mask of the whole tensor, as the model did before it was cut, and keep this rank's part of it."""
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
        if not given.get("training", given.get("train", True)):
            return call(*args, **kwargs)
        tensor = given["input"]
        with torch_private.no_overrides():
            axis = self._axis_of(tensor)
            whole = _ones_like(tensor, self.action.dim, axis.where.size)
        mask = call(whole, given.get("p", 0.5), True)
        with torch_private.no_overrides():
            mask = axis.take(mask, self.action.dim)
            return tensor.mul_(mask) if given.get("inplace") else tensor * mask


def _ones_like(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Ones in the shape of a tensor, but for one dimension, in the same order in memory: masks are drawn in it."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    shape = list(tensor.shape)
    shape[dim] = size
    return tensor.detach().new_ones([shape[at] for at in order]).permute([order.index(at) for at in range(len(order))])


def _broadcast(addend: torch.Tensor | None, function: str, args: tuple) -> torch.Tensor | None:
    """Shape what is added so that it broadcasts against the result: a convolution's bias belongs to the channels."""
    if addend is not None and function.startswith("conv") and len(args) > 1:
        return addend.view(-1, *[1] * (args[1].dim() - 2))
    return addend


Listed = dict[str, tuple[str, list[Step]]]
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
            return func(*args, **(kwargs or {}))
        name, steps = listed  # the name again: torch.compile can't count under what it was asked for
        occurrence = self.seen.get(name, 0)
        self.seen[name] = occurrence + 1
        call = func
        for step in steps:
            if step.action.occurrence in (-1, occurrence):
                call = functools.partial(step.around, call)
        return call(*args, **(kwargs or {}))


class Before:
    """Pre-hook: the steps on a module's arguments. Without gradients, nothing has to be done about what enters."""

    __slots__ = ("enters_only", "steps")

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)
        self.enters_only = all(step.action.kind == "enter" for step in steps)

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        if self.enters_only and not torch.is_grad_enabled():
            return None
        arguments = args, kwargs
        with torch_private.no_overrides():
            for step in self.steps:
                arguments = step.before(arguments)
        return arguments


class After:
    """Hook: the steps on a module's result."""

    __slots__ = ("steps",)

    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = tuple(steps)

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> Any:
        with torch_private.no_overrides():
            for step in self.steps:
                result = step.after(result)
        return result


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


class Forget:
    """Hook, also after an exception: a block has run, its tensors enter anew next time."""

    __slots__ = ("memo",)

    def __init__(self, memo: Memo) -> None:
        self.memo = memo

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        self.memo.forget()


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


def install(module: nn.Module, steps: Sequence[Step]) -> list[Any]:
    """Put the hooks for some steps on their module; returns the handles that take them off again."""
    at_call: list[Step] = []
    at_functions: Listed = {}
    for step in steps:
        if step.action.function and not _at_module(module, step.action):
            at_functions.setdefault(step.action.function, (step.action.function, []))[1].append(step)
        else:
            step.paths = _paths(module, step.action)
            at_call.append(step)
    for step in at_call:
        step.kept = any(other.action.kind == "restore" for other in at_call)
    handles: list[Any] = []
    before = [step for step in at_call if step.action.kind in ("enter", "slice")]
    after = [step for step in at_call if step.action.kind not in ("enter", "slice")]
    if before:
        handles.append(module.register_forward_pre_hook(Before(before), with_kwargs=True))
    if at_functions:
        handles.append(module.register_forward_pre_hook(Open(at_functions)))
        handles.append(module.register_forward_hook(Close(at_functions), always_call=True))
    if after:
        handles.append(module.register_forward_hook(After(after)))
    return handles


def _at_module(module: nn.Module, action: Action) -> bool:
    """Whether an action at a function call can as well be carried out at the call of the layer that makes it."""
    if _SINGLE.get(type(module)) != action.function or action.occurrence not in (-1, 0):
        return False
    if action.kind in ("enter", "slice"):
        return action.argument == "0.0" and getattr(module, "padding_mode", "zeros") == "zeros"
    return not action.argument and (not action.addend or getattr(module, "bias", None) is None)


def _paths(module: nn.Module, action: Action) -> tuple[str, ...]:
    """The paths under which a module may be given an argument: by its place and by its name.

    "0.1" or "1.mask"  ->  both of them        "1.mask.0"  ->  with the rest of the path
    """
    if action.kind not in ("enter", "slice"):
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
    if action.kind in ("slice", "gather", "lookup", "dropout") and not action.axis:
        problem = "says no axis"
    elif action.kind in ("lookup", "dropout") and not action.function:
        problem = "names no function"
    elif action.kind == "lookup" and action.function != "embedding":
        problem = f"is at {action.function!r}; only embedding can look up in a cut table"
    elif action.kind == "dropout" and action.function not in DROPOUTS:
        problem = f"is at {action.function!r}; only {', '.join(sorted(DROPOUTS))} can be drawn in parts"
    elif action.addend and (action.kind != "reduce" or not action.function):
        problem = "has an addend without being the sum of a function's results"
    if problem:
        raise PlanError(f"the {action.kind} action at {where} {problem}. Make the plan again.")

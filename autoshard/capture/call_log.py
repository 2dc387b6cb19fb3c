"""What a composite graph alone doesn't tell, and who runs parts of it must know: how modules were called, and what was
read out of tensors on the way.

    layer(x, mask, past=cache)         LoggedCall   args (Ref 7, Ref 3), kwargs {"past": the cache}      ran ops 20 … 45
    if mask.all(): …                   Reading      the value 3, bool, True, before op 12
    with torch.no_grad(): x * 2        an op without gradients
    Function.apply(x)                  LoggedCall    of a function of the user's: its backward is not in any graph

A `Ref` stands for a tensor: it is the number of its value. An `Opaque` stands for an object that has tensors.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch.utils.checkpoint import CheckpointFunction

from autoshard import nested
from autoshard.capture.decode import opaque_tensors
from autoshard.capture.functions import run_backward, run_forward
from autoshard.capture.guards import Guard, asking
from autoshard.capture.record import Recorder
from autoshard.errors import CaptureError
from autoshard.torch_private import no_modes


class Ref:
    """Stands for a tensor in arguments and outputs: the index of its value. A leaf, unlike a dataclass."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"Ref({self.value})"


class Opaque:
    """Stands for an object in which there are tensors, a cache say: what is noted of a run keeps none of them."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind


@dataclass(slots=True, kw_only=True)
class LoggedCall:
    """A call of a module, or of a user's autograd function (`function`), as it was made.

    Attributes:
        path: of the module; "" for a function as for the root.
        row: its row in `ModelGraph.calls`; of a function, that of the module that called it.
        begin, end: the ops it ran.
        args, kwargs: with refs in place of tensors; `output` too.
        grad, autocast: whether gradients and autocast were enabled.
        gradients: of a function whose backward was run after it, up to op `end_backward`: values that it was given,
            and per argument the one that it made, None without.
    """

    path: str
    row: int
    begin: int
    end: int = -1
    args: tuple = ()
    kwargs: dict[str, Any]
    output: Any = None
    function: Any = None
    grad: bool = True
    autocast: bool = False
    gradients: tuple[list[int], list[int | None]] | None = None
    end_backward: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueGuard:
    """Python took something out of tensors: `function(*args) == result`; op `begin` comes next, in call `row`.

    `assumed`: nothing was known, and this was taken to be so; then `function` is None. `guard`: an error is all that
    another answer would have led to.
    """

    row: int
    begin: int
    args: tuple = ()
    function: Any = None
    result: Any = None
    assumed: str = ""
    guard: Guard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Slices that code wrote of a tensor of this shape, before op `begin`: (dimension, slice)."""

    begin: int
    shape: tuple[int, ...]
    bounds: tuple[tuple[int, slice], ...]


class TooManyOps(CaptureError):
    """A run has more ops than it may have."""


class CallLog:
    """Notes all of this while a model is recorded. One run fills it; a second one starts anew.

    Attributes:
        calls: of modules, by row; `functions`: of autograd functions, in order of their end.
        op_grad, op_autocast: per op, whether gradients and autocast were enabled.
        drew: the forward drew random numbers of Python's or NumPy's own, which may decide what runs.
        left_out: ops whose values could have been known, but for their size.
        slices: parts of tensors as the code wrote them.
        hooked: values on whose gradients a hook was hung, and the line that did.
        failing: a guard that is told what it raises for, to see that nobody catches it.
        most_ops: with more of them the run is stopped by `TooManyOps`.
        histories: code that asks whether a tensor has a history is told so, and hooks on gradients are noted only.
        backwards: the backward of a user's autograd function is run after its forward.
    """

    def __init__(
        self, grad: bool, failing: Guard | None = None, most_ops: int | None = None, histories: bool = False,
        backwards: bool = False,
    ) -> None:  # fmt: skip
        self.grad = grad
        self.histories = histories
        self.backwards = backwards
        self.failing = failing
        self.most_ops = most_ops
        self._start()

    def _start(self) -> None:
        self.calls: dict[int, LoggedCall] = {}
        self.functions: list[LoggedCall] = []
        self.value_guards: list[ValueGuard] = []
        self.op_grad: list[bool] = []
        self.op_autocast: list[bool] = []
        self.drew = False
        self.left_out = 0
        self.slices: list[Slices] = []
        self.hooked: dict[int, str] = {}

    def begin(self, recorder: Recorder) -> None:
        """A run begins; what was noted of another one, which failed, is forgotten."""
        self._start()
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._random = _generators()
        recorder.call_log = self

    def note(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """A module is about to be called."""
        row = len(self._recorder.calls)
        self.calls[row] = self._begun(path, row, args, kwargs)

    def ended(self, row: int, output: Any) -> None:
        """The call of a module is over."""
        self._end(self.calls[row], output)
        self.drew |= not row and _generators() != self._random

    def _begun(self, path: str, row: int, args: tuple, kwargs: dict[str, Any], function: Any = None) -> LoggedCall:
        return LoggedCall(
            path=path, row=row, begin=self._recorder.log.now, args=self._refs(args), kwargs=self._refs(kwargs),
            function=function, grad=torch.is_grad_enabled(), autocast=_autocast(),
        )  # fmt: skip

    def _end(self, call: LoggedCall, output: Any) -> None:
        call.end, call.output = self._recorder.log.now, self._refs(output)

    def op(self) -> None:
        """An op was recorded."""
        if self.most_ops is not None and len(self.op_grad) >= self.most_ops:
            raise TooManyOps(f"it runs more than {self.most_ops} ops")
        self.op_grad.append(torch.is_grad_enabled())
        self.op_autocast.append(_autocast())

    def read(self, args: tuple, function: Callable[..., Any], result: Any) -> Any:
        """Python took `result` out of the tensors in `args`; returns what it is told."""
        row, begin = self._recorder.calls.current, self._recorder.log.now
        if isinstance(result, numpy.ndarray):
            result = result.copy()
        guard = asking(result)
        if guard is not None and guard == self.failing:
            return guard.failing
        self.value_guards.append(
            ValueGuard(row=row, begin=begin, args=self._refs(args), function=function, result=result, guard=guard)
        )
        return result

    def hook(self, tensor: torch.Tensor, line: str) -> None:
        """A hook is hung on the gradient of a tensor."""
        value = self._recorder.log.find(tensor)
        self.hooked.setdefault(-1 if value is None else value, line)

    def sliced(self, tensor: torch.Tensor, index: Any) -> None:
        """A part of a tensor is taken, or written: torch runs no op for a slice that is all there is."""
        found = tuple(_slices(tensor, index if isinstance(index, tuple) else (index,)))
        if found:
            self.slices.append(Slices(begin=self._recorder.log.now, shape=tuple(tensor.shape), bounds=found))

    def assumed(self, what: str) -> None:
        """Something was taken to be so without knowing."""
        recorder = self._recorder
        self.value_guards.append(ValueGuard(row=recorder.calls.current, begin=recorder.log.now, assumed=what))

    def let_go(self) -> None:
        """The run is over: keep none of its tensors, which objects among the arguments and outputs have by now."""
        for call in (*self.calls.values(), *self.functions):
            call.args, call.kwargs, call.output = map(_without_tensors, (call.args, call.kwargs, call.output))

    def call_function(self, cls: Any, apply: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call an autograd function, and note it if it is not torch's own."""
        if threading.get_ident() != self._thread or self._recorder.busy:
            return apply(*args, **kwargs)
        if cls is CheckpointFunction:  # what it runs is recorded as if it were not run twice
            return args[0](*args[2:])
        if cls.__module__.startswith("torch."):
            return apply(*args, **kwargs)
        call = self._begun("", self._recorder.calls.current, args, kwargs, function=cls)
        if not self.backwards or kwargs:
            output = apply(*args, **kwargs)
            self._end(call, output)
        else:
            output, context = run_forward(cls, args)
            self._end(call, output)
            with suppress(AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError):
                given, made = run_backward(cls, context, output)
                call.end_backward = self._recorder.log.now
                call.gradients = [self._ref(one).value for one in given], [self._value_of(one) for one in made]
        self.functions.append(call)
        return output

    def _value_of(self, gradient: Any) -> int | None:
        return self._ref(gradient).value if isinstance(gradient, torch.Tensor) else None

    def _refs(self, value: Any) -> Any:
        try:
            return nested.map_tensors(value, self._ref)
        except (AttributeError, TypeError, ValueError):  # a class that takes nothing but tensors (PackedSequence)
            return Opaque(type(value))

    def _ref(self, tensor: torch.Tensor) -> Any:
        value = self._recorder.log.find(tensor)
        if value is None:
            with no_modes():
                value = self._recorder.value_of(tensor)
        return Ref(value)


def _slices(tensor: torch.Tensor, index: tuple[Any, ...]) -> Iterator[tuple[int, slice]]:
    """The slices of an index that have an end, with the dimensions that they are of."""
    taken = [_dims_of(item) for item in index]
    left = tensor.dim() - sum(taken)
    dim = 0
    for item, dims in zip(index, taken, strict=True):
        if isinstance(item, slice) and isinstance(item.stop, int):
            yield dim, item
        dim += left if item is Ellipsis else dims


def _dims_of(item: Any) -> int:
    """How many dimensions an element of an index is about."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
    return item.dim() if mask else 1


def _without_tensors(value: Any) -> Any:
    """The same with `Opaque` for objects that have tensors."""

    def placeholder(_: str, leaves: list[Any]) -> Any:
        return Opaque(type(leaves[0])) if _has_tensors(leaves[0]) else leaves[0]

    held = any(_has_tensors(leaf) for _, leaf in nested.leaves_in(value))
    return nested.join_leaves([value], placeholder) if held else value


def _has_tensors(leaf: Any) -> bool:
    return not isinstance(leaf, Ref) and next(opaque_tensors(leaf), None) is not None


def _generators() -> tuple[Any, Any]:
    """The states of the random generators that torch knows nothing of, comparable."""
    state: Any = numpy.random.get_state()
    return random.getstate(), (state[0], state[1].tobytes(), *state[2:])


def _autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")

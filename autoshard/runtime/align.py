"""Watch the torch calls of a module in which devices meet, and bring their tensors together.

h (cuda:1) + residual (cuda:0)      ──▶  h + copy of residual on cuda:1
buffer.add_(update)                 ──▶  the update goes to the buffer, never the other way round
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard import torch_private
from autoshard.runtime.copies import Copies
from autoshard.runtime.devices import CPU
from autoshard.torch_private import version_of

_Tensor = torch.Tensor
_CROSSING: set[Any] = {
    _Tensor.to, _Tensor.copy_, _Tensor.type_as, _Tensor.expand_as, _Tensor.view_as, _Tensor.reshape_as,
    _Tensor.new_tensor, _Tensor.is_set_to, _Tensor.backward, _Tensor.register_hook,
    _Tensor.data.__set__, _Tensor.grad.__set__,  # type: ignore[attr-defined,union-attr]
    torch.autograd.grad, torch.autograd.backward, _Tensor.retain_grad,
}  # fmt: skip
"""Calls that take tensors of several devices as they are, or need the very objects they were given."""
_WRITING_OPERATORS = {"__setitem__", "__delitem__", "__iadd__", "__iand__", "__idiv__", "__ifloordiv__", "__ilshift__",
                      "__imod__", "__imul__", "__ior__", "__ipow__", "__irshift__", "__isub__", "__itruediv__",
                      "__ixor__"}  # fmt: skip
_WITH_BATCH_SIZES = {"_pack_padded_sequence", "_pad_packed_sequence", "lstm", "gru", "rnn_tanh", "rnn_relu"}
"""Calls with a packed sequence, whose lengths or batch sizes torch insists on having on the CPU."""


class Align(TorchFunctionMode):
    """While entered, every torch call whose tensors are on several devices runs on one of them.

    The target is the device of a tensor that the call writes; else `execution_devices[-1]`, that of the innermost
    mixed-device module, if it has a single one; else, of the devices of its tensors, the one that comes last
    in `stages`.
    """

    def __init__(self, copies: Copies, stages: Sequence[torch.device]) -> None:
        super().__init__()
        self.copies = copies
        self.rank = {device: index for index, device in enumerate(stages)}
        self.execution_devices: list[torch.device | None] = []

    def __enter__(self) -> "Align":
        self.thread = threading.get_ident()
        self.functions = torch_private.autograd_functions(self.apply)
        self.functions.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self.functions.__exit__(None, None, None)

    def apply(self, function: Any, apply: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Apply an `autograd.Function`, a call as any other: its backward must find what it saved on one device."""
        if threading.get_ident() != self.thread or not _mixes(args, kwargs):
            return apply(*args, **kwargs)
        return self.call(apply, args, kwargs)

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _CROSSING or not _mixes(args, kwargs):
            return func(*args, **kwargs)
        if getattr(func, "__name__", "") in _WITH_BATCH_SIZES and len(args) > 1 and _are_batch_sizes(args[1]):
            sizes, args = args[1], (args[0], None, *args[2:])
            return self.call(lambda first, _, *rest, **named: func(first, sizes, *rest, **named), args, kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Call `func` with all tensors on one device, and bring back what it writes into copies."""
        target = self._target(_written(func, args, kwargs), args, kwargs)
        if target is None:
            return func(*args, **kwargs)
        given = _Given(self.copies, target)
        args, kwargs = given.bring(args), given.bring(kwargs)
        result = func(*args, **kwargs)
        for source, copy, version in given.moved.values():
            if version_of(copy) != version:  # running statistics, say
                self.copies.write_back(source, copy)
        return result

    def _target(self, written: torch.Tensor | None, args: tuple, kwargs: dict) -> torch.device | None:
        if written is not None:
            return written.device
        if self.execution_devices and self.execution_devices[-1] is not None:
            return self.execution_devices[-1]
        found = {tensor.device for tensor in _tensors(args, kwargs) if not _travels_alone(tensor)}
        return max((device for device in found if device in self.rank), key=self.rank.__getitem__, default=None)


class _Given:
    """The arguments of one torch call, brought to `target`; a tensor given twice stays one object."""

    def __init__(self, copies: Copies, target: torch.device) -> None:
        self.copies, self.target = copies, target
        self.moved: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}

    def bring(self, value: Any) -> Any:
        """Rebuild an argument."""
        if isinstance(value, torch.Tensor):
            if value.device == self.target:
                return value
            if id(value) not in self.moved:
                new = self.copies.get(value, self.target)
                self.moved[id(value)] = value, new, version_of(new)
            return self.moved[id(value)][1]
        if isinstance(value, (tuple, list)):
            items = [self.bring(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if type(value) is dict:
            return {key: self.bring(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(*(self.bring(item) for item in (value.start, value.stop, value.step)))
        return value


def _travels_alone(tensor: torch.Tensor) -> bool:
    """Whether torch takes the tensor with those of any device: a number in a plain CPU tensor."""
    return tensor.dim() == 0 and tensor.device == CPU


def _are_batch_sizes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.int64 and value.dim() == 1 and value.device == CPU


def _mixes(args: tuple, kwargs: dict) -> bool:
    first, nested = None, False
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, torch.Tensor):
            device = value.device
            if first is None:
                if not _travels_alone(value):
                    first = device
            elif device != first and not _travels_alone(value):
                return True
        elif isinstance(value, (tuple, list, dict, slice)):
            nested = True
    if not nested:
        return False
    if len({tensor.device for tensor in _tensors(args, kwargs) if not _travels_alone(tensor)}) > 1:
        return True
    # torch.stack and its like take numbers of one device only, also in plain CPU tensors
    listed = {tensor.device for value in args if isinstance(value, (tuple, list)) for tensor in _tensors(value, {})}
    return len(listed) > 1


def _tensors(args: Any, kwargs: dict) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments of a torch call."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value, {})
        elif type(value) is dict:
            yield from _tensors((), value)
        elif isinstance(value, slice):
            yield from _tensors((value.start, value.stop, value.step), {})


def _written(func: Any, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Return the tensor that a torch call writes into, by torch's naming: `add_`, `__iadd__`, `__setitem__`, `out=`."""
    out = kwargs.get("out")
    if out is not None:
        return next(_tensors((out,), {}), None)
    name = getattr(func, "__name__", "").partition(".")[0]
    writes = (name.endswith("_") and not name.endswith("__")) or name in _WRITING_OPERATORS
    if writes or kwargs.get("inplace") is True:
        return next(_tensors(args, kwargs), None)
    return None

"""Where a device argument came from: `torch.arange(n, device=x.device)` runs wherever x is, whatever the plan.

During capture all tensors are on one device, so the device itself says nothing. The device of every tensor is an object
of its own (fake tensors have one, of others each read makes one); when that very object comes back in a factory call,
the factory is tied to the tensor.
"""

import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.capture.graph import HOST, UNKNOWN
from autoshard.capture.record import Recorder
from autoshard.torch_private import untracked_views

_DEVICE = torch.Tensor.device
_LITERALS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}
_MOVES = {torch.Tensor.to: None, torch.Tensor.cpu: HOST, torch.Tensor.cuda: UNKNOWN}


class DeviceSources(TorchFunctionMode):
    """Tells the recorder which tensor's device the factory being called was given."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types_: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__self__", None) is _DEVICE:
            return self._hand_out(args[0]) or func(*args)
        recorder = self._recorder
        before, begin = recorder.device_source, recorder.log.now
        recorder.device_source = self._source(func, args, kwargs)
        try:
            if func in _MOVES:
                return self._move(func, args, kwargs)
            result = func(*args, **kwargs)
            if func in _LITERALS:
                return self._placed_literal(result, args)
            if recorder.log.now > begin:
                recorder.note_function(begin, args, kwargs, _attends(func, kwargs))
            return result
        finally:
            recorder.device_source = before

    def _placed_literal(self, result: torch.Tensor, args: tuple) -> torch.Tensor:
        """`torch.tensor([…], device=x.device)`: torch makes it on the host; an alias records where it goes."""
        given = args[0] if args else None
        if self._recorder.device_source == HOST or result is given or result.requires_grad:
            return result
        return self._moved(result, self._recorder.device_source)

    def _hand_out(self, tensor: torch.Tensor) -> torch.device | None:
        """A device object that remembers the tensor it was read from; None for reads by torch and by capture itself."""
        recorder = self._recorder
        if recorder.busy or (value := recorder.log.find(tensor)) is None:
            return None
        device = torch.device("cpu")
        recorder.log.note_device(device, value)
        return device

    def _source(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> int:
        """The value whose device the call was given; HOST if it was given none."""
        if isinstance(func, types.FunctionType):
            return UNKNOWN  # Python code of torch: its reads of `.device` are not seen from here
        device = kwargs.get("device")
        if device is None:
            for item in args:  # for every call of every function
                if isinstance(item, torch.device):
                    device = item
                    break
        if device is None and func is torch.Tensor.new_tensor:
            found = self._recorder.log.find(args[0])
            return UNKNOWN if found is None else found
        if device is None:
            return HOST
        return self._recorder.log.value_of_device(device, UNKNOWN)

    def _move(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
        """`x.to(device)`: where nothing moves now, an alias records that something would."""
        recorder = self._recorder
        source = _MOVES[func] if _MOVES[func] is not None else self._destination(args, kwargs)
        if func is torch.Tensor.cuda:
            result = args[0]
        else:
            args = (args[0], *(torch.device("cpu") if _names_device(item) else item for item in args[1:]))
            kwargs = {**kwargs, "device": torch.device("cpu")} if kwargs.get("device") is not None else kwargs
            if source is not None:  # with a change of dtype it is an op, which goes where it was told
                recorder.device_source, recorder.moving = source, True
            try:
                result = func(*args, **kwargs)
            finally:
                recorder.moving = False
        if result is not args[0] or source is None:
            return result
        return self._moved(result, source)

    def _moved(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        recorder = self._recorder
        recorder.device_source, recorder.moving = source, True
        try:
            if torch.is_grad_enabled():
                return torch.ops.aten.alias.default(tensor)
            with untracked_views():  # a view holds its base, which a tensor that was moved away does not
                return torch.ops.aten.alias.default(tensor)
        finally:
            recorder.moving = False

    def _destination(self, args: tuple, kwargs: dict[str, Any]) -> int | None:
        """What `.to` was told to move to: a value whose device it is, HOST, UNKNOWN; None if only the dtype changes."""
        target = kwargs.get("device", kwargs.get("other"))
        if target is None:
            target = next((item for item in args[1:] if isinstance(item, torch.Tensor) or _names_device(item)), None)
        if target is None:
            return None
        if isinstance(target, torch.Tensor):
            found = self._recorder.log.find(target)
            return UNKNOWN if found is None else found
        return self._recorder.log.value_of_device(target, HOST if torch.device(target).type == "cpu" else UNKNOWN)


def _attends(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a function is attention that makes no weights which the model could see."""
    name = getattr(func, "__name__", "")
    inside = name == "multi_head_attention_forward" and not kwargs.get("need_weights", True)
    return inside or name == "scaled_dot_product_attention"


def _names_device(item: Any) -> bool:
    return isinstance(item, (str, torch.device)) or (isinstance(item, int) and not isinstance(item, bool))

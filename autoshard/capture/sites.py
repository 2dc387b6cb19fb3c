"""Where torch functions are called: places in a module's forward that a torch function mode finds again when it runs.

    block       linear(0)  child: [ linear(0)  relu(0) ]  linear(2)      name(occurrence) in the module it is called in

What a function calls itself is part of it, but for what is written out (`common.attention`). Ops outside of every
function have no place (`autograd.Function.apply`).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.hooks

from autoshard import nested
from autoshard.capture import user_code
from autoshard.capture.graph import SiteCall
from autoshard.capture.record import Recorder
from autoshard.capture.sources import DeviceSources
from autoshard.common.attention import written_out
from autoshard.common.source_lines import calling_line

PROPERTIES = ("__get__", "__set__", "__delete__")
"""Names of reads and writes of properties: not all of them are seen on fake tensors, so their counts mean nothing."""

_READS = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)
"""Methods that read values without running an op."""


_REQUIRES_GRAD = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
"""Nothing recorded has a history: code that asks for one is answered as where gradients are wanted."""
_SIZES = frozenset({
    "shape", "nbytes", "size", "numel", "nelement", "__len__", "stride", "storage", "untyped_storage",
})  # fmt: skip
"""What tells Python how large a tensor is."""


def _tells_size(func: Any, name: str) -> bool:
    return (getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name) in _SIZES


class Sites(DeviceSources):
    """Lists the calls of torch functions that run ops."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._found: list[dict[str, Any]] = []  # fields of a `SiteCall`, but for how many calls there are
        self.measured: set[tuple[int, int]] = set()
        self.exchanged: list[str] = []
        self._counts: Counter[tuple[int, str]] = Counter()  # calls of a function by (module call, name)

    def __torch_function__(self, func: Any, types_: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        recorder = self._recorder
        if recorder.busy or not recorder.calls.running:
            return super().__torch_function__(func, types_, args, kwargs)
        if (inside := written_out(func, args, kwargs)) is not None:
            with self:
                return inside()
        name, call_log = getattr(func, "__name__", str(func)), recorder.call_log
        if args and isinstance(args[0], torch.Tensor) and _tells_size(func, name):
            value = recorder.log.find(args[0])
            if value is not None:
                self.measured.add((value, recorder.calls.running[-1]))
        if call_log is not None and name in ("__getitem__", "__setitem__"):
            call_log.sliced(args[0], args[1])
        if call_log is not None and call_log.histories:
            if func is torch.Tensor.register_hook:
                call_log.hook(args[0], user_code.calling_line())
                return torch.utils.hooks.RemovableHandle(OrderedDict())
            if func == _REQUIRES_GRAD and args[0].is_floating_point():
                return torch.is_grad_enabled()
        if name in PROPERTIES:
            if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
                self.exchanged.append(user_code.calling_line())
            return super().__torch_function__(func, types_, args, kwargs)
        call, begin = recorder.calls.running[-1], recorder.log.now
        occurrence = self._counts[call, name]
        for row in recorder.calls.running:
            self._counts[row, name] += 1
        line = calling_line()
        result = super().__torch_function__(func, types_, args, kwargs)
        if func in _READS and call_log is not None:
            call_log.read(args[:1], func, result)
        if recorder.log.now > begin:
            self._found.append({
                "call": call, "function": name, "occurrence": occurrence, "begin": begin, "end": recorder.log.now,
                "inputs": tuple(self._values((args, kwargs or {}))), "outputs": tuple(self._values(result)),
                "line": line,
            })  # fmt: skip
        return result

    def found(self) -> tuple[SiteCall, ...]:
        """The calls, when the run is over and all are counted."""
        return tuple(SiteCall(**site, calls=self._counts[site["call"], site["function"]]) for site in self._found)

    def _values(self, arguments: Any) -> Iterator[tuple[str, int]]:
        for path, tensor in nested.tensors_in(arguments):
            value = self._recorder.log.find(tensor)
            if value is not None:
                yield path, value

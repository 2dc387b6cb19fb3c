"""The same lanes from a real run: when every module with tensors of its own worked, by the clocks of its devices.

    with measuring(model) as taken:
        model(x)
    taken()       events, seconds from the begin; waits until all devices are done

On an accelerator the clock is its own: events in its stream, from one that was recorded when all devices were idle. On
the CPU, where ops end before the next begins, it is that of the process. What a module's call waits for, copies of its
arguments above all, is not part of it: hooks of autoshard run before.
"""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard.capture.backward import training_loss
from autoshard.capture.inputs import as_call, derive_inputs
from autoshard.engine.estimate import Event
from autoshard.plan import Plan
from autoshard.runtime import apply_plan
from autoshard.workload import Workload

_WARM_UP = 2
Taken = Callable[[], tuple[Event, ...]]


@dataclass(slots=True)
class _Clocks:
    """A mark per moment: seconds on the CPU, an event of the stream elsewhere."""

    begin: float = 0.0
    zero: dict[torch.device, Any] = field(default_factory=dict)
    open: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    spans: list[tuple[str, str, torch.device, Any, Any]] = field(default_factory=list)

    def start(self, devices: set[torch.device]) -> None:
        for device in devices:
            _wait(device)
        self.begin = time.perf_counter()
        self.zero = {device: self.mark(device) for device in devices if device.type != "cpu"}

    def mark(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device))
        return event

    def enter(self, path: str, kind: str, device: torch.device) -> None:
        self.open.setdefault((path, kind), []).append(self.mark(device))

    def leave(self, path: str, kind: str, device: torch.device) -> None:
        marks = self.open.get((path, kind))
        if marks:  # a backward may begin where no input of the module needs a gradient: it has no end then
            self.spans.append((path, kind, device, marks.pop(), self.mark(device)))

    def seconds(self, device: torch.device, mark: Any) -> float:
        if device.type == "cpu":
            return mark - self.begin
        return self.zero[device].elapsed_time(mark) / 1e3

    def events(self) -> tuple[Event, ...]:
        for device in self.zero:
            _wait(device)
        found = [
            Event(
                device=str(device), kind=kind, begin_seconds=self.seconds(device, begin),
                end_seconds=self.seconds(device, end), label=path,
            )
            for path, kind, device, begin, end in self.spans
        ]  # fmt: skip
        return tuple(sorted(found, key=lambda event: (event.begin_seconds, -event.end_seconds)))


def measure_pass(model: nn.Module, inputs: Any, workload: Workload, plan: Plan) -> tuple[Event, ...]:
    """Apply a plan to a model with weights, run it twice, and measure a third pass; devices must be here.

    A training pass is forward and backward. Raises what applying raises, and `CaptureError` for inputs that don't fit.
    """
    calls = derive_inputs(model, workload) if inputs is None else [as_call(inputs, model)]
    args, kwargs = calls[0]
    apply_plan(model.train(workload.training), plan)

    def step() -> None:
        with torch.set_grad_enabled(workload.training):
            output = model(*args, **kwargs)
            if workload.training:
                training_loss(output, type(model).__name__).backward()

    for _ in range(_WARM_UP):
        step()
    with measuring(model, backward=workload.training) as taken, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # of modules whose input is integers
        step()
    return taken()


@contextmanager
def measuring(model: nn.Module, *, backward: bool = False) -> Iterator[Taken]:
    """Note when every module with tensors of its own runs; give what returns the events.

    `backward` too: torch then gives modules views of their inputs, which they must not write into.
    """
    clocks = _Clocks()
    handles = []
    devices = set()
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if path and own and own[0].device.type != "meta":
            devices.add(own[0].device)
            handles += _hooks(clocks, module, path, own[0].device, backward)
    clocks.start(devices)
    try:
        yield clocks.events
    finally:
        for handle in handles:
            handle.remove()


def _hooks(clocks: _Clocks, module: nn.Module, path: str, device: torch.device, backward: bool) -> list[Any]:
    def enter(kind: str) -> Callable[..., None]:
        return lambda *_: clocks.enter(path, kind, device)

    def leave(kind: str) -> Callable[..., None]:
        return lambda *_: clocks.leave(path, kind, device)

    found = [
        module.register_forward_pre_hook(enter("forward")),
        module.register_forward_hook(leave("forward"), prepend=True),
    ]
    if backward:
        found.append(module.register_full_backward_pre_hook(enter("backward")))
        found.append(module.register_full_backward_hook(leave("backward")))
    return found


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

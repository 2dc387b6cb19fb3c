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
from typing import Any

import torch
from torch import nn

from autoshard.capture.backward import training_loss
from autoshard.capture.capture import calls_of
from autoshard.engine.estimate import Event
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.runtime.dispatch import apply_plan

_WARM_UP = 2
Taken = Callable[[], tuple[Event, ...]]


def measure_pass(model: nn.Module, inputs: Any, workload: Workload, plan: Plan) -> tuple[Event, ...]:
    """Apply a plan to a model with weights, run it twice, and measure a third pass; devices must be here.

    A training pass is forward and backward. Raises what applying raises, and `CaptureError` for inputs that don't fit.
    """
    args, kwargs = calls_of(model, inputs, workload)[0]
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
    spans: list[tuple[str, str, torch.device, Any, Any]] = []
    running: dict[tuple[str, str], list[Any]] = {}
    handles = []
    devices = set()

    def hooks(path: str, kind: str, device: torch.device) -> tuple[Callable[..., None], Callable[..., None]]:
        begins = running.setdefault((path, kind), [])

        def leave(*_: Any) -> None:
            if begins:  # a backward may begin where no input of the module needs a gradient: it has no end then
                spans.append((path, kind, device, begins.pop(), _mark(device)))

        return lambda *_: begins.append(_mark(device)), leave

    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if path and own and own[0].device.type != "meta":
            devices.add(own[0].device)
            enter, leave = hooks(path, "forward", own[0].device)
            handles.append(nn.Module.register_forward_pre_hook(module, enter))
            handles.append(nn.Module.register_forward_hook(module, leave, prepend=True))
            if backward:
                enter, leave = hooks(path, "backward", own[0].device)
                handles.append(nn.Module.register_full_backward_pre_hook(module, enter))
                handles.append(nn.Module.register_full_backward_hook(module, leave))
    for device in devices:
        _wait(device)
    zero = {device: _mark(device) for device in devices}

    def taken() -> tuple[Event, ...]:
        for device in devices:
            _wait(device)
        found = [
            Event(
                device=str(device), kind=kind, begin_seconds=_seconds(zero[device], begin),
                end_seconds=_seconds(zero[device], end), label=path,
            )
            for path, kind, device, begin, end in spans
        ]  # fmt: skip
        return tuple(sorted(found, key=lambda event: (event.begin_seconds, -event.end_seconds)))

    try:
        yield taken
    finally:
        for handle in handles:
            handle.remove()


def _mark(device: torch.device) -> Any:
    """A moment: seconds on the CPU, an event of the stream elsewhere."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device=device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1e3


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

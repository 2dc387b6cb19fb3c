"""Modules whose parameters are on their device only while they run; between calls they are in CPU memory or in a file.

    cuda:0   embed ─▶ layer 0 ─▶ layer 1 ─▶ layer 2 … ─▶ head        two of the layers at a time: the one that computes
                        ▲          ▲          ▲                      and the one that is expected next
    cpu      …      layer 0    layer 1    layer 2 …                  stored, where state_dict and save find them

Before a offloaded module runs, its parameters (the same objects) are given the memory of copies, and their own again
after it. Which one is next is what came next the last time; at first, the order of the plan. A wrong guess costs time,
nothing else. Copies that were made in one run of the model are never used in another: code between runs may write to
parameters in ways that leave no trace (`.data`: adapters are merged that way).

Copies are never written over: each bringing is a fresh allocation, so what the module keeps, or returns, of its
parameters (a view, what autograd saves) stays what it is.
"""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.errors import ApplyError
from autoshard.nested import tensors_in
from autoshard.runtime.around import surround
from autoshard.runtime.copies import Copies
from autoshard.runtime.devices import CPU
from autoshard.runtime.moves import set_data
from autoshard.runtime.pinned import lock_for, pin
from autoshard.runtime.prefetcher import Carrier, LoadFuture
from autoshard.torch_private import version_of

SLOTS = 2
"""Modules whose copies are on a device at a time, as planned."""


@dataclass(slots=True)
class Slot:
    """What is being brought, or is there, for one module.

    Attributes:
        future: of the carrier.
        run: in which it began, None if outside of any.
        uses: stream that has computed with the copies -> an event behind that.
    """

    future: LoadFuture
    run: int | None
    uses: dict[Any, Any] = field(default_factory=dict)


class Streamer:
    """The offloaded modules of one device; `units`: path -> parameters, in the order in which they should run.

    One thread at a time has the parameters of a module: they are one object for all.
    """

    def __init__(self, device: torch.device, units: Mapping[str, list[nn.Parameter]]) -> None:
        self.device = device
        self.units = dict(units)
        self.carrier = Carrier(device)
        self.slots: dict[str, Slot] = {}
        self.running: list[str] = []
        self.next = dict(itertools.pairwise(units))
        self.last: tuple[str, int | None] | None = None
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def present(self, path: str, module: nn.Module, run: int | None) -> Iterator[None]:
        """Inside, a module's parameters are on the device, and those of the next are on their way."""
        with self.lock:
            if path not in self.units:  # the first time in a copy of a model
                self.units[path] = list(module.parameters())
            if path in self.running:  # the module calls itself
                yield
                return
            if self.last is not None and self.last[1] == run is not None:
                self.next[self.last[0]] = path
            self.last = path, run
            copies = self._copies(path, run)
            self._begin_next(path, run)
            self.running.append(path)
            try:
                with _installed(self.units[path], copies):
                    yield
            finally:
                self.running.remove(path)
                self.slots[path].uses.update(self.carrier.used())
                if self.next.get(path) != path:  # one that runs several times in a row stays
                    self._drop(path)

    def close(self) -> None:
        """Let go of all copies."""
        with self.lock:
            for path in list(self.slots):
                self._drop(path)
            self.last = None

    def _copies(self, path: str, run: int | None) -> list[torch.Tensor]:
        """The copies of a module's parameters, brought ahead of time or now."""
        slot = self.slots.get(path)
        if slot is not None and self.carrier.copies and (run is None or run != slot.run):  # written to since, perhaps
            self._drop(path)
        if path in self.slots:
            with contextlib.suppress(Exception):  # what went wrong ahead of time is tried again, and counts then
                return self.carrier.take(self.slots[path].future)
            self._drop(path)
        self._drop_others(path)
        try:
            return self.carrier.take(self._begin(path, run).future)
        except BaseException:
            if path in self.slots:
                self._drop(path)
            raise

    def _begin_next(self, path: str, run: int | None) -> None:
        following = self.next.get(path)
        if following is not None and following not in self.slots and (run is not None or not self.carrier.copies):
            self._drop_others(path)
            if len(self.slots) < SLOTS:
                with contextlib.suppress(torch.OutOfMemoryError, ApplyError):
                    self._begin(following, run)  # it is tried again when the module runs, and counts then

    def _begin(self, path: str, run: int | None) -> Slot:
        parameters = self.units[path]
        for parameter in parameters:
            if parameter.device != CPU:
                raise ApplyError(
                    f"this model was moved after autoshard.apply: parameters of {path}, which are kept in CPU memory "
                    f"or on disk between its calls, are on {parameter.device}. Call autoshard.remove(model) before "
                    "moving a model, or apply the plan again."
                )
        with torch.inference_mode(False), torch.no_grad():
            future = self.carrier.begin([parameter.detach() for parameter in parameters])
        slot = self.slots[path] = Slot(future, run)
        return slot

    def _drop_others(self, path: str) -> None:
        """Let go of what was brought for modules that did not come."""
        for other in [other for other in self.slots if other not in (path, *self.running)]:
            self._drop(other)

    def _drop(self, path: str) -> None:
        slot = self.slots.pop(path)
        self.carrier.done(slot.future, slot.uses)


@contextlib.contextmanager
def _installed(parameters: Sequence[nn.Parameter], copies: Sequence[torch.Tensor]) -> Iterator[None]:
    """Inside, parameters have the memory of their copies, if there are any."""
    execution_devices: list[tuple[nn.Parameter, torch.Tensor, torch.Tensor | None, int]] = []
    try:
        with torch.inference_mode(False), torch.no_grad():
            for parameter, copy in zip(parameters, copies, strict=False):
                execution_devices.append((parameter, parameter.detach(), parameter.grad, version_of(parameter)))
                parameter.grad = None  # torch wants it where its parameter is
                set_data(parameter, copy)
                execution_devices[-1] = (*execution_devices[-1][:3], version_of(parameter))
        del copies
        yield
    finally:
        with torch.inference_mode(False), torch.no_grad():
            for parameter, execution_device, grad, version in execution_devices:
                if version_of(parameter) != version:  # the forward wrote to it
                    execution_device.copy_(parameter)
                set_data(parameter, execution_device)
                parameter.grad = grad if parameter.grad is None else parameter.grad


class Streams:
    """All offloaded modules of one applied model: path -> device they compute on; shared by their hooks.

    `devices` is in the order in which they run. `model`: where their parameters are known before they do.
    """

    def __init__(self, devices: Mapping[str, torch.device], model: nn.Module | None = None) -> None:
        self.devices = dict(devices)
        self.copies: Copies | None = None  # of the applied model: it counts runs
        units: dict[torch.device, dict[str, list[nn.Parameter]]] = {device: {} for device in devices.values()}
        for path, device in devices.items():
            if model is not None:
                units[device][path] = list(model.get_submodule(path).parameters())
        self.streamers = {device: Streamer(device, found) for device, found in units.items()}

    def __reduce__(self) -> tuple:  # a deep copy or a saved model looks for its own parameters
        return Streams, (self.devices,)

    def pin(self) -> None:
        """Lock the memory that is copied to GPUs, where there are any."""
        for device, streamer in self.streamers.items():
            lock = lock_for(device)
            if lock is not None:
                pin([parameter for found in streamer.units.values() for parameter in found], lock)

    @property
    def run(self) -> int | None:
        """Which run of the model this is, None outside of any: between two runs, other code may write to parameters."""
        return self.copies.runs if self.copies is not None and self.copies.in_run else None

    def close(self) -> None:
        """Give every parameter its stored memory back and release all copies."""
        for streamer in self.streamers.values():
            streamer.close()


def _run_offloaded(
    streams: Streams, path: str, module: nn.Module, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Around the forward of an offloaded module: its parameters are there while it runs."""
    streamer = streams.streamers[streams.devices[path]]
    with contextlib.ExitStack() as present:
        with torch_private.no_overrides():  # who counts the functions that the model calls does not count these
            present.enter_context(streamer.present(path, module, streams.run))
        try:
            output = forward(*args, **kwargs)
        finally:
            with torch_private.no_overrides():
                present.close()
    if torch.is_grad_enabled() and streamer.device != CPU:
        _refuse_gradients(output, path)
    return output


def _refuse_gradients(output: Any, path: str) -> None:
    """Let a backward that comes here say why it can't go on: the copies it would need are gone."""

    def refuse(gradient: torch.Tensor) -> None:
        raise ApplyError(
            f"no gradients through {path!r}: the plan keeps its parameters off its device between calls (offload), "
            "which is for inference. For training, plan with enough device memory for all of the model."
        )

    for _, tensor in tensors_in(output):
        if tensor.requires_grad:
            tensor.register_hook(refuse)


def hook_streams(modules: Mapping[str, nn.Module], streams: Streams) -> None:
    """Let the offloaded modules have their parameters while they run."""
    for path in streams.devices:
        surround(modules[path], partial(_run_offloaded, streams, path))

"""What the hooks of one applied model share: copies, calls in progress, and what is known of the model's tree."""

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.common.module_paths import above
from autoshard.errors import ApplyError
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis
from autoshard.runtime.align import Align
from autoshard.runtime.copies import Copies
from autoshard.runtime.devices import resolve_device
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.resting import offloaded_module
from autoshard.runtime.streaming import Streams


class _Local(threading.local):
    """Per thread: where outputs of the guarded calls in progress go (None: they stay), innermost last; the watcher, if
    any; and whether a call is divided.
    """

    def __init__(self) -> None:
        self.calls: list[torch.device | None] = []
        self.watcher: Align | None = None
        self.divides = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How calls of the model are divided, into micro-batches or over replicas.

    `count`: into how many, one after another through the devices. `devices`: of replicas, which run at the same time;
    `shares` as in `Mesh`.
    """

    batch: BatchAxis
    count: int
    devices: tuple[torch.device, ...] = ()
    shares: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What was applied, and what the model was before.

    Attributes:
        placements: name of each parameter and buffer -> device name the plan gives it; `devices`: where it lives, or
            computes.
        originals: name -> device it was on before apply.
        execution_devices: module path -> name of the device that it runs on.
        conservative: no graph was looked at: any module may mix devices and write into its arguments.
        division: how its batch is divided, None if it is not.
        recomputed: paths of modules whose activations are computed again in backward.
        placed: devices the plan uses, in the order of stages; `sentinels`: (name, tensor, device), one tensor on each.
    """

    plan: Plan
    placements: Mapping[str, str]
    devices: Mapping[str, torch.device]
    originals: Mapping[str, torch.device]
    execution_devices: Mapping[str, str]
    conservative: bool
    division: Division | None
    recomputed: tuple[str, ...]
    placed: tuple[torch.device, ...]
    sentinels: tuple[tuple[str, torch.Tensor, torch.device], ...]


class Runtime:
    """The shared state of one applied model's hooks; owned by the hook of its root.

    `handles`: of other hooks. `model`: refers to the root.
    """

    def __init__(self, record: Record, streams: Streams, model: nn.Module | None = None) -> None:
        self.record, self.streams = record, streams
        self.model = None if model is None else weakref.ref(model)
        self.handles: list[Any] = []
        self.unfused = False  # see `boundaries.leaves_fused`
        self.copies = streams.copies = Copies()
        self.local = _Local()

    def __reduce__(self) -> tuple:  # a deep copy or a saved model starts without copies and calls
        return Runtime, (self.record, self.streams), {"handles": self.handles, "unfused": self.unfused}

    def root(self) -> nn.Module | None:
        """The applied model; None in a copy of it that was not called yet."""
        return None if self.model is None else self.model()

    def check_moved(self) -> None:
        """Raise `ApplyError` if the model was moved behind autoshard's back."""
        for name, tensor, device in self.record.sentinels:
            if tensor.device != device:
                raise ApplyError(
                    f"this model was moved after autoshard.apply: {name} is on {tensor.device}, the plan put it on "
                    f"{device}. Call autoshard.remove(model) before moving a model, or apply the plan again."
                )

    def check_replaced(self, model: nn.Module) -> None:
        """Raise `ApplyError` if a tensor is elsewhere than planned: it was added or replaced since apply."""
        record = self.record
        for name, tensor in named_tensors(model).items():
            if offloaded_module(name, record.plan.offloaded) is not None:
                continue
            execution_device = next(
                (record.execution_devices[path] for path in above(name) if path in record.execution_devices),
                record.execution_devices[""],
            )
            device = record.devices[name] if name in record.devices else resolve_device(execution_device)
            if tensor.device != device:
                raise ApplyError(
                    f"{name} is on {tensor.device}, and its module is on {device}: it was added, replaced or tied "
                    f"after autoshard.apply. Move it to {device}, or change the model before autoshard.apply."
                )

    def end_run(self) -> None:
        """End a run, unless this call of the root was inside of another one."""
        if not self.local.calls:
            self.copies.end()

    @contextmanager
    def watching(self, target: torch.device | None) -> Iterator[None]:
        """Inside, the torch calls of this thread are watched, with `target` for those that mix devices."""
        outer = self.local.watcher
        watcher = self.local.watcher = outer or Align(self.copies, self.record.placed)
        watcher.execution_devices.append(target)
        try:
            with nullcontext() if outer else watcher:
                yield
        finally:
            watcher.execution_devices.pop()
            self.local.watcher = outer

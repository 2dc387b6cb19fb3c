"""What the hooks of one applied model share: copies, calls in progress, and what is known of the model's tree."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.batching import BatchAxis
from autoshard.errors import ApplyError
from autoshard.runtime.align import Align
from autoshard.runtime.copies import Copies
from autoshard.runtime.streaming import Streams


@dataclass(slots=True)
class Call:
    """A guarded module call in progress, made by the Python frame `frame`; `copied` is its moved arguments. `parts` is
    of a call that runs in parts of its batch (see `microbatches.py`).

    The frame is held, not its id: a frame that an interrupt ended would soon have its id taken by another.
    """

    hook: Any
    frame: Any
    watching: Align | None = None
    unfused: bool = False
    previous_device: int | None = None
    copied: list[tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    output_device: torch.device | None = None
    parts: Any = None


class _Local(threading.local):
    """Per thread: the guarded calls in progress, innermost last, and the watcher, if any."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.watcher: Align | None = None


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
        placements: name of each parameter and buffer -> device name the plan gives it; `devices`: where it lives.
        originals: name -> device it was on before apply.
        homes: module path -> device name of its home.
        aligned, written_back: as in the plan; `conservative`: no graph was looked at: any module may be each.
        streamed: path of a module -> "cpu" or "disk", where its parameters are between its calls, as in the plan; their
            `devices` are those they compute on.
        division: how its batch is divided, None if it is not.
        recomputed: paths of modules whose activations are computed again in backward.
        placed: devices the plan uses, in the order of stages; `sentinels`: (name, tensor, device), one tensor on each.
    """

    placements: Mapping[str, str]
    devices: Mapping[str, torch.device]
    originals: Mapping[str, torch.device]
    homes: Mapping[str, str]
    aligned: frozenset[str]
    written_back: frozenset[str]
    conservative: bool
    streamed: Mapping[str, str]
    division: Division | None
    recomputed: tuple[str, ...]
    placed: tuple[torch.device, ...]
    sentinels: tuple[tuple[str, torch.Tensor, torch.device], ...]


class Runtime:
    """The shared state of one applied model's hooks; owned by the hook of its root."""

    def __init__(self, record: Record, streams: Streams) -> None:
        self.handles: list[Any] = []
        self.hooked: set[str] = set()  # paths; the hooks themselves refer to this object and must not be referred to
        self.record = record
        self._start()
        self.stream_with(streams)

    def _start(self) -> None:
        self.copies = Copies()
        self.unfused = False  # see `boundaries.leaves_fused`
        self.local = _Local()

    def __getstate__(self) -> dict[str, Any]:  # a deep copy or a saved model starts without copies and calls
        names = ("record", "handles", "hooked", "streams", "unfused")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.handles, self.hooked, self.record = state["handles"], state["hooked"], state["record"]
        self._start()
        self.unfused = state["unfused"]
        self.stream_with(state["streams"])

    def stream_with(self, streams: Streams) -> None:
        """Take these streamed modules, and let them know of runs."""
        self.streams = streams
        streams.copies = self.copies

    def hook_on(self, module: nn.Module) -> Any:
        """Return this model's hook on a module, None if it has none."""
        hooks = torch_private.forward_pre_hooks(module)
        return next((hook for hook in hooks if getattr(hook, "runtime", None) is self), None)

    def check_moved(self) -> None:
        """Raise `ApplyError` if the model was moved behind autoshard's back."""
        for name, tensor, device in self.record.sentinels:
            if tensor.device != device:
                raise ApplyError(
                    f"this model was moved after autoshard.apply: {name} is on {tensor.device}, the plan put it on "
                    f"{device}. Call autoshard.remove(model) before moving a model, or apply the plan again."
                )

    def watch(self, call: Call, target: torch.device | None) -> None:
        """Watch the torch calls of this thread until `unwatch`, with `target` for those that mix devices."""
        watcher = self.local.watcher
        if watcher is None:
            watcher = self.local.watcher = Align(self.copies, self.record.placed)
            watcher.__enter__()
        watcher.homes.append(target)
        call.watching = watcher

    def unwatch(self, call: Call) -> None:
        """Undo what `watch` did for this call."""
        if call.watching is not None:
            watcher = call.watching
            watcher.homes.pop()
            if not watcher.homes:
                self.local.watcher = None
                watcher.on = False
                if torch_private.innermost_function_mode() is watcher:
                    watcher.__exit__(None, None, None)

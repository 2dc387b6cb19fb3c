"""How the parameters of one module come to the device they compute on, one module ahead.

    a GPU                a thread copies on a stream of its own; the computing stream waits for it (`pinned`)
    the CPU, from disk   a thread touches the pages of the file, and nothing is copied
    a simulated device   copied when asked for

`begin` starts, `take` waits and gives what is to be used instead of each parameter, `done` ends. Each thread that
computes with them takes them, and says so when it has: threads may have streams of their own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.common.packed import stored_tensors
from autoshard.runtime.devices import CPU, copy_tensor, is_accelerator, make_current
from autoshard.runtime.mapped import bring
from autoshard.runtime.pinned import Uploads, has_streams


@dataclass(slots=True)
class _Load:
    """Copies on a device; `ready` is recorded behind the copying, None where nothing is queued."""

    copies: list[torch.Tensor]
    ready: Any = None


LoadFuture = Future[_Load]


class Carrier:
    """Brings parameters to a device; calls come from one thread at a time.

    On a GPU copies are allocated on a stream of their own, and the thread lets go of them only when the kernels that
    use them have run. So their memory is there for the next ones at once, and no more of it is taken than there are
    modules in flight; the allocator alone would keep it until all that is queued by then has run.
    """

    def __init__(self, device: torch.device, *, by_stream: bool | None = None) -> None:
        self.device = device
        self.by_stream = has_streams(device) if by_stream is None else by_stream
        self.copies = device != CPU or self.by_stream
        self.uploads = Uploads([device] if self.by_stream else [])
        self.module = torch.get_device_module(device.type)
        ahead = self.by_stream or not self.copies
        self.thread = ThreadPoolExecutor(1, "autoshard-bring", initializer=self._start) if ahead else None

    def _start(self) -> None:
        """Begin the thread: its device is the current one in it."""
        if self.by_stream:
            make_current(self.device)

    def begin(self, stored: Sequence[torch.Tensor]) -> LoadFuture:
        """Start to bring tensors; returns a future."""
        if self.thread is not None:
            return self.thread.submit(self._load, list(stored))
        future: LoadFuture = Future()
        future.set_result(self._load(list(stored)))
        return future

    def take(self, future: LoadFuture) -> list[torch.Tensor]:
        """Wait until they are there, and return their copies, if any are made; raises what went wrong on the way."""
        load = future.result()
        if load.ready is not None:
            self.module.current_stream(self.device).wait_event(load.ready)
        return list(load.copies)

    def used(self) -> dict[Any, Any]:
        """The current stream of the caller, which computed with them -> an event behind that, if there are streams."""
        if not self.by_stream:
            return {}
        stream, event = self.module.current_stream(self.device), self.module.Event()
        event.record(stream)
        return {stream: event}

    def done(self, future: LoadFuture, uses: Mapping[Any, Any]) -> None:
        """They are not needed any more; `uses`: the last event of each stream that computed with them."""
        if future.cancel():
            return
        if not self.by_stream or self.thread is None:
            if future.done() and future.exception() is None:
                future.result().copies.clear()
            return
        if is_accelerator(self.device):
            for copy in (part for whole in future.result().copies for part in stored_tensors(whole)):
                for stream in uses:  # a view of it may go on; its memory must outlast the kernels
                    copy.record_stream(stream)
        self.thread.submit(_free, future, list(uses.values()))

    def _load(self, stored: Sequence[torch.Tensor]) -> _Load:
        bring(stored)
        if not self.copies:
            return _Load([])
        with torch.inference_mode(False), torch.no_grad():
            if not self.by_stream:
                return _Load([copy_tensor(tensor, self.device) for tensor in stored])
            stream = self.uploads.streams[self.device]
            with self.module.stream(stream):
                copies = [self.uploads.copy(tensor, self.device) for tensor in stored]
                ready = self.module.Event()
                ready.record(stream)
            return _Load(copies, ready)


def _free(future: LoadFuture, events: Sequence[Any]) -> None:
    """Let go of copies, in the thread that makes the next ones, when the device has computed with them."""
    if future.exception() is None:
        for event in events:
            event.synchronize()
        future.result().copies.clear()

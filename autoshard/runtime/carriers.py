"""How the parameters of one module come to the device they compute on, one module ahead, by the kind of device.

    CopyNow      a device without streams (a simulated one): copied when asked for
    CopyAhead    a GPU: a thread copies on a stream of its own; the computing stream waits for it (`pinned`)
    TouchAhead   the CPU, from disk: a thread touches the pages of the file, and nothing is copied

`begin` starts, `take` waits and gives what is to be used instead of each parameter, `done` ends. Each thread that
computes with them takes them, and says so when it has: threads may have streams of their own.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from autoshard.runtime.devices import CPU, copy_tensor
from autoshard.runtime.mapped import bring
from autoshard.runtime.pinned import CopyAhead, has_streams


class Carrier(Protocol):
    """What a streamer asks of it; calls come from one thread at a time."""

    copies: bool
    """Whether copies are computed with, which do not see what is written to the parameters later."""

    def begin(self, homes: Sequence[torch.Tensor]) -> Any:
        """Start to bring tensors; returns a ticket."""

    def take(self, ticket: Any) -> list[torch.Tensor]:
        """Wait until they are there, and return their copies, if any are made; raises what went wrong on the way."""

    def used(self) -> "tuple[Any, Any] | None":
        """The current stream of the caller, which computed with them, and an event behind that; None without any."""

    def done(self, ticket: Any, uses: Mapping[Any, Any]) -> None:
        """They are not needed any more; `uses`: the last event of each stream that computed with them."""


def carrier_for(device: torch.device) -> Carrier:
    """Choose by what the device can do."""
    if device == CPU:
        return TouchAhead()
    return CopyAhead(device) if has_streams(device) else CopyNow(device)


@dataclass(frozen=True, slots=True)
class CopyNow:
    """Copies when asked to, in the thread that asks."""

    device: torch.device
    copies = True

    def begin(self, homes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        bring(homes)
        with torch.inference_mode(False), torch.no_grad():
            return [copy_tensor(home, self.device) for home in homes]

    def take(self, ticket: list[torch.Tensor]) -> list[torch.Tensor]:
        return ticket

    def used(self) -> None:
        return None

    def done(self, ticket: list[torch.Tensor], uses: Mapping[Any, Any]) -> None:
        ticket.clear()


class TouchAhead:
    """Touches what is in files, so that the system reads it while the module before computes."""

    copies = False

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1, "autoshard-read")

    def begin(self, homes: Sequence[torch.Tensor]) -> "Future[None]":
        return self.thread.submit(bring, list(homes))

    def take(self, ticket: "Future[None]") -> list[torch.Tensor]:
        ticket.result()
        return []

    def used(self) -> None:
        return None

    def done(self, ticket: "Future[None]", uses: Mapping[Any, Any]) -> None:
        ticket.cancel()

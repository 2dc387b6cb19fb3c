"""Flow: the consequences of a placement for one recorded run, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.placement import Homes

HOST_NAME = "host"
"""Device name of ordinary CPU tensors that belong to no planned device (literals, lifted constants); never counted."""

CopyReason = Literal["hook", "align", "model", "output", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One tensor copied to another device: `value` of the graph, made at op time `born`.

    Attributes:
        reason: "hook" = an argument moved at a module boundary; "align" = an op's input moved because devices mixed;
            "model" = the model's own `.to(device)`; "output" = the root's result going home; "backward" = a gradient
            following a copy back.
        producer: module that made the value (or holds the parameter).
        consumer: the first module that needed the copy.
        buffer: row of `Flow.buffers`, -1 if the copy went to the host.
        kept: made once and kept from pass to pass (parameters and constants read from another device).
    """

    value: int
    source: str
    destination: str
    nbytes: int
    born: int
    reason: CopyReason
    producer: str
    consumer: str
    buffer: int
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffers:
    """Every allocation on a planned device, as columns. Row r is live while ops `born[r] <= i < died[r]` run.

    `device` indexes `Flow.devices`; `storage` is the graph's storage it holds or is copied from; `copied` marks copies.
    """

    storage: np.ndarray
    device: np.ndarray
    nbytes: np.ndarray
    born: np.ndarray
    died: np.ndarray
    copied: np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flow:
    """What one pass does under a placement.

    Attributes:
        devices: names in order of first use in the placement.
        op_device: per op, index into `devices`, or -1 for the host.
        copies: in the order in which they happen.
        aligned: modules with an op of their own whose inputs are on several devices.
        unfolded: modules in which each use of a copy needs a way back of its own (see `unfold.py`).
        written_back: modules that write into an argument which was copied to them and is read again afterwards.
        steps: number of ops; time `steps` is after the last one, when the outputs go home.
        uncounted: ops of no account (see `ModelGraph.uncounted`): nothing is live while they run, nothing is copied.
    """

    homes: Homes
    tensor_device: Mapping[str, str]
    devices: tuple[str, ...]
    op_device: tuple[int, ...]
    copies: tuple[Copy, ...]
    buffers: Buffers
    aligned: tuple[str, ...]
    unfolded: tuple[str, ...]
    written_back: tuple[str, ...]
    steps: int
    uncounted: range = range(0)

    def counts(self, copy: Copy) -> bool:
        """Whether a copy is made by ops that count; an output goes home after the op at which it is noted."""
        return copy.born - (copy.reason == "output") not in self.uncounted

    def timeline(self, device: str, block_bytes: int = 1, kinds: np.ndarray | None = None) -> np.ndarray:
        """Return live bytes on a device at every op time and after the last; sizes rounded up to `block_bytes`.

        `kinds` is a mask over `buffers` to count only some of them.
        """
        mask = self.buffers.device == self.devices.index(device)
        if kinds is not None:
            mask &= kinds
        nbytes = self.buffers.nbytes[mask]
        if block_bytes > 1:
            nbytes = -(-nbytes // block_bytes) * block_bytes
        change = np.zeros(self.steps + 2, np.int64)
        np.add.at(change, self.buffers.born[mask], nbytes)
        np.add.at(change, self.buffers.died[mask], -nbytes)
        live = np.cumsum(change)[: self.steps + 1]
        live[self.uncounted.start + 1 : self.uncounted.stop] = 0  # at its start the outputs before it go home
        return live

    def peak(self, device: str, block_bytes: int = 1) -> tuple[int, int]:
        """Return the most bytes live on a device and the op time at which they first are."""
        live = self.timeline(device, block_bytes)
        time = int(live.argmax())
        return int(live[time]), time

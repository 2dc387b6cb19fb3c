"""Flow: the consequences of a placement for one recorded run, as data."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.plan.placement import ExecutionDevices

HOST_NAME = "host"
"""Device name of ordinary CPU tensors that belong to no planned device (literals, lifted constants); never counted."""

INPUTS, OUTPUTS = "(inputs)", "(outputs)"
"""Where a copy comes from or goes to that is no module; the model's own forward is the module ""."""

CopyReason = Literal["hook", "align", "model", "output", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Copy:
    """One tensor copied to another device: `value` of the graph, made at op time `born`.

    Attributes:
        reason: "hook" = an argument moved at a module boundary; "align" = an op's input moved because devices mixed;
            "model" = the model's own `.to(device)`; "output" = the root's result going back; "backward" = a gradient
            following a copy back.
        producer: module that made the value (or holds the parameter), or `INPUTS`.
        consumer: the first module that needed the copy, or `OUTPUTS`.
        buffer: row of `Flow.buffers`, -1 if the copy went to the host.
        kept: made once and kept from pass to pass (parameters and constants read from another device).
    """

    value: int
    source: str
    destination: str
    nbytes: int
    born: float
    reason: CopyReason
    producer: str
    consumer: str
    buffer: int
    kept: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Buffers:
    """Every allocation on a planned device, as columns. Row r is live at times `born[r] <= time <= died[r] - 1`.

    Op `i` runs at time `i`; what autograd does between two ops (copies of gradients, their sums) at times in between.
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
        mixed_device: modules with an op of their own whose inputs are on several devices.
        written_back: modules that write into an argument which was copied to them and is read again afterwards.
        steps: number of ops; time `steps` is after the last one, when the outputs go back.
        uncounted: ops of no account (see `ModelGraph.uncounted`): nothing is live while they run, nothing is copied.
    """

    execution_devices: ExecutionDevices
    tensor_device: Mapping[str, str]
    devices: tuple[str, ...]
    op_device: tuple[int, ...]
    copies: tuple[Copy, ...]
    buffers: Buffers
    mixed_device: tuple[str, ...]
    written_back: tuple[str, ...]
    steps: int
    uncounted: range = range(0)

    def counts(self, copy: Copy) -> bool:
        """Whether a copy is made by ops that count; an output goes back after the op at which it is noted."""
        return copy.born - (copy.reason == "output") not in self.uncounted

    def timeline(self, device: str, block_bytes: int = 1, kinds: np.ndarray | None = None) -> np.ndarray:
        """Return live bytes on a device at every op time and after the last; sizes rounded up to `block_bytes`.

        `kinds` is a mask over `buffers` to count only some of them.
        """
        return self._live(device, block_bytes, kinds, np.arange(self.steps + 1))

    def peak(self, device: str, block_bytes: int = 1) -> tuple[int, float]:
        """Return the most bytes live on a device and the time at which they first are."""
        mine = self.buffers.born[self.buffers.device == self.devices.index(device)]
        times = np.union1d(np.arange(self.steps + 1), mine)
        live = self._live(device, block_bytes, None, times)
        at = int(live.argmax())
        return int(live[at]), float(times[at])

    def _live(self, device: str, block_bytes: int, kinds: np.ndarray | None, times: np.ndarray) -> np.ndarray:
        """Bytes live on a device at some times."""
        mask = self.buffers.device == self.devices.index(device)
        if kinds is not None:
            mask &= kinds
        nbytes = -(-self.buffers.nbytes[mask] // block_bytes) * block_bytes
        live = _total_before(times, self.buffers.born[mask], nbytes, "right")
        live -= _total_before(times, self.buffers.died[mask] - 1, nbytes, "left")
        live[(times > self.uncounted.start) & (times < self.uncounted.stop)] = 0  # at its start outputs go back
        return live


def _total_before(
    times: np.ndarray, when: np.ndarray, nbytes: np.ndarray, side: Literal["left", "right"]
) -> np.ndarray:
    """Sum of what happened before each time ("left"), or at it too ("right")."""
    order = np.argsort(when, kind="stable")
    totals = np.concatenate([np.zeros(1, np.int64), np.cumsum(nbytes[order])])
    return totals[np.searchsorted(when[order], times, side)]

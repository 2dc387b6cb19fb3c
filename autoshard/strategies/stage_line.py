"""The line of pieces that a pipeline is cut from: what each costs on every device, as arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """n pieces in the order in which they run, on D devices, for one of `microbatches` micro-batches.

    Attributes:
        begins: [n + 1] the first unit of every piece, and the number of units.
        forward, backward, weight: [D, n] seconds of a piece on a device; `weight` is the part of `backward` for
            gradients of parameters.
        static: [n] bytes that are there all the time. kept: [n] from a forward to its backward. transient: [n] more
            while the piece runs.
        kept_again: [n] bytes that are kept where modules are computed again one by one, which is how it is in one
            process; again: [n] what that takes meanwhile.
        lasting: [n] bytes per micro-batch that stay to the end of the pass.
        after: [D, n] seconds of the optimizer's step, when a device is done with all micro-batches.
        step: [n] bytes that the optimizer's step takes on top of what is static, when the pass is over.
        sends, returns: [2, n + 1] tensors and their bytes that go over a cut before each piece, and back.
        capacity: [D] bytes. latency, bandwidth: [D, D] of copies from row to column.
        training: there is a backward.
        issue_seconds: a pass is not faster: what one thread needs to launch all of its ops; 0 for a thread per device.
        one_process: all devices are used from one.
    """

    microbatches: int
    begins: Array
    forward: Array
    backward: Array
    weight: Array
    static: Array
    kept: Array
    transient: Array
    kept_again: Array
    again: Array
    lasting: Array
    sends: Array
    returns: Array
    capacity: Array
    latency: Array
    bandwidth: Array
    training: bool
    issue_seconds: float = 0.0
    one_process: bool = False
    step: Array | None = None
    after: Array | None = None

    @property
    def size(self) -> int:
        """How many pieces there are."""
        return len(self.static)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """[D] the first device that is like each one in speed, memory and links."""
        rows = []
        for d in range(len(self.capacity)):
            links = [np.delete(table[d], d) for table in (self.latency, self.bandwidth)]
            links += [np.delete(table[:, d], d) for table in (self.latency, self.bandwidth)]
            own = (self.forward[d], self.backward[d], self.weight[d], self.capacity[d : d + 1], *links)
            rows.append(b"".join(np.ascontiguousarray(part, np.float64).tobytes() for part in own))
        return tuple(rows.index(row) for row in rows)

    @cached_property
    def always(self) -> Array:
        """[n] bytes of a piece that are there at the end of a pass, whatever the schedule."""
        return self.static + self.microbatches * self.lasting

    def may_fit(self, positions: int, per_device: int, devices: Sequence[int]) -> bool:
        """Whether so many of these devices have room for what is there at the end of a pass, and for each piece alone.

        One stage after the other is filled as far as the largest device goes: if that takes too many, nothing fits.
        """
        capacity = np.sort(self.capacity[list(devices)])[::-1] * (1 + 1e-9)
        sums = np.append(0.0, np.cumsum(self.always))
        if float((self.always + self.transient).max()) > capacity[0] or sums[-1] > capacity[:positions].sum():
            return False
        if per_device > 1:
            return True
        at = 0
        for _ in range(positions):
            at = int(np.searchsorted(sums, sums[at] + capacity[0], side="right")) - 1
        return at >= self.size

    @cached_property
    def paces(self) -> tuple[int, ...]:
        """[D] the first device that takes as long as each one for every piece."""
        rows = [tuple(table[d].tobytes() for table in (self.forward, self.backward, self.weight))
                for d in range(len(self.capacity))]  # fmt: skip
        first: dict[object, int] = {}
        return tuple(first.setdefault(row, d) for d, row in enumerate(rows))

    @cached_property
    def totals(self) -> dict[str, Array]:
        """Sums up to each piece of everything that adds up."""
        names = ("forward", "backward", "weight", "static", "kept", "kept_again", "lasting")
        found = {name: _sums_before(getattr(self, name)) for name in names}
        stepping = self.static if self.step is None else self.static + self.step
        after = np.zeros_like(self.forward) if self.after is None else self.after
        return found | {"stepping": _sums_before(stepping), "after": _sums_before(after)}

    def most(self, name: str, low: Array, high: Array) -> Array:
        """The largest figure of the pieces from `low` to `high - 1`; 0 of none.

        Of 2^k pieces each it is known; two such runs cover any other.
        """
        runs = self._runs[name]
        level = np.frexp(np.maximum(high - low, 1))[1] - 1
        last = np.maximum(high - (1 << level), 0)
        return np.where(high > low, np.maximum(runs[level, low], runs[level, last]), 0.0)

    @cached_property
    def _runs(self) -> dict[str, Array]:
        """[levels, n + 1] per figure the largest of 2^level pieces from each one on."""
        return {name: _largest_of_runs(getattr(self, name)) for name in ("transient", "again")}

    def band(self, width: int) -> "Band":
        """Stages of up to so many pieces."""
        if width not in self._bands:
            self._bands[width] = Band(self, width)
        return self._bands[width]

    @cached_property
    def _bands(self) -> dict[int, "Band"]:
        return {}


class Band:
    """Figures of all stages of up to `width` pieces, as tables: row j, column c is the stage [j - width + c, j).

        pieces  0 1 2 3 4 5        row 4, width 3:   [1, 4)  [2, 4)  [3, 4)
                  └───┘ └─┘        where no such stage is, `exists` is false

    Attributes:
        begins, ends: [n + 1, width] the first piece, and [n + 1, 1] the piece after the last.
    """

    def __init__(self, line: Line, width: int) -> None:
        self.line, self.width = line, width
        self.ends = np.arange(line.size + 1)[:, None]
        begins = self.ends + np.arange(-width, 0)[None, :]
        self.exists = begins >= 0
        self.begins = np.maximum(begins, 0)
        self._known: dict[tuple[str, int], Array] = {}

    def between(self, name: str, device: int = -1) -> Array:
        """The sum of a figure over the pieces of each stage; on a device where it depends on it."""
        key = name, self.line.paces[device] if device >= 0 else -1
        if key not in self._known:
            sums = self.line.totals[name] if device < 0 else self.line.totals[name][key[1]]
            self._known[key] = sums[self.ends] - sums[self.begins]
        return self._known[key]

    def most(self, name: str) -> Array:
        """The largest figure of a piece of each stage."""
        return self.line.most(name, self.begins, self.ends)

    @cached_property
    def came(self) -> Array:
        """Bytes that come in to each stage."""
        return np.where(self.begins > 0, self.line.sends[1][self.begins], 0.0)

    @cached_property
    def passing(self) -> Array:
        """Bytes of each stage besides what is kept for backward."""
        fixed = self.between("static") + self.line.microbatches * self.between("lasting") + self.most("transient")
        return fixed if self.line.training else fixed + self.came


def _sums_before(values: Array) -> Array:
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)


def _largest_of_runs(values: Array) -> Array:
    rows = [np.append(values, 0.0)]
    step = 1
    while 2 * step <= len(values):
        shifted = np.append(rows[-1][step:], np.zeros(step))
        rows.append(np.maximum(rows[-1], shifted))
        step *= 2
    return np.array(rows)

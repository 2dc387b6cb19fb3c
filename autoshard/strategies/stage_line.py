"""The line of pieces that a pipeline is cut from: what each costs on every device, as arrays."""

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
    def totals(self) -> dict[str, Array]:
        """Sums up to each piece of everything that adds up."""
        names = ("forward", "backward", "weight", "static", "kept", "kept_again", "lasting")
        found = {name: _sums_before(getattr(self, name)) for name in names}
        stepping = self.static if self.step is None else self.static + self.step
        return found | {"stepping": _sums_before(stepping)}

    @cached_property
    def largest(self) -> dict[str, Array]:
        """[n + 1, n + 1] the largest figure of the pieces from row to column."""
        return {name: _largest_between(getattr(self, name)) for name in ("transient", "again")}

    @cached_property
    def _between(self) -> dict[tuple[str, int], Array]:
        return {}

    def between(self, name: str, device: int = -1) -> Array:
        """[n + 1, n + 1] the sum of a figure over the pieces from row to column; on a device where it depends on it."""
        key = name, device
        if key not in self._between:
            sums = self.totals[name] if device < 0 else self.totals[name][self.kinds[device]]
            self._between[key] = sums[None, :] - sums[:, None]
        return self._between[key]

    @cached_property
    def passing(self) -> Array:
        """[n + 1, n + 1] bytes from row to column that there are besides what is kept for backward."""
        fixed = self.between("static") + self.microbatches * self.between("lasting") + self.largest["transient"]
        return fixed if self.training else fixed + self.came

    @cached_property
    def came(self) -> Array:
        """[n + 1, 1] bytes that come in over a cut before each piece."""
        return np.where(np.arange(self.size + 1) > 0, self.sends[1], 0.0)[:, None]

    @cached_property
    def ahead(self) -> Array:
        """[n + 1, n + 1] whether there is a piece from row to column."""
        at = np.arange(self.size + 1)
        return at[:, None] < at[None, :]


def _sums_before(values: Array) -> Array:
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)


def _largest_between(values: Array) -> Array:
    found = np.zeros((len(values) + 1, len(values) + 1))
    for row in range(len(values)):
        found[row, row + 1 :] = np.maximum.accumulate(values[row:])
    return found

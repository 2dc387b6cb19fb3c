"""Polynomials of one part of a divided run, from those of the whole: rows of the batch, and slices of what is cut.

    columns    1   b   b s  …  │  1   b   b s  …          logits [b, s, V]      │ 4 V b s
               of what is whole │  times the part         weight [V, H]     4 V H │
                                │  of the batch

What the part has at the profile's size is known to the byte, so every polynomial is scaled to be that there.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from autoshard.cluster.cluster import Device
from autoshard.profile.measure import counted_values
from autoshard.profile.part import sizes_of_part
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling, powers
from autoshard.report.whatif.sparse import terms


class Part:
    """What a part of the run has: `share` of the rows of what is `carrying` them. `local`: the sizes of all rows.

    `profile` is the run that `scaling` is of; a rank that has slices of parameters has smaller sizes.

    Attributes:
        base: value of every column at the profile's size.
        storages, values: [number, columns] bytes; flops, moved: [ops, columns].
    """

    def __init__(
        self, profile: Profile, local: Profile, scaling: Scaling, carrying: frozenset[int], share: float
    ) -> None:
        graph, exact = profile.graph, sizes_of_part(local, share, carrying)
        self.scaling = scaling
        base = powers(scaling.monomials, *scaling.sizes)
        self.base = np.concatenate([base, share * base])
        rows = np.zeros(len(graph.values), bool)
        rows[list(carrying)] = True
        first = np.full(len(graph.storages), -1, np.int64)
        for value in reversed(graph.values):
            first[value.storage] = value.index
        of_storage = np.where(first >= 0, rows[first], False)
        self.storages = self._scaled(scaling.storage, of_storage, exact.storages)
        self.values = self._scaled(scaling.value, rows, exact.values)
        counted = list(counted_values(graph))
        of_op = np.repeat(np.arange(len(counted)), [len(values) for values in counted])
        read = np.array([value for values in counted for value in values], np.int64)
        expanded = np.array([value.nbytes > graph.storages[value.storage].nbytes for value in graph.values], bool)
        storage = np.array([value.storage for value in graph.values], np.int64)
        one = np.where(expanded[read, None], self.storages[storage[read]], self.values[read])
        self.moved = np.zeros((len(counted), len(self.base)))
        np.add.at(self.moved, of_op, one)
        touches = np.zeros(len(counted), bool)
        for op in graph.ops:
            touches[op.index] = not carrying.isdisjoint(op.inputs) or not carrying.isdisjoint(op.outputs)
        idle = np.zeros(len(counted), bool)
        idle[graph.uncounted.start : graph.uncounted.stop] = True
        self.flops = self._scaled(scaling.flops, touches, np.where(idle, 0, exact.flops))
        self._scale(self.moved, np.array(exact.moved, np.float64))

    def set_ops(self, flops: np.ndarray, moved: np.ndarray) -> None:
        """Take other amounts at the profile's size, which were not rounded."""
        self._scale(self.flops, flops)
        self._scale(self.moved, moved)

    def with_rows(self, vectors: np.ndarray) -> np.ndarray:
        """Polynomials of what has rows of the batch."""
        return np.concatenate([np.zeros_like(vectors), vectors], axis=-1)

    def whole(self, vectors: np.ndarray) -> np.ndarray:
        """Polynomials of what is there once for the whole batch."""
        return np.concatenate([vectors, np.zeros_like(vectors)], axis=-1)

    def _scaled(self, numbers: np.ndarray, rows: np.ndarray, exact: Sequence[int] | np.ndarray) -> np.ndarray:
        plain = self.scaling.table[numbers]
        vectors = np.concatenate([np.where(rows[:, None], 0.0, plain), np.where(rows[:, None], plain, 0.0)], axis=1)
        self._scale(vectors, np.array(exact, np.float64))
        return vectors

    def _scale(self, vectors: np.ndarray, exact: np.ndarray) -> None:
        """Make vectors have these values at the profile's size; what has none there becomes a constant."""
        now = vectors @ self.base
        ratio = np.divide(exact, now, out=np.ones(len(now)), where=now > 0)
        vectors *= np.where(np.abs(ratio - 1) < 1e-12, 1.0, ratio)[:, None]
        lacking = (now <= 0) & (exact != now)
        vectors[lacking] = 0.0
        vectors[lacking, 0] = exact[lacking]


class Kinds:
    """Distinct ops, devices and polynomials, numbered, as a page has them."""

    def __init__(self, dtypes: Sequence[str]) -> None:
        self.dtypes = list(dtypes)
        self.table: list[list[float]] = []
        self.ops: list[list[int]] = []
        self.rates: list[dict[str, Any]] = []
        self._rows: dict[tuple[float, ...], int] = {}
        self._ops: dict[tuple[bytes, bytes, str], int] = {}

    def of(self, part: Part, profile: Profile) -> tuple[list[int], list[int]]:
        """Kind of every op of a part, and of those that only run for batches of more than one; -1: takes no time."""
        ops = [self._op(*row) for row in zip(part.flops, part.moved, profile.op_dtypes, strict=True)]
        table = part.with_rows(part.scaling.table)
        return ops, [self._op(table[extra.flops], table[extra.moved], extra.dtype) for extra in part.scaling.extra]

    def device(self, device: Device) -> int:
        """Number of devices that are as fast."""
        row = rates(device, self.dtypes)
        if row not in self.rates:
            self.rates.append(row)
        return self.rates.index(row)

    def _op(self, flops: np.ndarray, moved: np.ndarray, dtype: str) -> int:
        key = (flops.tobytes(), moved.tobytes(), dtype)
        if key not in self._ops:
            idle = not flops.any() and not moved.any()
            if not idle:
                self.ops.append([self._row(flops), self._row(moved), self.dtypes.index(dtype)])
            self._ops[key] = -1 if idle else len(self.ops) - 1
        return self._ops[key]

    def _row(self, vector: np.ndarray) -> int:
        key = tuple(terms(vector))
        if key not in self._rows:
            self._rows[key] = len(self.table)
            self.table.append(list(key))
        return self._rows[key]


def rates(device: Device, dtypes: Sequence[str]) -> dict[str, Any]:
    """How fast a device is."""
    return {
        "flops": [device.flops(dtype) for dtype in dtypes],
        "bandwidth": device.bytes_per_second,
        "launch": device.launch_seconds,
    }

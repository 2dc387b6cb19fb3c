"""What the ops of a run touch, as arrays: sums over the tensors of every op are made without a loop over the ops."""

from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.capture.latest import Latest

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpValues:
    """Values that ops read, or make, one op after the other: `op[i]` touches `value[i]`. There are `ops` of them."""

    op: Array
    value: Array
    ops: int

    def sums(self, of_value: Array) -> Array:
        """[ops] sums over what each op touches, as floats: exact for whole numbers up to 2^53."""
        return np.bincount(self.op, of_value[self.value], self.ops)

    def least(self, of_value: Array) -> Array:
        """[ops] the smallest of what each op touches, at most 1."""
        found = np.ones(self.ops)
        np.minimum.at(found, self.op, of_value[self.value])
        return found

    def of(self, ops: Array) -> list[int]:
        """What these ops touch, one op after the other; `ops` ascend."""
        these = np.zeros(self.ops, bool)
        these[ops] = True
        return self.value[these[self.op]].tolist()

    def has(self, mask: Array) -> Array:
        """[ops] whether an op touches any of these values."""
        found = np.zeros(self.ops, bool)
        found[self.op[mask[self.value]]] = True
        return found


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """A run as arrays.

    Attributes:
        inputs, touched: what ops read, and what they read or make.
        value_bytes, storage, maker: [values] with `maker` the op that made each, -1 if none did.
        first: [storages] the first value in each, -1 if there is none.
    """

    inputs: OpValues
    touched: OpValues
    value_bytes: Array
    storage: Array
    maker: Array
    first: Array

    def of_storages(self, of_value: Array, without: float) -> Array:
        """[storages] what is true of the first value in each; `without`: of storages that have none."""
        return np.where(self.first >= 0, of_value[self.first], of_value.dtype.type(without))


_LATEST = Latest[Columns]()


def columns_of(graph: ModelGraph) -> Columns:
    """Return a run as arrays."""
    return _LATEST.of(graph, None, lambda: _columns(graph))


def take_columns(graph: ModelGraph, of: ModelGraph) -> None:
    """Let a graph that differs in sizes alone have the arrays of another."""
    nbytes = np.array([value.nbytes for value in graph.values], np.int64)
    _LATEST.of(graph, None, lambda: replace(columns_of(of), value_bytes=nbytes))


def _columns(graph: ModelGraph) -> Columns:
    storage = np.array([value.storage for value in graph.values], np.int64)
    first = np.full(len(graph.storages), -1)
    first[storage[::-1]] = np.arange(len(storage))[::-1]  # of several the last one written stays
    return Columns(
        inputs=_column([op.inputs for op in graph.ops]),
        touched=_column([op.inputs + op.outputs for op in graph.ops]),
        value_bytes=np.array([value.nbytes for value in graph.values], np.int64),
        storage=storage,
        maker=np.array([value.op for value in graph.values], np.int64),
        first=first,
    )


def _column(rows: list[tuple[int, ...]]) -> OpValues:
    op = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    return OpValues(op=op, value=np.array([value for row in rows for value in row], np.int64), ops=len(rows))

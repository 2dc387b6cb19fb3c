"""The recorded run for a part of the batch: what a replica, or one micro-batch, does.

    logits  [8, S, V]  ──2 of 8 rows──▶  a quarter of the bytes          an op that reads it: a quarter of the FLOPs
    weight  [V, H]     ──────────────▶  as it is                        its gradient: as it is

Which tensors have rows of the batch follows from the inputs that have: what is computed from them has rows too, if its
number of elements can be divided by theirs, and so has what is repeated for every row (learned queries). A gradient has
rows if that of which it is the gradient has.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

import numpy as np

from autoshard.capture.columns import columns_of, take_columns
from autoshard.capture.graph import ModelGraph, Op, TensorInfo
from autoshard.capture.latest import Latest
from autoshard.capture.replaced import changed
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import coordinates_of
from autoshard.profile.profile import Profile

Array = np.ndarray
_LATEST = Latest[frozenset[int]]()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of every value and storage of a graph, FLOPs of every op and bytes it moves, where they are smaller."""

    values: list[int]
    storages: list[int]
    flops: list[int]
    moved: list[int]


def smaller_sizes(profile: Profile, parts: Array) -> Sizes:
    """Return the sizes of a run of whose values there are only these parts ([values], 1 for those that are whole).

    A storage shrinks with the first value in it, the FLOPs of an op with the smallest part of what it touches, and the
    bytes it moves as all that it touches does.
    """
    graph, columns = profile.graph, columns_of(profile.graph)
    touched, whole = columns.touched, columns.value_bytes
    values = np.ceil(whole * parts).astype(np.int64)
    storages = np.ceil(np.array([row.nbytes for row in graph.storages]) * columns.of_storages(parts, 1.0))
    before, after = (touched.sums(nbytes).astype(np.int64).tolist() for nbytes in (whole, values))
    return Sizes(
        values=values.tolist(),
        storages=storages.astype(np.int64).tolist(),
        flops=[ceil(op.flops * part) if part < 1 else op.flops
               for op, part in zip(graph.ops, touched.least(parts).tolist(), strict=True)],
        moved=[nbytes * new // old if new < old else nbytes  # in Python's numbers, which are as large as they must be
               for nbytes, old, new in zip(profile.op_bytes, before, after, strict=True)],
    )  # fmt: skip


def with_sizes(profile: Profile, sizes: Sizes, *, tensors: tuple[TensorInfo, ...] | None = None) -> Profile:
    """Return the profile of the same run with these sizes; the figures per module stay those of the whole.

    `tensors`: of the graph, where they change.
    """
    graph = profile.graph
    smaller = replace(
        graph,
        values=changed(graph.values, nbytes=sizes.values),
        storages=changed(graph.storages, nbytes=sizes.storages),
        ops=changed(graph.ops, flops=sizes.flops),
        tensors=graph.tensors if tensors is None else tensors,
    )
    take_columns(smaller, graph)
    return replace(profile, graph=smaller, op_bytes=tuple(sizes.moved))


def part_of_batch(profile: Profile, batch: BatchAxis, rows: int) -> Profile:
    """Return the profile of the run with `rows` of the batch; ops, modules and parameters stay, sizes shrink.

    The figures per module stay those of the whole batch.
    """
    if rows == batch.size:
        return profile
    return with_sizes(profile, smaller_sizes(profile, parts_with_rows(profile.graph, batch, rows)))


def parts_with_rows(graph: ModelGraph, batch: BatchAxis, rows: int) -> Array:
    """Return which part of each value there is with `rows` of the batch, [values]."""
    parts = np.ones(len(graph.values))
    parts[list(carriers_of_rows(graph, batch))] = rows / batch.size
    return parts


def carriers_of_rows(graph: ModelGraph, batch: BatchAxis) -> frozenset[int]:
    """The values of a recorded run that have rows of the batch, their gradients included."""
    return _LATEST.of(graph, batch, lambda: _carriers(graph, batch))


def _carriers(graph: ModelGraph, batch: BatchAxis) -> frozenset[int]:
    size = batch.size
    sizes = {(row.dim, len(coordinates_of(row.axis))) for row in batch.inputs}
    carrying = {
        value
        for value in graph.inputs
        if any(dim < len(graph.values[value].shape) and graph.values[value].shape[dim] == n for dim, n in sizes)
    }
    own = {tensor.value for tensor in graph.tensors}
    gradients = {graph.values[value].storage for _, value in graph.gradients}
    carrying_storages = {graph.values[value].storage for value in carrying}
    reads = set(carrying)  # what depends on rows, also where it has none itself: a loss
    for op in graph.ops:
        depends = not reads.isdisjoint(op.inputs)
        if op.backward and not op.inputs and op.forward >= 0:  # indices, or zeros that a gradient is put into
            depends = not carrying.isdisjoint((*graph.ops[op.forward].inputs, *graph.ops[op.forward].outputs))
        for value in op.outputs:
            row = graph.values[value]
            if value in own or row.storage in gradients:
                continue
            repeated = size in row.shape[:2] and row.nbytes > graph.storages[row.storage].nbytes
            alone = len(row.shape) > 1 and row.shape[0] == size > 1 and own.isdisjoint(op.inputs)
            copied = size > 1 and _repeats(graph, op, row.shape, size)
            made_here = depends or alone or copied or (repeated and size > 1)
            if made_here:
                reads.add(value)
            elements = prod(row.shape)
            if elements == 0 or elements % size != 0:
                continue
            if row.storage in carrying_storages or (made_here and _has_rows(graph, op, value, carrying)):
                carrying.add(value)
                if not repeated:
                    carrying_storages.add(row.storage)
    return frozenset(carrying)


def _repeats(graph: ModelGraph, op: Op, shape: tuple[int, ...], size: int) -> bool:
    """Whether an op puts one tensor beside itself for every row: table.repeat(rows, 1, 1), cat([table] * rows)."""
    if op.backward or len(set(op.inputs)) != 1:
        return False
    before = graph.values[op.inputs[0]].shape
    before = (1,) * (len(shape) - len(before)) + before
    return prod(shape) == size * prod(before) > 0 and any(
        new == size * old for new, old in zip(shape[:2], before, strict=False)
    )


def _has_rows(graph: ModelGraph, op: Op, value: int, carrying: set[int]) -> bool:
    """Whether an output has rows: in backward, if it is as large as a tensor of its forward op that has.

    If others without rows are as large, it has where an op reads both: a weight, and a gradient with rows. What reads
    gradients and activations alone sums over rows.
    """
    if not op.backward or op.forward < 0:
        return True
    forward = graph.ops[op.forward]
    elements = prod(graph.values[value].shape)
    isomorphic = [one for one in (*forward.inputs, *forward.outputs) if prod(graph.values[one].shape) == elements]
    if all(one in carrying for one in isomorphic):
        return True
    read = [one in carrying for one in op.inputs]
    return any(one in carrying for one in isomorphic) and any(read) and not all(read)

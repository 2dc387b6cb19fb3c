"""The recorded run for a part of the batch: what a replica, or one micro-batch, does.

    logits  [8, S, V]  ──2 of 8 rows──▶  a quarter of the bytes          an op that reads it: a quarter of the FLOPs
    weight  [V, H]     ──────────────▶  as it is                        its gradient: as it is

Which tensors have rows of the batch follows from the inputs that have: what is computed from them has rows too, if its
number of elements can be divided by theirs, and so has what is repeated for every row (learned queries). A gradient has
rows if that of which it is the gradient has.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

from autoshard.batching import BatchAxis
from autoshard.capture.changed import changed
from autoshard.capture.graph import ModelGraph, Op
from autoshard.capture.latest import Latest
from autoshard.profile.profile import Profile
from autoshard.sharding import coordinates_of

_LATEST = Latest[frozenset[int]]()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSizes:
    """Bytes of every value and storage of a graph in a part of the batch, FLOPs of every op and bytes it moves."""

    values: list[int]
    storages: list[int]
    flops: list[int]
    moved: list[int]


def sizes_of_part(profile: Profile, part: float, carrying: frozenset[int]) -> PartSizes:
    """Return the sizes of the run with so large a part of the batch; `carrying`: as `carriers_of_rows` says."""
    graph = profile.graph
    first: dict[int, int] = {}
    for value in graph.values:
        first.setdefault(value.storage, value.index)
    bytes_of = [value.nbytes for value in graph.values]
    values = [ceil(nbytes * part) if index in carrying else nbytes for index, nbytes in enumerate(bytes_of)]
    storages = [
        ceil(storage.nbytes * part) if first.get(storage.index) in carrying else storage.nbytes
        for storage in graph.storages
    ]
    flops, moved = [], []
    for op, nbytes in zip(graph.ops, profile.op_bytes, strict=True):
        touched = (*op.inputs, *op.outputs)
        small = not carrying.isdisjoint(touched)
        flops.append(ceil(op.flops * part) if small and op.flops else op.flops)
        whole = sum([bytes_of[value] for value in touched]) if small else 0
        moved.append(nbytes * sum([values[value] for value in touched]) // whole if whole else nbytes)
    return PartSizes(values=values, storages=storages, flops=flops, moved=moved)


def part_of_batch(profile: Profile, batch: BatchAxis, rows: int, *, carrying: frozenset[int] | None = None) -> Profile:
    """Return the profile of the run with `rows` of the batch; ops, modules and parameters stay, sizes shrink.

    `carrying`: what `carriers_of_rows` says of this graph, if it is known already. The figures per module stay those of
    the whole batch.
    """
    if rows == batch.size:
        return profile
    graph = profile.graph
    part = rows / batch.size
    carrying = carriers_of_rows(graph, batch) if carrying is None else carrying
    sizes = sizes_of_part(profile, part, carrying)
    values = tuple(
        changed(value, nbytes=sizes.values[value.index],
                copy_bytes=ceil(value.copy_bytes * part) if value.copy_bytes > 0 else value.copy_bytes)
        if value.index in carrying else value for value in graph.values
    )  # fmt: skip
    storages = tuple(
        storage if nbytes == storage.nbytes else changed(storage, nbytes=nbytes)
        for storage, nbytes in zip(graph.storages, sizes.storages, strict=True)
    )
    ops = tuple(
        op if flops == op.flops else changed(op, flops=flops)
        for op, flops in zip(graph.ops, sizes.flops, strict=True)
    )  # fmt: skip
    smaller = replace(graph, values=values, storages=storages, ops=ops)
    return replace(profile, graph=smaller, op_bytes=tuple(sizes.moved))


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
        for value in op.outputs:
            row = graph.values[value]
            if value in own or row.storage in gradients:
                continue
            repeated = size in row.shape[:2] and row.nbytes > graph.storages[row.storage].nbytes
            alone = len(row.shape) > 1 and row.shape[0] == size > 1 and own.isdisjoint(op.inputs)
            made_here = depends or alone or (repeated and size > 1)
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


def _has_rows(graph: ModelGraph, op: Op, value: int, carrying: set[int]) -> bool:
    """Whether an output has rows: in backward, unless it is as large as a tensor of the forward op that has none."""
    if not op.backward or op.forward < 0:
        return True
    forward = graph.ops[op.forward]
    elements = prod(graph.values[value].shape)
    touched = (*forward.inputs, *forward.outputs)
    return not any(prod(graph.values[one].shape) == elements for one in touched if one not in carrying)

"""Numbers that code alone decides: not the batch, not a weight or a buffer.

x[torch.arange(n), best]     which samples are picked is known: sample i of x
x[:, order]                  it is not
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from autoshard.axes.axis import Axis, Factor, describe, factors_of, fresh, whole
from autoshard.axes.given import arguments_of, computed, literals
from autoshard.axes.reshaping import PARTS
from autoshard.capture.graph import ModelGraph, Op, name_of, sole_maker, written_storages
from autoshard.plan.batching import with_rows
from autoshard.plan.sharding import coordinates_of

MOST_NUMBERS = 1 << 16
"""Elements of a tensor of integers that is computed again."""
NO_END = 1 << 31
"""Ends from here on are no places: Python says so where there is no end."""


class Contents:
    """The numbers of the values of a graph that code alone decides.

    `counts`: by value, which of its dimensions are longer for a larger batch.
    """

    def __init__(self, graph: ModelGraph, counts: Mapping[int, Sequence[bool]]) -> None:
        self._graph = graph
        self._counts = counts
        self._known: dict[int, torch.Tensor | None] = {}
        self._written = written_storages(graph)
        self.literals = literals(graph)

    def of(self, value: int) -> torch.Tensor | None:
        """The numbers of a value; None if they are not known."""
        if value not in self._known:
            self._known[value] = self._found(value)
        return self._known[value]

    def _found(self, value: int) -> torch.Tensor | None:
        row = self._graph.values[value]
        if row.storage in self._written or torch.Size(row.shape).numel() > MOST_NUMBERS:
            return None
        if row.op < 0:
            return self.literals.get(value)
        op = self._graph.ops[row.op]
        if op.inputs and has_constant_bound(op, self._counts.get(op.inputs[0], ())):
            return None  # it is all of it for so few samples only
        made = computed(op, [self.of(one) for one in op.inputs])
        found = made[op.outputs.index(value)] if made is not None else None
        return found if isinstance(found, torch.Tensor) and found.shape == row.shape else None


def has_constant_bound(op: Op, counts: Sequence[bool]) -> bool:
    """Whether the numbers of an op say where in a dimension that is longer for a larger batch a part begins or ends."""
    dim = part_dim(op, len(counts))
    if dim is None or not counts[dim]:
        return False
    assert op.node is not None
    name = name_of(op)
    if name in ("chunk", "unsafe_chunk", "unbind"):
        return False
    if name != "slice":
        return True
    given = arguments_of(op)
    start, end, step = given["start"] or 0, given["end"], given["step"]
    return not 0 <= start < step or not (end is None or end >= NO_END)


def bound_of_filled(graph: ModelGraph, op: Op, bound: int, root: Callable[[int], int]) -> int:
    """Below which number all are once a mask has put one in the place of others that are below `bound`; 0 if unknown.

    One less where it was put for the largest that there may be: `x.masked_fill(x == bound - 1, 0)`. `root`: of which
    value another one is a copy.
    """
    assert op.node is not None
    number = op.node.args[2] if len(op.node.args) > 2 else None
    if not bound or type(number) is not int or number < 0:
        return 0
    mask = sole_maker(graph, op.inputs[1])
    if mask is not None and mask.node is not None and name_of(mask) == "eq" and len(mask.inputs) == 1:
        same = root(mask.inputs[0]) == root(op.inputs[0]) >= 0 and root(op.inputs[1]) >= 0  # nothing is written over
        if same and mask.node.args[1] == bound - 1:
            bound -= 1
    return max(bound, number + 1)


def part_dim(op: Op, ndim: int) -> int | None:
    """Along which dimension an op takes parts."""
    if op.node is None or name_of(op) not in PARTS | {"unbind"} or not ndim:
        return None
    dim = arguments_of(op)["dim"]
    return dim % ndim if isinstance(dim, int) else 0


def paired(
    axis: Axis, numbers: Sequence[torch.Tensor | None], batch: Factor | None, rows: tuple[int, int]
) -> list[Axis] | None:
    """The axes of an index that picks the same of every sample, in their order; None where it does not.

    `axis`: what is picked from; `numbers`: the index in two runs, of as many samples of the `batch` as `rows` says.
    """
    rigid = [factor for factor in factors_of(axis) if factor.rigid]
    factor = rigid[0] if rigid else axis[0] if len(axis) == 1 else None
    if not isinstance(factor, Factor) or factor.size != rows[0] or factor.unshardable:
        return None
    if rigid and factor is not batch:
        return None
    repeats = []
    for index, count in zip(numbers, rows, strict=True):
        owner = torch.from_numpy(coordinates_of(with_rows(describe(axis, factor), count)).copy())
        if index is None or index.dtype is torch.bool or index.is_floating_point() or not index.numel():
            return None
        if int(index.max()) >= len(owner) or int(index.min()) < -len(owner):
            return None
        repeats.append(_repeats(owner[index.long()], count))
    if repeats[0] is None or repeats[0] != repeats[1]:
        return None
    at, major, minor = repeats[0]
    assert numbers[0] is not None
    made = [fresh(size) for size in numbers[0].shape]
    made[at] = (*whole(major, "picked by index"), factor, *whole(minor, "picked by index"))
    return made


def _repeats(owner: torch.Tensor, rows: int) -> tuple[int, int, int] | None:
    """(dimension, majors, minors) if samples differ along one dimension only, which is majors x samples x minors."""
    along = [dim for dim in range(owner.dim()) if bool((owner != owner.narrow(dim, 0, 1)).any())]
    if len(along) != 1:
        return None
    line = owner.movedim(along[0], 0).flatten(1)[:, 0] if owner.dim() > 1 else owner
    minor = int((line == line[0]).long().cumprod(0).sum())
    major, left = divmod(len(line), rows * minor)
    wanted = torch.arange(rows).repeat_interleave(minor).repeat(major)
    return (along[0], major, minor) if not left and torch.equal(line, wanted) else None

"""Sums and means over the samples of a batch: which merge of the results of parts gives that of the whole.

    x.sum()                         sum         the whole is the sum of what parts give
    (x * m).sum() / m.sum()         mean        if m has the same sum in every row: nothing of it is drawn, but an order
    x.mean()                        mean        every sample has as many elements: parts weighted by their samples
    cross_entropy(x, labels)        weighted    by how many labels of a part count
    0.1 * x.mean() + weight.norm()  mean        what is linear in it, and what depends on no sample, keeps it
    first_loss + second_loss        each        means over other labels, or ratios: no merge, but one of each replica
    x.mean().sqrt()                 none        nothing is known

A tensor has one merge for all its elements. This is the argument for losses in the list of what is sound; see `sound`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from autoshard.axes import rules
from autoshard.axes.axis import covers, times
from autoshard.axes.batch_axes import BatchAxes, State
from autoshard.axes.batch_rules import SAME
from autoshard.axes.given import arguments_of, ops_behind, origin, overwritten_by
from autoshard.axes.reshaping import JOINS, MOVES, RESHAPES
from autoshard.axes.rules import Axes, broadcast, dims_of, names
from autoshard.capture.graph import ModelGraph, Op, name_of, sole_maker
from autoshard.capture.traits import traits_of
from autoshard.torch_private import OpOverload


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """How a tensor that several samples decide is made of those of parts; "each": it is not, each replica has its own.

    `labels`: of a weighted one, what is counted, as `counted_labels` says it.
    """

    how: Literal["sum", "mean", "weighted", "each"]
    labels: tuple[int, int, int] | None = None


MEAN, SUM = 1, 2
"""What `reduction` of a loss says."""
LOSSES = names(rules.loss_of_elements)
"""Losses that compare element by element, then sum up or take the mean."""
CLASSES = frozenset({"cross_entropy_loss", "nll_loss", "nll_loss_nd", "nll_loss2d"})
LINEAR = names(rules.same) | RESHAPES | MOVES | {
    "neg", "neg_", "sum", "mean", "stack", "cat", "flip", "roll", "repeat",
}  # fmt: skip
"""Ops that are linear in all their tensors and whose numbers say nothing but which elements are meant."""


class Merges:
    """The merges of the values of a walk."""

    def __init__(self, walk: BatchAxes) -> None:
        self.walk = walk
        self.known: dict[int, Merged] = {}

    def step(self, op: Op, given: Sequence[State], made: Sequence[State]) -> None:
        """Follow one op; `given` and `made` are the states of what it read and of what it makes."""
        found = self._of(op, given) if "mixed" in made else None
        for value in overwritten_by(self.walk.graph, op, self.known):
            del self.known[value]
        for value, state in zip(op.outputs, made, strict=True):
            if found is not None and state == "mixed":
                self.known[value] = found

    def _of(self, op: Op, given: Sequence[State]) -> Merged | None:
        name = name_of(op)
        if name in ("div", "div_", "mul", "mul_"):
            return self._scaled(op, given, name)
        if self.walk.resized(op):
            return None
        merges = {self.known.get(value) for value, state in zip(op.inputs, given, strict=True) if state != "shared"}
        if name in ("sum", "mean") and not any(value in self.known for value in op.inputs):
            return self._over(op.inputs[0], arguments_of(op).get("dim"), mean=name == "mean")
        if name in LOSSES or name in CLASSES:
            return self._loss(op, given, name)
        if not merges or None in merges:
            return None
        merge = merges.pop() if len(merges) == 1 else Merged(how="each")
        shared = "shared" in given
        if name in ("add", "add_", "sub", "sub_"):
            more = shared or self._adds_number(op)
            return Merged(how="each") if more and merge is not None and merge.how == "sum" else merge
        return merge if name in LINEAR and not shared and len(op.outputs) == 1 and not self._rounds(op) else None

    def _rounds(self, op: Op) -> bool:
        """Whether an op makes whole numbers of others, or answers of numbers."""
        read, made = (self.walk.graph.values[value[0]].dtype for value in (op.inputs, op.outputs))
        return (read.is_floating_point and not made.is_floating_point) or (made is torch.bool and read is not made)

    def _adds_number(self, op: Op) -> bool:
        """Whether more is added than the 0 with which a sum begins."""
        assert op.node is not None
        return any(isinstance(item, (int, float)) and item != 0 for item in op.node.args[:2])

    def _scaled(self, op: Op, given: Sequence[State], name: str) -> Merged | None:
        """A merged tensor times, or by, what depends on no sample; a sum by how many elements there are is a mean."""
        known = [self.known.get(value) for value in op.inputs]
        divides = name.startswith("div")
        if not op.inputs or len(op.inputs) > 2 or (divides and known[0] is None):
            return None
        if arguments_of(op).get("rounding_mode") or self._rounds(op):
            return None
        if divides and len(known) == 2 and known[1] is not None:
            return self._per_label(op) if known[0] == known[1] == Merged(how="sum") else Merged(how="each")
        if (
            divides
            and known[0] == Merged(how="sum")
            and len(op.inputs) == 2
            and is_so_much_per_row(self.walk, op.inputs[1])
        ):
            return Merged(how="mean")
        merged = [merge for merge in known if merge is not None]
        rest = [state for merge, state in zip(known, given, strict=True) if merge is None]
        if len(merged) != 1 or any(state != "shared" for state in rest):
            return None
        if not self.walk.resized(op):
            return merged[0]
        numbers = [self._number(one) for one in (op, self.walk.other.ops[op.index])]
        if not divides or merged[0].how != "sum" or None in numbers or rest or 0 in numbers:
            return None
        mine, other = (Fraction(number) for number in numbers if number is not None)
        return Merged(how="mean") if other / mine == Fraction(self.walk.other_rows, self.walk.rows) else None

    def _per_label(self, op: Op) -> Merged:
        """A sum by how many labels count in all: `(labels != -100).sum()`, or `mask.bool().sum()`."""
        graph = self.walk.graph
        value, names = op.inputs[1], []
        if torch.Size(graph.values[value].shape).numel() > 1:  # counted by position, of which parts have other shares
            return Merged(how="each")
        while (source := sole_maker(graph, value)) is not None and len(source.inputs) == 1:
            names.append(name_of(source))
            read = graph.values[source.inputs[0]]
            if graph.values[value].dtype is torch.bool and read.dtype is not torch.bool:
                assert source.node is not None
                ignored = source.node.args[1] if names[-1] == "ne" else 0
                if names[-1] not in ("ne", "to", "_to_copy") or not isinstance(ignored, int):
                    break
                rest = set(names[:-1]) <= {"sum", "to", "_to_copy"} and names.count("sum") == 1
                return self._weighted(source.inputs[0], ignored) if rest else Merged(how="each")
            value = source.inputs[0]
        return Merged(how="each")

    def _weighted(self, target: int, ignored: int) -> Merged:
        """A mean over the labels that count, where an input says how many those of a part are."""
        labels = counted_labels(self.walk.graph, target, ignored)
        return Merged(how="each") if labels is None else Merged(how="weighted", labels=labels)

    def _number(self, op: Op) -> float | int | None:
        """What an op divides by, if it says nothing else."""
        assert op.node is not None
        last = op.node.args[1] if len(op.node.args) == 2 and not op.node.kwargs else None
        return last if isinstance(last, (int, float)) else None

    def _over(self, value: int, dim: Any, *, mean: bool) -> Merged | None:
        """A sum or a mean over dimensions of a tensor all of whose elements belong to a sample."""
        axes = self.walk.axes(value)
        dims = dims_of(dim, len(axes)) if axes else []
        along = any(covers(axes[d], self.walk.batch) for d in dims)
        if self.walk.state(value) != "apart" or not along or self._grows(value, dims):
            return None
        return Merged(how="mean" if mean else "sum")

    def _grows(self, value: int, dims: Sequence[int]) -> bool:
        """Whether a sample has more elements along some dimensions for a larger batch."""
        axes, longer = self.walk.axes(value), self.walk.longer(value)
        return any(longer[d] and not covers(axes[d], self.walk.batch) for d in dims)

    def _loss(self, op: Op, given: Sequence[State], name: str) -> Merged | None:
        arguments = arguments_of(op)
        reduction = arguments.get("reduction", MEAN)
        if reduction not in (MEAN, SUM) or "mixed" in given:
            return None
        if any(self._grows(value, range(len(self.walk.axes(value)))) and state == "apart"
               for value, state in zip(op.inputs, given, strict=True)):  # fmt: skip
            return None
        axes = [self.walk.axes(value) for value in op.inputs]
        shapes = [self.walk.graph.values[value].shape for value in op.inputs]
        by_number = name in CLASSES and not self.walk.graph.values[op.inputs[1]].dtype.is_floating_point
        if name in CLASSES:
            if given[2:] not in ([], ["shared"]):
                return None
            del axes[2:], shapes[2:]  # how much a class weighs, which no sample decides
        if by_number:
            x, target = shapes
            if len(x) < 2 or target != (x[0], *x[2:]):
                return None
            axes[0], shapes[0] = (axes[0][0], *axes[0][2:]), target
        made: list[Axes] = []
        mixed = self.walk.mixes(lambda: made.append(broadcast(self.walk.walk, axes, shapes)))
        once = sum(times(axis, self.walk.batch) for axis in made[0]) == 1  # twice: each sample with each
        if mixed or not once or not any(covers(axis, self.walk.batch) for axis in made[0]):
            return None
        if reduction == SUM or not by_number:
            return Merged(how="sum" if reduction == SUM else "mean")
        if len(given) > 2:
            return Merged(how="each")
        return self._weighted(op.inputs[1], int(arguments.get("ignore_index", -100)))


def counted_labels(graph: ModelGraph, target: int, ignored: int) -> tuple[int, int, int] | None:
    """(place in `graph.inputs`, number that does not count, how many of the first are left out) of a loss.

    The elements of what it compares with, `target`, must be those of an input, each once, in any order, and numbers
    that do not count; of the input, the first one of each row may be left out. Found by doing the views, paddings and
    casts in between to numbers that all differ. None where any of them is written into.
    """
    chain = [target]
    while (op := sole_maker(graph, chain[0])) is not None and len(op.inputs) == 1:
        chain.insert(0, op.inputs[0])
    if chain[0] not in graph.inputs:
        return None
    place = graph.inputs.index(chain[0])
    shape = graph.values[chain[0]].shape
    first = 1_000_000  # no label that is left out is as large
    numbers = torch.arange(first, first + torch.Size(shape).numel()).reshape(shape)
    seen = numbers
    for value in chain[1:]:
        op = graph.ops[graph.values[value].op]
        assert op.node is not None
        name = name_of(op)
        if name not in SAME | RESHAPES | MOVES | JOINS:
            return None
        if name in ("to", "_to_copy", "dropout", "bernoulli"):
            if name not in ("to", "_to_copy") or graph.values[value].dtype not in (torch.int64, torch.int32):
                return None
            continue
        if any(isinstance(part, torch.fx.Node) for part in op.node.args[1:]):
            return None
        made = op.target(seen, *op.node.args[1:], **op.node.kwargs)
        seen = made if isinstance(made, torch.Tensor) else made[op.outputs.index(value)]
    used = seen[seen >= first]
    if bool((seen[seen < first] != ignored).any()) or len(used) != len(used.unique()):
        return None
    for skipped in (0, 1):
        wanted = numbers[..., skipped:].flatten()
        if len(used) == len(wanted) and bool((used.sort().values == wanted.sort().values).all()):
            return place, ignored, skipped
    return None


def is_so_much_per_row(walk: BatchAxes, value: int) -> bool:
    """Whether a number is a sum over rows of which each adds the same, whatever they are."""
    graph = walk.graph
    op = _converted(graph, value)
    if op is None or name_of(op) != "sum" or len(op.inputs) != 1 or graph.values[op.outputs[0]].shape or op.mutates:
        return False
    source = op.inputs[0]
    mine, other = (torch.Size(one.values[source].shape).numel() for one in (graph, walk.other))
    if not walk.is_the_same(source) or not mine or Fraction(other, mine) != Fraction(walk.other_rows, walk.rows):
        return False
    if any(overwritten_by(graph, one, [source]) for one in graph.ops[op.index :]):
        return False  # what it holds now is not what was summed
    made_of = ops_behind(graph, _unordered(walk, source), writes=True)
    return all(isinstance(one.target, OpOverload) and not traits_of(one.target).random for one in made_of)


def _converted(graph: ModelGraph, value: int) -> Op | None:
    """The op that makes a value, which may have been given another type since."""
    return sole_maker(graph, origin(graph, value, "to", "_to_copy", "alias", "detach"))


def _unordered(walk: BatchAxes, value: int) -> int:
    """The table whose elements along a dimension a value has in another order in each row; else the value."""
    graph = walk.graph
    op = sole_maker(graph, value)
    if op is None or name_of(op) != "gather" or op.node is None or len(op.inputs) != 2 or op.mutates:
        return value
    table, index = op.inputs
    order, dim = _converted(graph, index), op.node.args[1]
    if order is None or order.node is None or name_of(order) != "sort":
        return value
    shape = graph.values[table].shape
    along = arguments_of(order)["dim"]
    if not isinstance(dim, int) or not isinstance(along, int) or isinstance(along, bool) or not shape:
        return value
    same = graph.values[index].shape == shape and along % len(shape) == dim % len(shape)
    longer = walk.longer(table)
    return table if same and not longer[dim % len(shape)] and order.outputs[-1] != table else value

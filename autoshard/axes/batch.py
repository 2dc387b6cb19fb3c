"""The batch among the axes of a whole run: which inputs and outputs have its factor, and what works along it.

    ids [2 = b, 8] ─▶ embedding ─▶ [b, 8, 64] ─▶ … ─▶ logits [b, 8, 300]         a factor b, from an input to an output

One walk over all ops of a graph that was captured with `composite=True`. An op that blocks the factor need not mix rows
(a sort by expert that is undone behind it): that is for `check.independence` to say.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.axes.axis import Factor, describe, factors_of, resolve
from autoshard.axes.batch_merges import CLASSES, LOSSES
from autoshard.axes.batch_rules import FOR_REPLICAS
from autoshard.axes.walk import AxisWalk, walk_over
from autoshard.capture.graph import name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One factor of an input, followed through the run.

    Attributes:
        inputs, outputs: (place in `graph.inputs` or `graph.outputs`, dimension, axis with the factor starred).
        parameter: a parameter or buffer that has the factor, "" if none does.
        unshardable: whether something works along it: orders it, picks from it, mixes it.
    """

    inputs: tuple[tuple[int, int, str], ...]
    outputs: tuple[tuple[int, int, str], ...]
    parameter: str
    unshardable: bool


def follow(walk: AxisWalk, value: int, dim: int) -> Rows | None:
    """Follow the major factor of a dimension of a value.

    None where there is none, as in one of size 1, or of which some op took the first rows.
    """
    axes = walk.axes.get(value, ())
    factor = next(iter(resolve(axes[dim])), None) if dim < len(axes) else None
    if not isinstance(factor, Factor):
        return None
    graph = walk.graph
    return Rows(
        inputs=tuple(_found(walk, graph.inputs, factor)),
        outputs=tuple(_found(walk, graph.outputs, factor)),
        parameter=next((tensor.name for tensor in graph.tensors if walk.cut_dims(tensor.value, factor)), ""),
        unshardable=any(
            factor in factors_of(axis) and name_of(graph.ops[op]) not in LOSSES | CLASSES for op, axis in walk.blocks
        ),
    )


def batch_dim(walk: AxisWalk) -> int:
    """The dimension of the inputs that may be the batch: the second where something works along the first alone.

    Recurrent and attention layers of torch take (time, batch, …) unless they are told otherwise.
    """
    if not any(rows.unshardable for rows in _rows(walk, 0)):
        return 0
    walk = walk_over(walk.graph, walk.graph.ops, FOR_REPLICAS)
    ordered, second = any(rows.unshardable for rows in _rows(walk, 0)), _rows(walk, 1)
    return int(ordered and bool(second) and not any(rows.unshardable or rows.parameter for rows in second))


def _rows(walk: AxisWalk, dim: int) -> list[Rows]:
    return [rows for value in walk.graph.inputs if (rows := follow(walk, value, dim))]


def _found(walk: AxisWalk, values: Sequence[int], factor: Factor) -> Iterator[tuple[int, int, str]]:
    for place, value in enumerate(values):
        for dim in walk.cut_dims(value, factor):
            yield place, dim, describe(walk.axes[value][dim], factor)

"""The batch among the axes of a whole run: which inputs and outputs have its leaf, and what works along it.

    ids [2 = b, 8] ─▶ embedding ─▶ [b, 8, 64] ─▶ … ─▶ logits [b, 8, 300]         a leaf b, from an input to an output

One walk over all ops of a graph that was captured with `composite=True`. An op that blocks the leaf need not mix rows
(a sort by expert that is undone behind it): that is for `check.independence` to say.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.axes.axis import Factor, describe, leaves, resolve
from autoshard.axes.walk import AxisWalk
from autoshard.capture.graph import ModelGraph, name_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One leaf of an input, followed through the run.

    Attributes:
        inputs, outputs: (place in `graph.inputs` or `graph.outputs`, dimension, axis with the leaf starred).
        parameter: a parameter or buffer that has the leaf, "" if none does.
        blocked: whether something works along it: orders it, picks from it, mixes it.
    """

    leaf: Factor
    inputs: tuple[tuple[int, int, str], ...]
    outputs: tuple[tuple[int, int, str], ...]
    parameter: str
    blocked: bool


def follow(walk: AxisWalk, value: int, dim: int) -> Rows | None:
    """Follow the major leaf of a dimension of a value; None where there is none, as in one of size 1, or of which some
    op took the first rows."""
    axes = walk.axes.get(value, ())
    factor = next(iter(resolve(axes[dim])), None) if dim < len(axes) else None
    leaf = factor if isinstance(factor, Factor) else None
    if leaf is None:
        return None
    graph = walk.graph
    return Rows(
        leaf=leaf,
        inputs=tuple(_found(walk, graph.inputs, leaf)),
        outputs=tuple(_found(walk, graph.outputs, leaf)),
        parameter=next((tensor.name for tensor in graph.tensors if walk.cut_dims(tensor.value, leaf)), ""),
        blocked=any(leaf in leaves(axis) and not _is_loss(graph, op) for op, axis in walk.blocks),
    )


def _is_loss(graph: ModelGraph, op: int) -> bool:
    return name_of(graph.ops[op]).startswith(("cross_entropy_loss", "nll_loss"))


def _found(walk: AxisWalk, values: Sequence[int], leaf: Factor) -> Iterator[tuple[int, int, str]]:
    for place, value in enumerate(values):
        for dim in walk.cut_dims(value, leaf):
            yield place, dim, describe(walk.axes[value][dim], leaf)

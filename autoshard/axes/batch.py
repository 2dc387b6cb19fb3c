"""The batch among the axes of a whole run: which inputs and outputs have its leaf, and what works along it.

    ids [2 = b, 8] ─▶ embedding ─▶ [b, 8, 64] ─▶ … ─▶ logits [b, 8, 300]         a leaf b, from an input to an output

One walk over all ops of a graph that was captured with `composite=True`. An op that blocks the leaf need not mix rows
(a sort by expert that is undone behind it): that is for `check.independence` to say.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from autoshard.axes.axis import Axis, Leaf, describe, leaves, resolve
from autoshard.axes.walk import Walk, where
from autoshard.capture.graph import ModelGraph, name_of

_LOSSES = ("cross_entropy_loss", "nll_loss")
IGNORED = -100
"""The label that does not count where nothing else is said, as in `torch.nn.functional.cross_entropy`."""


@dataclass(slots=True)
class BatchWalk(Walk):
    """A walk that remembers every axis an op blocked, and not only the first reason of each leaf."""

    blocks: list[tuple[int, Axis, str]] = field(default_factory=list)

    def block(self, axes: Iterable[Axis], what: str = "") -> None:
        axes = [axis for axis in axes if axis]
        self.blocks += [(self._op, axis, f"{self.why}{': ' if what else ''}{what}") for axis in axes]
        super(BatchWalk, self).block(axes, what)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """One leaf of an input, followed through the run.

    Attributes:
        inputs, outputs: (place in `graph.inputs` or `graph.outputs`, dimension, axis with the leaf starred).
        parameter: a parameter or buffer that has the leaf, "" if none does.
        blocked: (op, reason) of what works along it, in the order of the run.
        summed: (op, reason) of what takes a sum or a mean over it.
    """

    leaf: Leaf
    inputs: tuple[tuple[int, int, str], ...]
    outputs: tuple[tuple[int, int, str], ...]
    parameter: str
    blocked: tuple[tuple[int, str], ...]
    summed: tuple[tuple[int, str], ...]


def walk_all(graph: ModelGraph) -> BatchWalk:
    """Give axes to every value of a run."""
    walk = BatchWalk(graph)
    for op in graph.ops:
        walk.run(op)
    walk.resolve_all()
    return walk


def follow(walk: BatchWalk, value: int, dim: int) -> Rows | None:
    """Follow the major leaf of a dimension of a value; None where there is none, as in one of size 1, or of which some
    op took the first rows."""
    axes = walk.axes.get(value, ())
    factor = next(iter(resolve(axes[dim])), None) if dim < len(axes) else None
    leaf = factor if isinstance(factor, Leaf) else None
    if leaf is None:
        return None
    graph = walk.graph
    losses = {op.index for op in graph.ops if name_of(op).startswith(_LOSSES)}
    blocked = [(op, why) for op, axis, why in walk.blocks if leaf in leaves(axis)]
    summed = [(c.op, where(graph, graph.ops[c.op])) for c in walk.contractions if leaf in leaves(c.axis)]
    return Rows(
        leaf=leaf,
        inputs=tuple(_found(walk, graph.inputs, leaf)),
        outputs=tuple(_found(walk, graph.outputs, leaf)),
        parameter=next((tensor.name for tensor in graph.tensors if walk.cut_dims(tensor.value, leaf)), ""),
        blocked=tuple((op, why) for op, why in blocked if op not in losses),
        summed=tuple(sorted({*summed, *((op, why) for op, why in blocked if op in losses)})),
    )


def _found(walk: BatchWalk, values: Sequence[int], leaf: Leaf) -> Iterator[tuple[int, int, str]]:
    for place, value in enumerate(values):
        for dim in walk.cut_dims(value, leaf):
            yield place, dim, describe(walk.axes[value][dim], leaf)


def labels_of(graph: ModelGraph) -> Iterator[tuple[int, int]]:
    """Integers that a loss compares with: (place in `graph.inputs`, the label that does not count)."""
    found = {}
    for op in graph.ops:
        if not name_of(op).startswith(_LOSSES) or len(op.inputs) < 2 or op.node is None:
            continue
        arguments = op.target._schema.arguments
        names = [argument.name for argument in arguments]
        given = {**dict(zip(names, op.node.args, strict=False)), **op.node.kwargs}
        source = _source(graph, op.inputs[1])
        if source in graph.inputs:
            found[graph.inputs.index(source)] = int(given.get("ignore_index", IGNORED))
    yield from found.items()


def _source(graph: ModelGraph, value: int) -> int:
    """Where the numbers of a value come from, through views, paddings and casts."""
    while graph.values[value].op >= 0:
        inputs = graph.ops[graph.values[value].op].inputs
        if len(inputs) != 1:
            break
        value = inputs[0]
    return value

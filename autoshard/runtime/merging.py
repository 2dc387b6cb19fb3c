"""Putting the outputs of parts of a batch together, as a `BatchAxis` says; `chunks` makes the parts.

loss []      weighted by how many labels count in a part, or by its rows
logits       one part after the other
cache        an object: every part made its own, and any use of it says so
"""

import enum
import re
from collections.abc import Sequence
from typing import Any

import numpy
import torch

from autoshard.errors import PlanError
from autoshard.nested import join_leaves, tensors_within
from autoshard.plan.batching import BatchAxis, BatchOutput
from autoshard.plan.sharding import coordinates_of, kept
from autoshard.runtime.chunks import AS_CALLED, PLAIN, BatchPart, axis_with


def merge(batch: BatchAxis, outputs: Sequence[Any], parts: Sequence[BatchPart]) -> Any:
    """Put the outputs of the parts together, nested as each of them is; gradients go back to the parts.

    Numbers and strings must be the same in all. Raises `PlanError` for what the plan doesn't know.
    """
    if len(outputs) == 1:
        return outputs[0]
    try:
        return join_leaves(list(outputs), _Join(batch, parts))
    except ValueError as error:
        raise PlanError(
            f"the outputs of parts of the batch can't be put together: {error}. Plan with num_microbatches=1."
        ) from None


def without_history(output: Any) -> Any:
    """The output of one part with tensors that hold no graph, and without objects that may (a cache)."""

    def light(path: str, leaves: list[Any]) -> Any:
        leaf = leaves[0]
        if isinstance(leaf, torch.Tensor):
            return leaf.detach()
        holds = not isinstance(leaf, (*PLAIN, Unmerged)) and next(tensors_within(leaf), None) is not None
        return Unmerged(path, type(leaf).__name__) if holds else leaf

    return join_leaves([output], light)


class _Join:
    """Joins leaves of outputs; what is twice in the outputs of each part is one thing afterwards, too."""

    def __init__(self, batch: BatchAxis, parts: Sequence[BatchPart]) -> None:
        self.batch, self.parts = batch, parts
        self.known = {one.path: one for one in batch.outputs}
        self.made: dict[tuple[int, ...], Any] = {}

    def __call__(self, path: str, leaves: list[Any]) -> Any:
        if isinstance(leaves[0], PLAIN):
            return _same(path, leaves)
        same = tuple(map(id, leaves))
        if same not in self.made:
            if isinstance(leaves[0], torch.Tensor):
                self.made[same] = _joined(self.batch, self.known.get(path), path, leaves, self.parts)
            else:
                self.made[same] = _object(path, leaves)
        return self.made[same]


def part_weights(how: BatchOutput, parts: Sequence[BatchPart]) -> list[float]:
    """What each part's value of a merged output is multiplied with before all are added up."""
    if how.how == "sum":
        return [1.0] * len(parts)
    sizes = [part.labels[how.weights] if how.how == "weighted" else part.rows for part in parts]
    if not any(sizes):  # torch gives NaN for the mean of nothing, and so do all the parts
        sizes = [1] * len(parts)
    return [size / sum(sizes) for size in sizes]


def _joined(
    batch: BatchAxis, how: BatchOutput | None, path: str, tensors: list[torch.Tensor], parts: Sequence[BatchPart]
) -> torch.Tensor:
    """One tensor of the output from those of the parts."""
    if how is None:
        raise PlanError(
            f"the output {path or 'of the model'} was not there at planning, so nobody knows how to put its parts "
            f"together. {AS_CALLED}"
        )
    if how.how == "same":
        return tensors[0]
    if how.how == "cat":
        return _concatenated(batch, how, tensors, [part.rows for part in parts])
    if how.how == "weighted" and not any(how.weights in part.labels for part in parts):
        raise PlanError(f"the output {path} is weighted by {how.weights}, which this call does not give.")
    weights = part_weights(how, parts)
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else tensors[0].dtype
    terms = [
        tensor.to(wide) if how.how == "sum" else tensor.to(wide) * weight
        for tensor, weight in zip(tensors, weights, strict=True)
        if weight  # a part without a label has a loss of NaN
    ]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total.to(tensors[0].dtype)


def _concatenated(batch: BatchAxis, how: BatchOutput, tensors: list[torch.Tensor], rows: list[int]) -> torch.Tensor:
    """The parts one after the other, or between one another where the batch is not the major factor."""
    sizes = [tensor.shape[how.dim] if tensor.dim() > how.dim else 0 for tensor in tensors]
    axes = [axis_with(how.axis, own, size) for own, size in zip(rows, sizes, strict=True)]
    shapes = {(*tensor.shape[: how.dim], *tensor.shape[how.dim + 1 :]) for tensor in tensors}
    if len(shapes) > 1:
        listed = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise PlanError(
            f"the parts of the output {how.path or 'of the model'} can't be put together along dimension {how.dim}: "
            f"they have the shapes {listed}. Some models make them as long as the longest row needs; apply a plan "
            "without micro-batches, or give rows that need the same length."
        )
    if None in axes:
        raise PlanError(
            f"the output {how.path or 'of the model'} has {sizes} in dimension {how.dim} for parts of {rows} rows, "
            f"which does not go with the plan ({how.axis}). Plan with inputs of the shapes that the model is called "
            "with."
        )
    whole = torch.cat(tensors, how.dim)
    first = axes[0] or ""
    axis = re.sub(r"\*\d+", f"*{sum(rows)}", first)
    source = numpy.empty(len(coordinates_of(axis)), dtype=numpy.int64)
    begin = sum(sizes)
    for part in reversed(range(len(rows))):  # what every part has is that of the first
        begin -= sizes[part]
        source[kept(axis, tuple(rows), part)] = begin + numpy.arange(sizes[part])
    if len(source) == whole.shape[how.dim] and (numpy.diff(source) == 1).all():
        return whole
    return whole.index_select(how.dim, torch.from_numpy(source).to(whole.device))


class Unmerged:
    """In place of an object with state (a cache), of which every part made its own: any use of it says so."""

    def __init__(self, path: str, name: str) -> None:
        self._said = path, name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise self._error()

    def _error(self) -> PlanError:
        path, name = self._said
        return PlanError(
            f"the output {path} is a {name} of which every part of the batch made its own. Tell the model not to make "
            "it, or plan with num_microbatches=1."
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(self._said)})"


def of_rows(leaf: Any) -> str:
    """What a leaf of an output is, where that of the whole batch can't be told from those of parts; "" if it can."""
    if isinstance(leaf, (torch.Tensor, enum.Enum)):
        return ""
    if isinstance(leaf, (bool, int, float, complex, slice, range)):
        return f"{leaf!r}, which may be that of the rows of a part"
    if isinstance(leaf, (*PLAIN, Unmerged)) or next(tensors_within(leaf), None) is not None:
        return ""
    return f"a {type(leaf).__name__}, in which nobody knows what belongs to the rows of a part"


def _same(path: str, leaves: list[Any]) -> Any:
    """What is no tensor must be the same in all parts, and no number: that of a part may count its rows."""
    first = leaves[0]
    if of_rows(first):
        raise ValueError(f"{path or 'the output'} is {of_rows(first)}")
    if any(type(leaf) is not type(first) or (leaf != first and leaf == leaf) for leaf in leaves):
        raise ValueError(f"{path} is {first!r} in one and something else in another")
    return first


def _object(path: str, leaves: list[Any]) -> Any:
    """An object that is the same in all parts, else one that says that each made its own.

    Raises ValueError for one without any tensor, of which nothing was compared: a count of its part's rows, perhaps.
    """
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first
    if of_rows(first):
        raise ValueError(f"{path or 'the output'} is {of_rows(first)}")
    return first if isinstance(first, Unmerged) else Unmerged(path, type(first).__name__)

"""Dividing a call into parts of its batch, as a `BatchAxis` says; `merging` puts the outputs of the parts together.

    model(ids [10, S], mask=[10, S], position_ids=[1, S])
      part 0   ids[0:3]   mask[0:3]   position_ids
      part 1   ids[3:6]   mask[3:6]   position_ids
      part 2   ids[6:8]   mask[6:8]   position_ids
      part 3   ids[8:10]  mask[8:10]  position_ids

Parts of a dimension in which the batch is the major factor are views. Of any other ("3x*8": three times the whole
batch) they are copies.
"""

import enum
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy
import torch
from torch import nn

from autoshard.errors import PlanError
from autoshard.nested import leaves_in, replace_at, tensor_at, tensors_in
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.plan.sharding import coordinates_of, even_shares, kept

PLAIN = (
    bool, int, float, complex, str, bytes, enum.Enum, slice, range, type(None), type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format,
)  # fmt: skip
"""Arguments that every part is given as they are."""
_KNOWN = (torch.Tensor, *PLAIN)
AS_CALLED = "Plan with the inputs that the model is called with: inputs=."


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchPart:
    """The call of the model on some rows of the batch.

    `labels`: path of an input -> how many elements of it count in this part, for outputs that are weighted by them.
    """

    args: tuple
    kwargs: dict[str, Any]
    rows: int
    labels: Mapping[str, int]


def bind(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Name the arguments of a call of the model by the parameters of its forward; those of *args and **kwargs by these.

    Raises TypeError as the call would.
    """
    return dict(inspect.signature(model.forward).bind(*args, **kwargs).arguments)


def caller_like(
    model: nn.Module, args: tuple, kwargs: Mapping[str, Any]
) -> Callable[[Mapping[str, Any]], tuple[tuple, dict[str, Any]]]:
    """Return what undoes `bind` for other values: by position what was given so here, by name what was given by name.

    Hooks of the user's, and what is wrapped around a forward, look for arguments where the caller puts them.
    """
    signature = inspect.signature(model.forward)
    by_position = signature.bind_partial(*args).arguments

    def call(bound: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
        given = signature.bind(*args, **kwargs)
        given.arguments.update(bound)
        named: dict[str, Any] = {}
        for name in [name for name in given.arguments if name not in by_position]:
            value = given.arguments.pop(name)
            various = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
            named.update(value if various else {name: value})
        return given.args, named

    return call


def count_rows(batch: BatchAxis, bound: Mapping[str, Any]) -> int:
    """How many rows the batch of a call has. Raises `PlanError` where its inputs disagree, or none has any."""
    found: dict[str, int] = {}
    for item in batch.inputs:
        tensor = tensor_at(bound, item.path)
        if tensor is not None:
            _check_dim(tensor, item)
            if item.axis == f"*{batch.size}":  # of others, what is not the batch may have grown as well
                found[item.path] = tensor.shape[item.dim]
    if not found:
        for item in batch.inputs:
            tensor, length = tensor_at(bound, item.path), len(coordinates_of(item.axis))
            if tensor is not None and tensor.shape[item.dim] * batch.size % length == 0:
                found[item.path] = tensor.shape[item.dim] * batch.size // length
    if not found:
        wanted = ", ".join(item.path for item in batch.inputs)
        raise PlanError(f"the batch of this plan is divided along {wanted}, of which this call gives none. {AS_CALLED}")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{path} has {rows}" for path, rows in found.items())
        raise PlanError(f"the inputs differ in how many rows of the batch they have: {listed}. Give all of them alike.")
    return next(iter(found.values()))


def state_in(bound: Mapping[str, Any]) -> str:
    """Name an argument that is neither a tensor nor a plain value (a cache, which belongs to all rows), "" if none."""
    leaves = leaves_in(dict(bound))
    return next((f"{path}, a {type(leaf).__name__}" for path, leaf in leaves if not isinstance(leaf, _KNOWN)), "")


def unlike(batch: BatchAxis, model: nn.Module, bound: Mapping[str, Any]) -> str:
    """Say in what a call is not of the kind that was shown to be divisible, "" if in nothing."""
    if batch.written and not batch.assumed:  # in plans of earlier versions
        return f"the forward writes into {batch.written[0]}, and each part would do so again"
    known = {*(item.path for item in batch.inputs), *batch.whole}
    more = [path for path, _ in tensors_in(dict(bound)) if path not in known]
    if more:
        return f"the plan was made without the argument {more[0]}"
    given, planned = set(plain_arguments(model, bound)), set(batch.plain)
    if given != planned:
        return f"the plan was made with {_listed(planned - given)}, and this call has {_listed(given - planned)}"
    for path, _, sizes in (shape.rpartition("=") for shape in batch.shapes):
        tensor, planned_sizes = tensor_at(bound, path), [one for one in sizes.split(",") if one]
        if tensor is not None and (
            tensor.dim() != len(planned_sizes)
            or any(one == "1" and size != 1 for one, size in zip(planned_sizes, tensor.shape, strict=True))
        ):
            return f"{path} is of shape {list(tensor.shape)}, and the plan was made for [{sizes}]"
    return ""


def shapes_of(bound: Mapping[str, Any], divided: Collection[str]) -> tuple[str, ...]:
    """The tensors of a call as "name=*,*": other sizes are as good, other numbers of dimensions may mean other things.

    "mask=1,*,*": not of the size of the batch, with which one of several rows could be meant for each sample.
    """
    return tuple(
        f"{path}={','.join('1' if size == 1 and path not in divided else '*' for size in tensor.shape)}"
        for path, tensor in tensors_in(dict(bound))
    )


def plain_arguments(model: nn.Module, bound: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments of a call that are neither tensors nor what they are by default, as "name=value"."""
    defaults = {name: one.default for name, one in inspect.signature(model.forward).parameters.items()}
    return tuple(
        f"{path}={leaf!r}"
        for path, leaf in leaves_in(dict(bound))
        if isinstance(leaf, PLAIN) and leaf is not None and leaf != defaults.get(path)
    )


def split(
    batch: BatchAxis, model: nn.Module, args: tuple, kwargs: Mapping[str, Any], parts: int | Sequence[int]
) -> list[BatchPart]:
    """Divide a call into calls on parts of the batch.

    `parts`: how many, as alike as they go and the first ones larger (10 rows in 4: 3, 3, 2, 2), or the rows of each.
    Raises `PlanError` for what can't be divided, and for fewer rows than parts.
    """
    bound = bind(model, args, kwargs)
    state = state_in(bound)
    problem = f"nobody knows how to divide {state}" if state else unlike(batch, model, bound)
    if problem:
        raise PlanError(f"this call can't be divided along its batch: {problem}. {AS_CALLED}")
    rows = count_rows(batch, bound)
    if isinstance(parts, int):
        if rows < parts:
            raise PlanError(
                f"a batch of {rows} rows can't be divided into {parts} parts. Give at least {parts} rows, or plan "
                f"with num_microbatches={max(rows, 1)}."
            )
        shares = even_shares(rows, parts)
    else:
        shares = tuple(parts)
        if sum(shares) != rows:
            raise PlanError(f"the batch has {rows} rows, and its parts should have {list(shares)}: {sum(shares)}.")
    made, call = [], caller_like(model, args, kwargs)
    for part, count in enumerate(shares):
        own = bound
        for item in batch.inputs:
            tensor = tensor_at(bound, item.path)
            if tensor is not None:
                own = replace_at(own, item.path, piece_of(tensor, item, shares, part))
        own_args, own_kwargs = call(own)
        weighted = [one for one in batch.outputs if one.how == "weighted" and tensor_at(own, one.weights) is not None]
        labels = {one.weights: _labels(own, one) for one in weighted}
        made.append(BatchPart(args=own_args, kwargs=own_kwargs, rows=count, labels=labels))
    return made


def split_rows(value: Any, parts: Sequence[BatchPart], what: str) -> list[Any]:
    """Divide the tensors in a nested value along their first dimension, as the rows of the parts are.

    Raises `PlanError` unless their first size is a multiple of the rows in all. `what` names the value.
    """
    rows = sum(part.rows for part in parts)
    made = [value] * len(parts)
    for path, tensor in tensors_in(value):
        if tensor.dim() == 0 or tensor.shape[0] == 0 or tensor.shape[0] % rows:
            where = f"{what}.{path}" if path else what
            raise PlanError(
                f"{where} has the shape {list(tensor.shape)}, and the batch has {rows} rows: it is divided along its "
                "first dimension, which must have as many, or a multiple."
            )
        pieces = tensor.split([part.rows * (tensor.shape[0] // rows) for part in parts])
        made = [replace_at(own, path, piece) for own, piece in zip(made, pieces, strict=True)]
    return made


def _listed(values: set[str]) -> str:
    return ", ".join(sorted(values)) or "no other value"


def _check_dim(tensor: torch.Tensor, item: BatchInput) -> None:
    if tensor.dim() <= item.dim:
        raise PlanError(
            f"{item.path} has the shape {list(tensor.shape)}; the plan divides its dimension {item.dim}. Plan with "
            "inputs of the shapes that the model is called with."
        )


def piece_of(tensor: torch.Tensor, item: BatchInput | BatchOutput, shares: tuple[int, ...], part: int) -> torch.Tensor:
    """One part of a tensor whose batch is divided into `shares`: a view where its indices follow one another."""
    axis = axis_with(item.axis, sum(shares), tensor.shape[item.dim])
    if axis is None:
        raise PlanError(
            f"{item.path} has {tensor.shape[item.dim]} in its dimension {item.dim}, which does not go with a batch of "
            f"{sum(shares)} rows: at planning it was {item.axis}."
        )
    where = _indices(axis, shares, part)
    if isinstance(where, tuple):
        return tensor.narrow(item.dim, *where)
    return tensor.index_select(item.dim, torch.from_numpy(where).to(tensor.device))


@lru_cache(maxsize=1024)  # every step divides its batch in the same way
def _indices(axis: str, shares: tuple[int, ...], part: int) -> tuple[int, int] | numpy.ndarray:
    """What one part of a dimension has: (begin, length) where its indices follow one another."""
    indices = kept(axis, shares, part)
    begin = int(indices[0]) if len(indices) else 0
    return (begin, len(indices)) if len(indices) == 0 or indices[-1] - begin + 1 == len(indices) else indices


def axis_with(axis: str, rows: int, size: int) -> str | None:
    """The axis when the batch has other rows; what is beside the batch may have grown, too. None if it can't be.

    "3x*8", 2 rows of size 6 -> "3x*2"        "16x*8", 2 rows of size 10 -> "5x*2"
    """
    made = re.sub(r"\*\d+", f"*{rows}", axis)
    if len(coordinates_of(made)) == size:
        return made
    product = re.fullmatch(r"((?:\d+x)*)\*\d+((?:x\d+)*)", made)
    if product is None or bool(product[1]) == bool(product[2]) or rows == 0 or size % rows:
        return None
    return f"{size // rows}x*{rows}" if product[1] else f"*{rows}x{size // rows}"


def _labels(bound: Mapping[str, Any], how: BatchOutput) -> int:
    """How many labels of a part count."""
    labels = tensor_at(bound, how.weights)
    assert labels is not None
    return int((labels[..., how.skipped :] != how.ignored).sum())

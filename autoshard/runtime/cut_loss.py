"""Cross entropy of logits of which each rank has some classes or tokens, as a `DTensor`; see `axes.losses`.

    loss of a token  =  log(sum over ranks of exp(l))  -  logit of its label            l = log(sum of exp(own logits))

Each rank sends two numbers per token: l, and the label's logit if it has that class, else 0. The gradient is that of
these sums: the softmax of a rank's own logits times the part that they are of all, less 1 at the label.

Of tokens each rank has some losses, and sends the sum of them.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoshard.nested import map_tensors
from autoshard.runtime.collectives import Axis, ProcessRanks, Ranks, along, reduce, tracked
from autoshard.runtime.watches import innermost

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def is_awaited(ranks: Ranks) -> bool:
    """Whether a module is running that computes such a loss on these ranks, with gradients."""
    watch = innermost()
    return (
        torch.is_grad_enabled() and not torch.compiler.is_compiling() and isinstance(ranks, ProcessRanks)
        and getattr(watch, "has_loss", False) and getattr(watch, "ranks", None) is ranks
    )  # fmt: skip


def spread_tokens(part: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
    """Return logits of which each rank has some tokens: in parts if a loss of one sample is awaited, else whole.

    What code makes of several samples, one after the other, is in no order that a `DTensor` can have.
    """
    if math.prod(part.shape[:dim]) == 1 and tracked(part) and is_awaited(ranks):
        return spread(part, ranks, dim)
    return along(part, ranks, dim, "join")


def spread(part: torch.Tensor, ranks: Ranks, dim: int) -> torch.Tensor:
    """Return the whole of which this is a rank's part, as a tensor that stays in parts; all are equally large."""
    assert isinstance(ranks, ProcessRanks)
    mesh = DeviceMesh.from_group(ranks.group, part.device.type)
    return DTensor.from_local(part, mesh, [Shard(dim)], run_check=False)


def put_together(result: Any, axis: Axis) -> Any:
    """Return what a module gives with ordinary tensors in place of those in parts."""
    return map_tensors(result, lambda tensor: _whole(tensor, axis) if isinstance(tensor, DTensor) else tensor)


def _whole(tensor: DTensor, axis: Axis) -> torch.Tensor:
    dim = _dimension(tensor, axis)
    return tensor.full_tensor() if dim is None else axis.gather(tensor.to_local(), dim)


def _dimension(tensor: DTensor, axis: Axis) -> int | None:
    """The dimension along which each rank has its classes; None if it has tokens."""
    (place,) = tensor.placements
    return place.dim if isinstance(place, Shard) and tensor.shape[place.dim] == axis.where.size else None


def cross_entropy(call: Callable[..., torch.Tensor], axis: Axis, args: tuple, kwargs: dict) -> torch.Tensor:
    """Carry out one call of `torch.nn.functional.cross_entropy`; of other logits than those in parts, as it is."""
    given = dict(zip(_NAMES, args, strict=False)) | kwargs
    logits, labels = given["input"], given["target"]
    if not isinstance(logits, DTensor):
        return call(*args, **kwargs)
    classes = min(1, logits.dim() - 1)
    old = any(given.get(name) is not None for name in ("weight", "size_average", "reduce"))
    (place,) = logits.placements
    if old or labels.is_floating_point() or not isinstance(place, Shard) or not labels.dim():
        return call(**(given | {"input": _whole(logits, axis)}))
    if place.dim != classes:
        return _of_tokens(call, place.dim, axis, given)
    if _dimension(logits, axis) != classes:
        return call(**(given | {"input": _whole(logits, axis)}))
    ignored = labels == given.get("ignore_index", -100)
    part = _local(logits)
    losses = _losses(part, labels.masked_fill(ignored, 0), axis, classes, given)
    losses = losses.masked_fill(ignored, 0)
    if not torch.is_autocast_enabled(part.device.type):  # which computes losses in float32
        losses = losses.to(logits.dtype)
    reduction = given.get("reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


def _local(logits: DTensor) -> torch.Tensor:
    """This rank's part of logits, in float32 at least."""
    part = logits.to_local()
    return part if part.dtype in (torch.float32, torch.float64) else part.float()


def _of_tokens(call: Callable[..., torch.Tensor], dim: int, axis: Axis, given: dict) -> torch.Tensor:
    """The loss where each rank has the logits of as many tokens, one rank's after the other's along `dim`."""
    logits, labels, ranks = given["input"], given["target"], axis.ranks
    part, along_labels = _local(logits), dim - (dim > 1)
    if labels.shape[along_labels] != logits.shape[dim]:
        return call(**(given | {"input": _whole(logits, axis)}))  # which says so
    own = labels.narrow(along_labels, (ranks.rank or 0) * part.shape[dim], part.shape[dim])
    reduction = given.get("reduction", "mean")
    each = "none" if reduction == "none" else "sum"
    losses = call(**(given | {"input": part, "target": own, "reduction": each}))
    if reduction == "none":
        losses = along(losses, ranks, along_labels, "join")
    else:
        losses = reduce(losses, ranks, fresh=True)
    if reduction == "mean":
        losses = losses / (labels != given.get("ignore_index", -100)).sum()
    return losses if torch.is_autocast_enabled(part.device.type) else losses.to(logits.dtype)


def _losses(part: torch.Tensor, labels: torch.Tensor, axis: Axis, classes: int, given: dict) -> torch.Tensor:
    """One loss per label, of this rank's classes of the logits, in float32."""
    places, missing = axis.rows(labels)
    own = part.gather(classes, places.unsqueeze(classes)).squeeze(classes).masked_fill(missing, 0)
    smoothing = given.get("label_smoothing", 0.0)
    rows = [part.logsumexp(classes), own, *([part.sum(classes)] if smoothing else [])]
    ranks = axis.ranks.size
    each = Axis.of(axis.ranks, f"*{ranks}", (1,) * ranks).gather(torch.stack(rows)[None], 0)
    total = each[:, 0].logsumexp(0)
    losses = total - each[:, 1].sum(0)
    if smoothing:
        losses = (1 - smoothing) * losses + smoothing * (total - each[:, 2].sum(0) / axis.where.size)
    return losses

"""Cross entropy of logits of which each rank has some classes, as a `DTensor`; see `axes.loss`.

    loss of a token  =  log(sum over ranks of exp(l))  -  logit of its label            l = log(sum of exp(own logits))

Each rank sends two numbers per token: l, and the label's logit if it has that class, else 0. The gradient is that of
these sums: the softmax of a rank's own logits times the part that they are of all, less 1 at the label.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from autoshard import torch_private
from autoshard.nested import map_tensors
from autoshard.runtime.collectives import Axis, ProcessRanks, Ranks

_NAMES = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def is_awaited(ranks: Ranks) -> bool:
    """Whether a module is running that computes such a loss on these ranks, with gradients."""
    watch = torch_private.innermost_function_mode()
    return (
        torch.is_grad_enabled() and not torch.compiler.is_compiling() and isinstance(ranks, ProcessRanks)
        and getattr(watch, "has_loss", False) and getattr(watch, "ranks", None) is ranks
    )  # fmt: skip


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
    """The dimension along which each rank has its classes; None if the tensor is in other parts."""
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
    if old or labels.is_floating_point() or _dimension(logits, axis) != classes:
        return call(**(given | {"input": _whole(logits, axis)}))
    ignored = labels == given.get("ignore_index", -100)
    part = logits.to_local()
    part = part if part.dtype in (torch.float32, torch.float64) else part.float()
    losses = _losses(part, labels.masked_fill(ignored, 0), axis, classes, given)
    losses = losses.masked_fill(ignored, 0)
    if not torch.is_autocast_enabled(part.device.type):  # which computes losses in float32
        losses = losses.to(logits.dtype)
    reduction = given.get("reduction", "mean")
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (~ignored).sum()


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

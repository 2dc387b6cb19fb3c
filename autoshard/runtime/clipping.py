"""The norm of all gradients, where some of them are parts: what `torch.nn.utils.clip_grad_norm_` must divide by.

    each rank has      |whole gradients|     |its parts|
    the norm is        p-norm of             |whole gradients|, |parts of rank 0|, |parts of rank 1|, …

torch asks one function for it, which is replaced while a cut model lives. Otherwise every rank would scale by another
number, and what is replicated would drift apart.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.runtime.collectives import Ranks, layout
from autoshard.runtime.slices import CutTensor

Cuts = dict[str, CutTensor]
_models: "list[tuple[weakref.ref[nn.Module], Cuts, Ranks]]" = []


def watch_norms(model: nn.Module, cuts: Cuts, ranks: Ranks) -> None:
    """Let norms take the cuts of a model into account until `forget_norms`, or until it is gone."""
    if any(reference() is model for reference, _, _ in _models):
        return
    if not _models:
        torch_private.replace_total_norm(_total_norm)
    _models.append((weakref.ref(model, _clean), cuts, ranks))


def forget_norms(model: nn.Module) -> None:
    """Undo `watch_norms`."""
    _models[:] = [entry for entry in _models if entry[0]() is not model]
    _clean(None)


def _clean(reference: Any) -> None:
    _models[:] = [entry for entry in _models if entry[0]() is not None]
    if not _models:
        torch_private.replace_total_norm(None)


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    total = torch_private.total_norm
    for reference, cuts, ranks in list(_models):
        model = reference()
        parts = _gradients(model, cuts) if model is not None else {}
        here = [(tensor, parts[id(tensor)]) for tensor in given if id(tensor) in parts]
        if not here:
            continue
        rest = [tensor for tensor in given if id(tensor) not in parts]
        norms = [torch.linalg.vector_norm(_counted(*one, ranks), norm_type) for one in here]
        local = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), norm_type)
        slots = ranks.own(tuple(torch.eye(ranks.size)[rank] for rank in range(ranks.size))).to(
            local.device, local.dtype
        )
        every = ranks.all_reduce(slots * local)
        found = torch.linalg.vector_norm(torch.cat([every, total(rest, norm_type).reshape(1).to(every)]), norm_type)
        if error_if_nonfinite and not bool(found.isfinite()):
            raise RuntimeError(
                f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped."
            )
        return found
    return total(given, norm_type, error_if_nonfinite, foreach)


def _gradients(model: nn.Module, cuts: Cuts) -> dict[int, CutTensor]:
    """id of a gradient -> how its parameter is cut."""
    return {
        id(parameter.grad): cuts[name]
        for name, parameter in model.named_parameters()
        if name in cuts and parameter.grad is not None
    }


def _counted(gradient: torch.Tensor, cut: CutTensor, ranks: Ranks) -> torch.Tensor:
    """A gradient without what rank 0 has as well."""
    where = layout(cut.axis, cut.shares)
    if not len(where.common[0]):
        return gradient
    counts = [torch.ones(len(part)) for part in where.kept]
    for rank in range(1, ranks.size):
        counts[rank][torch.from_numpy(where.common[rank])] = 0
    shape = [1] * gradient.dim()
    shape[cut.dim] = -1
    return gradient * ranks.own(tuple(counts)).to(gradient.device, gradient.dtype).view(shape)

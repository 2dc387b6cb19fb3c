"""The norm of all gradients, where some of them are parts: what `torch.nn.utils.clip_grad_norm_` must divide by.

    each rank has      |whole gradients|     |its parts|
    the norm is        p-norm of             |whole gradients|, |parts of rank 0|, |parts of rank 1|, …

    in a pipeline        p-norm of             |gradients of position 0|, |gradients of position 1|, …      ties once

torch asks one function for it, which is replaced while such a model lives. Otherwise every rank would scale by another
number, and what is replicated would drift apart. So is the one that says whether gradients of a scaled loss are finite:
a step that one rank leaves out (`GradScaler`), all leave out.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard import torch_private
from autoshard.errors import RankError
from autoshard.runtime.collectives import ProcessRanks, Ranks, layout
from autoshard.runtime.elementwise import check_elementwise
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.sharded import alike_on, whole_of
from autoshard.runtime.slices import CutTensor

Cuts = dict[str, CutTensor]
_models: "list[tuple[weakref.ref[nn.Module], Cuts, Ranks]]" = []
_watching: list[Any] = []
_staged: "list[tuple[weakref.ref[nn.Module], PipelineRecord]]" = []
_steps: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
_FIRST_STEPS, _EVERY = 8, 16
"""In which steps gradients are compared between ranks."""
_SMALL, _ROUNDING = 1 << 16, 1e-3
"""Elements up to which a gradient is compared; how much its norm may differ, of itself."""


def watch_norms(model: nn.Module, cuts: Cuts, ranks: Ranks) -> None:
    """Let norms take the cuts of a model into account until `forget_norms`, or until it is gone."""
    if any(reference() is model for reference, _, _ in _models):
        return
    if not _models and not _staged:
        _replace(True)
    _models.append((weakref.ref(model, _clean), cuts, ranks))


def watch_staged_norms(model: nn.Module, record: PipelineRecord) -> None:
    """Let norms take the other positions of a pipeline into account until `forget_norms`, or until it is gone."""
    if any(reference() is model for reference, _ in _staged):
        return
    if not _models and not _staged:
        _replace(True)
    _staged.append((weakref.ref(model, _clean), record))


def forget_norms(model: nn.Module) -> None:
    """Undo `watch_norms` and `watch_staged_norms`."""
    _models[:] = [entry for entry in _models if entry[0]() is not model]
    _staged[:] = [entry for entry in _staged if entry[0]() is not model]
    _clean(None)


def clip_gradients(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`; returns the norm before."""
    owned = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    gradients = [one.grad for one in owned if one.grad is not None]
    norm = whole_of(_total_norm(gradients, norm_type, error_if_nonfinite))
    torch.nn.utils.clip_grads_with_norm_(owned, max_norm, norm)
    return norm


def _clean(reference: Any) -> None:
    _models[:] = [entry for entry in _models if entry[0]() is not None]
    _staged[:] = [entry for entry in _staged if entry[0]() is not None]
    if not _models and not _staged:
        _replace(False)


def _replace(own: bool) -> None:
    torch_private.replace_total_norm(_total_norm if own else None)
    torch_private.replace_unscale(_unscaled if own else None)
    if own:
        _watching.append(register_optimizer_step_pre_hook(_before_step))
        return
    while _watching:
        _watching.pop().remove()


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse optimizers that would need whole parameters where some are cut, and gradients that differ by rank."""
    _check_alike(optimizer)
    cut: set[int] = set()
    for reference, cuts, _ in list(_models):
        model = reference()
        named = () if model is None else model.named_parameters()
        cut.update(id(parameter) for name, parameter in named if name in cuts)
    check_elementwise(optimizer, cut)


def _check_alike(optimizer: torch.optim.Optimizer) -> None:
    """Raise `RankError` on all ranks of a cut model if gradients of what each has whole differ between them.

    They do once code scales gradients by a norm of its own, which is one of a rank's parts. Looked at in the first
    steps and now and then; what rounding makes of sums is far less.
    """
    number = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    if number > _FIRST_STEPS and number % _EVERY:
        return
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for reference, cuts, ranks in list(_models):
        model = reference()
        if model is None or not isinstance(ranks, ProcessRanks | LocalRanks):
            continue
        named = ((name, one) for name, one in model.named_parameters() if name not in cuts and id(one) in given)
        whole = [one for _, one in named if one.numel() <= _SMALL and not one.is_meta]
        if not whole:
            continue
        found = [one.grad.detach() for one in whole if one.grad is not None]
        gradients = [gradient for gradient in found if gradient.layout is torch.strided]
        norm = whole_of(torch_private.total_norm(gradients, 2.0)).to(whole[0].device)
        first, *others = _over(ranks, norm).tolist()
        if any(abs(other - first) > _ROUNDING * first for other in others):
            raise RankError(
                "gradients of parameters that all ranks have whole differ between the ranks. Code that scales "
                "gradients by a norm of its own sees the parts of one rank: use torch.nn.utils.clip_grad_norm_, which "
                "asks all of them. Or the ranks were given different inputs: call the model with the same on all."
            )


def _unscaled(
    scaler: Any, optimizer: torch.optim.Optimizer, inverse: torch.Tensor, found: torch.Tensor, allow_fp16: bool
) -> dict[torch.device, torch.Tensor]:
    """Divide gradients by their scale; what is not finite on one rank of a model counts on all of them."""
    per_device = torch_private.unscale_gradients(scaler, optimizer, inverse, found, allow_fp16)
    every = _ranks_of(optimizer)
    if not every:
        return per_device
    total = torch.stack([found, *(one.to(found.device) for one in per_device.values())]).amax().reshape(1)
    for ranks in every:
        total = ranks.all_reduce(total)
    total = total.clamp(max=1).reshape(())
    for one in per_device.values():
        one.copy_(total)
    return per_device or {found.device: total}


def _ranks_of(optimizer: torch.optim.Optimizer) -> list[Ranks]:
    """Who else has gradients of the models whose parameters an optimizer has: ranks of cuts, then of stages."""
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    known = [(reference(), ranks) for reference, _, ranks in _models if isinstance(ranks, ProcessRanks)]
    known += [(reference(), record.across) for reference, record in _staged]
    return [
        ranks for model, ranks in known if model is not None and any(id(one) in given for one in model.parameters())
    ]


def _total_norm(
    tensors: torch.Tensor | Iterable[torch.Tensor],
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    every: list[torch.Tensor] = []  # norms of what is divided, model by model; what is left is no part of any
    rest = given
    for reference, record in list(_staged):
        model = reference()
        known = {} if model is None else _counts(model, record)
        others = [tensor for tensor in rest if id(tensor) not in known]
        if model is None or (len(others) == len(rest) and not (not given and len(_staged) == 1)):
            continue  # without any gradients, a position still has to take part
        counted = [tensor for tensor in rest if known.get(id(tensor))]
        norm = whole_of(_norm_of_ranks(counted, [], norm_type, foreach)).to(record.device)
        every.append(_over(record.across, norm))
        rest = others
    return _checked(_norm_of_ranks(rest, every, norm_type, foreach), norm_type, error_if_nonfinite)


def _checked(norm: torch.Tensor, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped.")
    return norm


def _over(ranks: Ranks, norm: torch.Tensor) -> torch.Tensor:
    """The norms of what each rank has."""
    slots = ranks.own(tuple(torch.eye(ranks.size)[rank] for rank in range(ranks.size))).to(norm.device, norm.dtype)
    return ranks.all_reduce(slots * norm)


def _norm_of_ranks(
    given: list[torch.Tensor], every: list[torch.Tensor], norm_type: float, foreach: bool | None
) -> torch.Tensor:
    """The norm of gradients of which some may be parts; `every`: norms of what else counts."""
    for reference, cuts, ranks in list(_models):
        model = reference()
        parts = _gradients(model, cuts) if model is not None else {}
        here = [(tensor, parts[id(tensor)]) for tensor in given if id(tensor) in parts]
        if not here:
            continue
        given = [tensor for tensor in given if id(tensor) not in parts]
        local = torch_private.total_norm([_counted(*one, ranks) for one in here], norm_type)
        every = [*every, _over(ranks, whole_of(local))]  # of a replica whose ranks may shard their parts
    if not every:
        return torch_private.total_norm(given, norm_type, False, foreach)
    rest = whole_of(torch_private.total_norm(given, norm_type)).reshape(1)
    return torch.linalg.vector_norm(torch.cat([*(one.to(every[0]) for one in every), rest.to(every[0])]), norm_type)


def _counts(model: nn.Module, record: PipelineRecord) -> dict[int, bool]:
    """id of a gradient of this process -> whether it counts: of what several positions have, the owner's does."""
    return {
        id(parameter.grad): record.owner(name) == record.position
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


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
    mask: torch.Tensor = ranks.own(tuple(counts)).to(gradient.device, gradient.dtype).view(shape)
    return gradient * alike_on(gradient, mask)

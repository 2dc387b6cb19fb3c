"""The norm of all gradients, where some of them are parts, and what tells that somebody scaled by another one.

    each rank has      |whole gradients|     |its parts|
    the norm is        p-norm of             |whole gradients|, |parts of rank 0|, |parts of rank 1|, …

    in a pipeline        p-norm of             |gradients of position 0|, |gradients of position 1|, …      ties once

`autoshard.clip_grad_norm_` takes it. `torch.nn.utils.clip_grad_norm_` takes that of one rank's parts: gradients that
ranks have whole then differ between ranks, and those of stages were scaled by different factors; both raise.
"""

import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.optimizer import register_optimizer_step_pre_hook

from autoshard.errors import ApplyError, RankError
from autoshard.runtime.collectives import Axis, ProcessRanks, Ranks, layout
from autoshard.runtime.dtensors import alike_on, own_part, whole_of
from autoshard.runtime.elementwise import check_elementwise
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.pipeline_record import PipelineRecord
from autoshard.runtime.slices import CutTensor

Cuts = dict[str, CutTensor]
_cut: "weakref.WeakKeyDictionary[nn.Module, tuple[Cuts, Ranks]]" = weakref.WeakKeyDictionary()
_staged: "weakref.WeakKeyDictionary[nn.Module, PipelineRecord]" = weakref.WeakKeyDictionary()
_steps: "weakref.WeakKeyDictionary[torch.optim.Optimizer, int]" = weakref.WeakKeyDictionary()
_FIRST_STEPS, _EVERY = 8, 16
"""In which steps gradients are compared between ranks."""
_SMALL, _ROUNDING = 1 << 16, 1e-3
"""Elements up to which a gradient is compared; how much its norm may differ, of itself."""


def watch_norms(model: nn.Module, cuts: Cuts, ranks: Ranks) -> None:
    """Let norms take the cuts of a model into account until `forget_norms`, or until it is gone."""
    _cut[model] = cuts, ranks
    _watch()


def watch_staged_norms(model: nn.Module, record: PipelineRecord) -> None:
    """Let norms take the other positions of a pipeline into account until `forget_norms`, or until it is gone."""
    _staged[model] = record
    _watch()


def forget_norms(model: nn.Module) -> None:
    """Undo `watch_norms` and `watch_staged_norms`."""
    _cut.pop(model, None)
    _staged.pop(model, None)


def clip_gradients(
    parameters: nn.Module | Iterable[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale gradients in place so that their norm over all ranks is at most `max_norm`; returns the norm before."""
    owned = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    norm = _norm_of_all(owned, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"The total norm of order {norm_type} for gradients is non-finite, so it cannot be clipped.")
    for those in _by_mesh(owned):
        clip_grads_with_norm_(those, max_norm, norm)
    clipped = {id(one) for one in owned}
    for model, record in _staged.items():
        for name, one in model.named_parameters():
            if id(one) in clipped and name in record.extras.get("norms", ()):
                record.extras["norms"][name] *= (max_norm / (float(norm) + 1e-6)) if norm > max_norm else 1.0
    return norm


def refuse_scaled_losses() -> None:
    """Raise `ApplyError` inside of float16 autocast: what is not finite on one rank would not be known on others."""
    if any(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16 for kind in _AUTOCAST):
        raise ApplyError(
            "float16 needs a GradScaler, which leaves out the steps whose gradients overflow, and each rank has only a "
            "part of them. Use torch.autocast with dtype=torch.bfloat16, which needs none."
        )


_AUTOCAST = ("cuda", "cpu")


def note_norms(model: nn.Module, record: PipelineRecord, step: int) -> None:
    """Remember the norms of a position's gradients when a step of a schedule is over, now and then."""
    record.extras.pop("scaled", None)
    record.extras["norms"] = _own_norms(model) if _is_looked_at(step) else {}


def scaled_by(record: PipelineRecord) -> float:
    """By what gradients of this position were scaled before the last step of an optimizer; -1 where nobody looked."""
    return float(record.extras.pop("scaled", -1.0))


def check_scaled(factors: Sequence[float]) -> None:
    """Raise `RankError` if positions of a pipeline have scaled their gradients by different factors."""
    known = [factor for factor in factors if factor >= 0]
    if known and max(known) - min(known) > _ROUNDING * max(known):
        raise RankError(
            f"in the last step gradients of the stages were scaled by different factors ({min(known)}, {max(known)}): "
            "a norm that code takes of its own is that of one rank's stages. Use autoshard.clip_grad_norm_."
        )


@cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _is_looked_at(step: int) -> bool:
    return step <= _FIRST_STEPS or step % _EVERY == 0


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse optimizers that would need whole parameters where some are cut, and gradients that differ by rank."""
    if not _cut and not _staged:
        return
    number = _steps[optimizer] = _steps.get(optimizer, 0) + 1
    given = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for model, (cuts, ranks) in list(_cut.items()):
        if isinstance(ranks, ProcessRanks | LocalRanks):
            if _is_looked_at(number):
                _check_alike(model, cuts, ranks, given)
            check_elementwise(optimizer, {id(one): name for name, one in model.named_parameters() if name in cuts})
    for model, record in list(_staged.items()):
        if record.silent and not given.isdisjoint(map(id, model.parameters())):
            raise ApplyError(
                f"{type(optimizer).__name__} steps while a schedule runs (in a hook of a gradient), and other "
                "micro-batches are still to go through these parameters. Step after schedule.step(…)."
            )
        before = record.extras.pop("norms", None)
        if before:
            record.extras["scaled"] = _factor(model, before)


def _check_alike(model: nn.Module, cuts: Cuts, ranks: Ranks, given: set[int]) -> None:
    """Raise `RankError` on all ranks of a cut model if gradients of what each has whole differ between them.

    They do once code scales gradients by a norm of its own, which is one of a rank's parts; what rounding makes of sums
    is far less.
    """
    named = ((name, one) for name, one in model.named_parameters() if name not in cuts and id(one) in given)
    whole = [one for _, one in named if one.numel() <= _SMALL and not one.is_meta]
    if not whole:
        return
    found = [one.grad.detach() for one in whole if one.grad is not None]
    norm = _norm_of([one for one in found if one.layout is torch.strided], 2.0).to(whole[0].device)
    first, *others = _over(ranks, norm).tolist()
    if any(abs(other - first) > _ROUNDING * first for other in others):
        raise RankError(
            "gradients of parameters that all ranks have whole differ between the ranks. Code that scales gradients by "
            "a norm of its own (torch.nn.utils.clip_grad_norm_) sees the parts of one rank: use "
            "autoshard.clip_grad_norm_, which asks all of them. Or the ranks were given different inputs: call the "
            "model with the same on all."
        )


def _own_norms(model: nn.Module) -> dict[str, torch.Tensor]:
    """The norm and the largest element of each gradient that this process has; nobody else is asked."""
    named = ((name, own_part(one.grad.detach())) for name, one in model.named_parameters() if one.grad is not None)
    found = {name: one for name, one in named if one.layout is torch.strided and one.numel()}
    if not found:
        return {}
    norms = [torch.stack([one.norm(), one.abs().max()]).double() for one in found.values()]
    return dict(zip(found, torch.stack(norms).cpu(), strict=True))


def _factor(model: nn.Module, before: dict[str, torch.Tensor]) -> float:
    """By what gradients were scaled, of those whose largest element was scaled as their norm; -1 if there are none.

    What clips elements, or adds to them, is right on every rank by itself.
    """
    after = _own_norms(model)
    rounding = {name: max(torch.finfo(one.dtype).eps, 1e-5) for name, one in model.named_parameters() if name in after}
    ratios = {name: after[name] / one for name, one in before.items() if name in after}
    whole = [name for name, (norm, most) in ratios.items() if abs(norm - most) <= rounding[name] * norm]
    sizes = [sum(float(norms[name][0]) ** 2 for name in whole) ** 0.5 for norms in (after, before)]
    return sizes[0] / sizes[1] if sizes[1] else -1.0


def _norm_of_all(parameters: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    rest = {id(one): one for one in parameters}
    norms: list[torch.Tensor] = []
    for model, record in list(_staged.items()):
        own = [(name, rest.pop(id(one))) for name, one in model.named_parameters() if id(one) in rest]
        if own:  # also without any gradients, a position has to take part
            counted = [one for name, one in own if record.owner(name) == record.pp_rank]
            norm = _norm_of_parts(counted, norm_type).to(record.device)
            norms.append(_over(record.across, norm))
    return _norm_of_norms([*norms, _norm_of_parts(rest.values(), norm_type)], norm_type)


def _norm_of_parts(parameters: Iterable[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients of which some may be parts of the ranks that share a model."""
    rest = {id(one): one.grad for one in parameters if one.grad is not None}
    norms: list[torch.Tensor] = []
    for model, (cuts, ranks) in list(_cut.items()):
        found = [(name, one) for name, one in model.named_parameters() if name in cuts and id(one) in rest]
        own = [_counted(rest.pop(id(one)), cuts[name], ranks) for name, one in found]
        if own:
            norms.append(_over(ranks, _norm_of(own, norm_type)))  # a replica may shard its parts
    return _norm_of_norms([*norms, _norm_of(list(rest.values()), norm_type)], norm_type)


def _norm_of_norms(norms: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all of which these are norms, each of any shape."""
    if len(norms) < 2:
        return norms[0] if norms else torch.zeros(())
    return torch.linalg.vector_norm(torch.cat([one.to(norms[0].device).reshape(-1) for one in norms]), norm_type)


def _by_mesh(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that are sharded alike: experts that are divided have another mesh than the rest, scalars have none."""
    together: dict[Any, list[torch.Tensor]] = {}
    for one in tensors:
        together.setdefault(getattr(one, "device_mesh", None), []).append(one)
    return list(together.values())


def _norm_of(gradients: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of gradients of which some may be sharded, each over ranks of its own; all of these call it."""
    return _norm_of_norms([whole_of(get_total_norm(those, norm_type)) for those in _by_mesh(gradients)], norm_type)


def _over(ranks: Ranks, norm: torch.Tensor) -> torch.Tensor:
    """The norms of what each rank has."""
    slots = ranks.own(tuple(torch.eye(ranks.size)[rank] for rank in range(ranks.size))).to(norm.device, norm.dtype)
    return ranks.all_reduce(slots * norm)


def _counted(gradient: torch.Tensor, cut: CutTensor, ranks: Ranks) -> torch.Tensor:
    """A gradient without what rank 0 has as well."""
    if not len(layout(cut.axis, cut.shares).common[0]):
        return gradient
    shape = [1] * gradient.dim()
    shape[cut.dim] = -1
    owned = Axis.of(ranks, cut.axis, cut.shares).owned.to(gradient.device, gradient.dtype)
    return gradient * alike_on(gradient, owned.view(shape))

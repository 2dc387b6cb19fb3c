"""Gradients of which every rank of a cut model has a part: they are summed before anything uses them.

norm.weight inside of a cut, whole on both ranks     rank 0   g of its heads  ┐
                                                     rank 1   g of its heads  ┴▶  sum, on both
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from autoshard import torch_private
from autoshard.common.module_paths import join, parent
from autoshard.errors import ApplyError, PlanError
from autoshard.plan.sharding import Cut
from autoshard.runtime.collectives import Ranks, layout, reduce
from autoshard.runtime.dtensors import is_sharded
from autoshard.runtime.moves import named_tensors
from autoshard.runtime.slices import CutTensor
from autoshard.runtime.used import before_block, by_block


def find_partial(
    cuts: Sequence[Cut], tensors: Mapping[str, torch.Tensor], found: Mapping[str, CutTensor]
) -> dict[str, CutTensor | None]:
    """Parameters that have a part of their gradient on every rank: used whole inside of a cut, or in part whole."""
    partial: dict[str, CutTensor | None] = {}
    for cut in cuts:
        for block in cut.blocks:
            for name in cut.summed:
                full = join(block, name)
                if full not in tensors or full in found:
                    reason = "does not have" if full not in tensors else "is also told to cut"
                    raise PlanError(f"the plan sums the gradient of {full!r}, which this model {reason}.")
                partial[full] = None
    for name, cut_tensor in found.items():
        if len(layout(cut_tensor.axis, cut_tensor.shares).common[0]):
            partial[name] = cut_tensor
    return {name: how for name, how in partial.items() if isinstance(tensors[name], nn.Parameter)}


class SumGradient:
    """Hook of a parameter: sum its gradient over ranks, or only that of the indices that all ranks keep.

    `averaged`: what comes behind makes the mean over these ranks of it, so it is multiplied by how many they are.
    """

    def __init__(self, ranks: Ranks, cut: CutTensor | None, averaged: bool = False) -> None:
        self.ranks, self.cut, self.averaged = ranks, cut, averaged

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.averaged:
            return gradient * self.ranks.size
        if self.cut is None:
            return reduce(gradient, self.ranks)
        places = layout(self.cut.axis, self.cut.shares).common
        index = self.ranks.own(tuple(torch.from_numpy(place) for place in places)).to(gradient.device)
        total = reduce(gradient.index_select(self.cut.dim, index), self.ranks, fresh=True)
        return gradient.index_copy(self.cut.dim, index, total)

    def __deepcopy__(self, memo: dict) -> "SumGradient":
        return self


def sum_gradients(model: nn.Module, partial: Mapping[str, CutTensor | None], ranks: Ranks) -> None:
    """Put hooks on the parameters whose gradient is partial, where there are none; parameters may be unfrozen later.

    Raises `ApplyError` for one that was computed from others: theirs would be summed once more.
    """
    if not partial:
        return
    tensors = named_tensors(model)
    for name, how in partial.items():
        if tensors[name].grad_fn is not None:
            raise ApplyError(
                f"{name} is computed for this call (torch.func.functional_call), and each rank has a part of its "
                'gradient. Place whole modules (strategy="balanced") for gradients of such a call.'
            )
        _sum(tensors[name], ranks, how)


def _sum(tensor: torch.Tensor, ranks: Ranks, how: CutTensor | None, averaged: bool = False) -> None:
    if tensor.requires_grad and not any(isinstance(h, SumGradient) for h in torch_private.gradient_hooks(tensor)):
        tensor.register_hook(SumGradient(ranks, how, averaged))


def sum_gathered(
    model: nn.Module, partial: Mapping[str, CutTensor | None], ranks: Ranks, averaged: bool = False
) -> list[Any]:
    """As `sum_gradients`, where parameters are sharded as well: they are hooked once gathered. Returns handles."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found = [(modules[parent(name)], name.rpartition(".")[2], how) for name, how in partial.items()]
    handles = []
    for block, inside in by_block(model, [module for module, _, _ in found]):
        if inside:
            hook = functools.partial(_sum_whole, ranks, [found[index] for index in inside], averaged)
            handles.append(before_block(block, hook))
    return handles


def _sum_whole(
    ranks: Ranks, parameters: Sequence[tuple[nn.Module, str, CutTensor | None]], averaged: bool, _: nn.Module,
    args: tuple,
) -> None:  # fmt: skip
    """Pre-hook of a block whose parameters are whole now, as far as this rank has them."""
    if torch.is_grad_enabled():
        for owner, name, how in parameters:
            parameter = getattr(owner, name)
            if parameter is not None and not is_sharded(parameter):
                _sum(parameter, ranks, how, averaged)

"""Expert parallelism: each rank has some experts, and tokens go to where theirs are, and come back.

    rank 0   tokens a b c  ─▶  a b . d .   choices of its experts, of all ranks  ─▶  its experts  ─▶  sums for a b c
    rank 1   tokens d e    ─▶  . b c . e                                         ─▶               ─▶  sums for d e

A module of experts is given (rows [T, width], choices [T, k], weights [T, k]), and what it makes of a row is the sum of
what it makes of each choice alone: `check.experts` has compared it. So on the way each choice is a row of its own.
Ranks are replicas with samples of their own, and the loss is the mean of theirs: gradients of experts, which come from
all of them, are divided by their number on the way in, and multiplied on the way out. Experts over all-to-all: Lepikhin
et al., "GShard" (2020), section 3.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError
from autoshard.nested import replace_at, tensor_at
from autoshard.runtime.collectives import ProcessRanks


def choices_of(chosen: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The row, the expert and the weight of every choice; `chosen`: numbers [T, k] or masks [T, k, experts]."""
    each = weights.shape[1]
    if chosen.dim() == 3:
        place, expert = chosen.flatten(0, 1).nonzero(as_tuple=True)
        return place // each, expert, weights.flatten()[place]
    rows = torch.arange(len(chosen), device=chosen.device).repeat_interleave(each)
    return rows, chosen.flatten().long(), weights.flatten()


def single_choices(chosen: torch.Tensor, expert: torch.Tensor, experts: int) -> torch.Tensor:
    """One choice for each row, in the form of `chosen`: numbers [rows, 1], or masks [rows, 1, experts]."""
    if chosen.dim() == 3:
        return nn.functional.one_hot(expert, experts).unsqueeze(1).to(chosen.dtype)
    return expert.unsqueeze(1).to(chosen.dtype)


@dataclass(slots=True, eq=False)
class Dispatch:
    """Pre-hook and hook of a module of experts.

    `paths`: for rows, choices and weights, where they may be among the arguments; `shares`: how many experts each rank
    has; `renumbered`: the module counts those of a rank from 0; `sent`: what a forward has sent, while it runs.
    """

    paths: tuple[tuple[str, ...], ...]
    shares: tuple[int, ...]
    renumbered: bool
    ranks: ProcessRanks
    where: str
    sent: Any = None

    def send(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Give the module the choices of all ranks that fall on this rank's experts."""
        found = [
            next(((p, t) for p in paths if (t := tensor_at((args, kwargs), p)) is not None), None)
            for paths in self.paths
        ]
        if None in found:
            raise ApplyError(
                f"{self.where} was not given rows, choices and weights this time, as when it was planned. Plan again "
                "with inputs like these."
            )
        (at_rows, rows), (at_chosen, chosen), (at_weights, weights) = found  # type: ignore[misc]
        row, expert, weight = choices_of(chosen, weights)
        ends = torch.tensor(self.shares, device=expert.device).cumsum(0)
        owner = torch.bucketize(expert, ends, right=True).clamp(max=self.ranks.size - 1)
        order = owner.argsort(stable=True)
        counts = torch.bincount(owner, minlength=self.ranks.size)
        ones = [1] * self.ranks.size
        sent, received = counts.tolist(), self.ranks.exchange_rows(counts, ones, ones).tolist()
        expert = self.ranks.exchange_rows(expert[order], sent, received)
        flat = rows.reshape(-1, rows.shape[-1])
        there, weight = _Exchange.apply(self.ranks, sent, received, flat[row[order]], weight[order])
        self.sent = rows.shape, row[order], sent, received, (there, weight)
        weight = weight.unsqueeze(1)
        if self.renumbered:
            expert = expert - sum(self.shares[: self.ranks.rank])
            if not len(expert):  # grouped products want a row
                expert, there, weight = expert.new_zeros(1), there.new_zeros(1, there.shape[1]), weight.new_zeros(1, 1)
        size = self.shares[self.ranks.rank] if self.renumbered else sum(self.shares)
        given: Any = (args, kwargs)
        for path, value in ((at_rows, there), (at_chosen, single_choices(chosen, expert, size)), (at_weights, weight)):
            given = replace_at(given, path, value)
        return given

    def bring_back(self, module: nn.Module, args: tuple, result: torch.Tensor) -> torch.Tensor:
        """Return what experts made of this rank's choices, added up row by row."""
        (shape, row, sent, received, came), self.sent = self.sent, None
        made = result.reshape(-1, shape[-1])[: sum(received)]
        # Backward exchanges on all ranks, also where nothing came.
        anchor = torch.zeros((), device=made.device, requires_grad=torch.is_grad_enabled())
        made = _Return.apply(self.ranks, received, sent, made, anchor, *(() if len(made) else came))
        total = made.new_zeros(shape.numel() // shape[-1], shape[-1]).index_add(0, row, made)
        return total if len(shape) == 2 else total.view(shape).clone()  # code may write into what it is given


class _Exchange(torch.autograd.Function):
    """Rows and their weights to other ranks; gradients come back, times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, ranks: ProcessRanks, sent: list[int], received: list[int], *tensors: torch.Tensor) -> Any:
        ctx.back = ranks, received, sent
        return tuple(ranks.exchange_rows(tensor, sent, received) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ranks, received, sent = ctx.back
        return (None, None, None, *(ranks.exchange_rows(one, received, sent) * ranks.size for one in gradients))


class _Return(torch.autograd.Function):
    """Results to the ranks that sent for them; gradients, divided by the number of ranks, to where experts are."""

    @staticmethod
    def forward(
        ctx: Any, ranks: ProcessRanks, sent: list[int], received: list[int], made: torch.Tensor, *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.back = ranks, received, sent
        ctx.shapes = [(other.shape, other.dtype) for other in others]
        return ranks.exchange_rows(made, sent, received)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ranks, received, sent = ctx.back
        back = ranks.exchange_rows(gradient, received, sent) / ranks.size
        zeros = [gradient.new_zeros(shape, dtype=dtype) for shape, dtype in ctx.shapes]
        return None, None, None, back, *zeros


def install_dispatch(module: nn.Module, steps: Any, paths_of: Any) -> list[Any]:
    """Put the hooks of the steps that dispatch on their module of experts; returns handles."""
    handles = []
    for step in steps:
        action = step.action
        paths = tuple(paths_of(module, replace(action, kind="slice", argument=one)) for one in action.argument.split())
        hooks = Dispatch(paths, step.shares, "*" in action.axis, step.ranks, step.where)
        handles.append(module.register_forward_pre_hook(hooks.send, with_kwargs=True))
        handles.append(module.register_forward_hook(hooks.bring_back, prepend=True))
    return handles

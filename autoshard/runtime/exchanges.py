"""What fully_shard exchanges, and in which order: as torch does, but that errors name who is gone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import RankError
from autoshard.runtime.collectives import ProcessRanks, lost


@dataclass(frozen=True, slots=True)
class _Named:
    """What fully_shard calls to exchange: as torch does, and an error says which process is gone."""

    ranks: ProcessRanks

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def _call(self, collective: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return collective(*args, **options)
        except RuntimeError as error:
            raise lost(self.ranks, error) from error


class Order:
    """Which blocks were gathered, one after another, as one number; a hook of the model that compares it."""

    def __init__(self, ranks: ProcessRanks, device: torch.device, alone: bool = False) -> None:
        self.ranks, self.device, self.alone = ranks, device, alone
        self.digest = 0

    def add(self, number: int) -> None:
        """Note that a block is gathered now."""
        self.digest = (self.digest * 31 + number + 1) % 65521

    def __call__(self, module: nn.Module, args: tuple, result: Any) -> None:
        """Raise `RankError` on all ranks if they gathered other blocks than each other; of whole ones, in training."""
        if self.alone and not torch.is_grad_enabled():
            return
        digest = float(self.digest)
        mine = torch.tensor([digest, digest**2], dtype=torch.float64, device=self.device)
        total, squares = self.ranks.all_reduce(mine).tolist()
        if total**2 != self.ranks.size * squares:  # a mean of squares is the square of the mean of equals only
            raise RankError(
                "ranks have run different blocks of this model, or in another order: its parameters are sharded, and "
                "each rank has computed with parts of the wrong ones. Let all ranks go the same way "
                "through the forward (layers left out at random, branches on values), or plan without sharding."
            )


@dataclass(frozen=True, slots=True)
class Gather(_Named):
    """Gathers a block, and notes that it did."""

    order: Order
    number: int

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        self.order.add(self.number)
        return self._call(_all_gather, output_tensor, input_tensor, **options)


class ReduceScatter(_Named):
    """Averages the gradients of a block, of which each rank keeps its part."""

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
        return self._call(_reduce_scatter, output_tensor, input_tensor, **options)


@dataclass(frozen=True, slots=True)
class MeanOfReplicas(_Named):
    """Hook of fully_shard on the gradients of a block, which are means over the ranks of one replica."""

    replicas: ProcessRanks

    def __call__(self, gradients: torch.Tensor) -> None:
        gradients.mul_(1 / self.replicas.size)
        self._call(dist.all_reduce, gradients, group=self.replicas.group)


# Their names since torch 2.13, and before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

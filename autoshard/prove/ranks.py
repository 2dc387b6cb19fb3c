"""One rank of a cut model without the others: what a rank's code does, on shapes."""

from dataclasses import dataclass

import torch

from autoshard.runtime.collectives import Layout


@dataclass(frozen=True, slots=True, eq=False)
class LoneRank:
    """One rank without the others: shapes are right, sums are not. For following what a rank's code does."""

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    add_gathered = all_reduce

    def gather(self, tensor: torch.Tensor, dim: int, where: Layout, order: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        shape[dim] = where.size
        return tensor.new_zeros(shape)

    def own(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return values[self.rank]

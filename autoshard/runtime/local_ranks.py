"""Ranks that are all in this process, one per device: what they have are `RankTensor`s."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.runtime.collectives import Layout
from autoshard.runtime.devices import fresh_copy
from autoshard.runtime.rank_tensor import RankTensor, spread


@dataclass(frozen=True, slots=True)
class LocalRanks:
    """One rank per device; a device may hold several."""

    devices: tuple[torch.device, ...]

    @classmethod
    def of(cls, devices: Sequence[torch.device | str]) -> "LocalRanks":
        """The ranks on some devices, in order."""
        return cls(tuple(torch.device(device) for device in devices))

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def rank(self) -> int | None:
        return None

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self._parts(tensor)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part if part.device == total.device else fresh_copy(part, total.device)
        return spread(total, self.devices)

    add_gathered = all_reduce

    def gather(self, tensor: torch.Tensor, dim: int, where: Layout, order: torch.Tensor) -> torch.Tensor:
        parts = self._parts(tensor)
        whole = torch.cat([p if p.device == parts[0].device else fresh_copy(p, parts[0].device) for p in parts], dim)
        if not where.in_order:
            whole = whole.index_select(dim, order)
        return spread(whole, self.devices)

    def own(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return RankTensor([value.to(device) for value, device in zip(values, self.devices, strict=True)], self.devices)

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (tensor if isinstance(tensor, RankTensor) else spread(tensor, self.devices)).parts

"""Ranks that are threads of this process: what runs under torchrun, without processes."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.runtime.collectives import Layout

PATIENCE_SECONDS = 60.0
"""How long a rank waits for another one before it gives up."""


class Meeting:
    """Where threads exchange one value each."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.slots: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Give a value and get those of all ranks. Raises BrokenBarrierError if one of them has failed."""
        self.slots[rank] = value
        self.barrier.wait(PATIENCE_SECONDS)
        values = list(self.slots)
        self.barrier.wait(PATIENCE_SECONDS)
        return values


@dataclass(frozen=True, slots=True, eq=False)
class ThreadRanks:
    """One rank of several threads; see `runtime.collectives.Ranks`."""

    rank: int
    size: int
    meeting: Meeting

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        first, *others = self.meeting.exchange(self.rank, tensor.clone())
        total = first.clone()
        for part in others:
            total += part
        return total

    add_gathered = all_reduce

    def gather(self, tensor: torch.Tensor, dim: int, where: Layout, order: torch.Tensor) -> torch.Tensor:
        parts = []
        for part in self.meeting.exchange(self.rank, tensor.clone()):
            padding = where.width - part.shape[dim]
            shape = list(part.shape)
            shape[dim] = padding
            parts.append(torch.cat([part, part.new_zeros(shape)], dim) if padding else part)
        return torch.cat(parts, dim).index_select(dim, order)

    def own(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return values[self.rank]

    def __deepcopy__(self, memo: dict) -> "ThreadRanks":
        return self


def run_ranks(work: Callable[[ThreadRanks], Any], size: int) -> list[Any]:
    """Run `work` on every rank at once and return what each returned; raise the first error that was not a consequence.

    Gradient mode and default dtype are those of the caller.
    """
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size
    gradients = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(gradients):
                results[rank] = work(ThreadRanks(rank, size, meeting))
        except BaseException as error:
            errors[rank] = error
            meeting.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    caused = [error for error in errors if error is not None and not isinstance(error, threading.BrokenBarrierError)]
    for error in (*caused, *errors):
        if error is not None:
            raise error
    return results

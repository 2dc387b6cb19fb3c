"""What ranks do together: sum, gather, take one's part; and what gradients do there on their way back.

    Ranks            what actions use; one of
      ProcessRanks   one process per device: a group of torch.distributed
      LocalRanks     one process, all devices (`local_ranks.py`)

Between where a replicated tensor enters a cut and where its results leave it, a gradient is partial: the true one is
the sum over ranks. That alone says what each function does in backward:

    forward                     backward
    enter    nothing            sum
    reduce   sum                nothing: every summand has the gradient of the sum. Of little: gather, then add
    take     this rank's part   zeros elsewhere, then sum (take what has entered)
    leave    nothing            rank 0 has the gradient, the others zero: every rank computed the same
    gather   all parts          this rank's part; of what all ranks keep, rank 0 has the gradient and the others zero

Backwards are made of these functions, for gradients of gradients: what they are given is the same on all, so it enters.
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy
import torch
import torch.distributed as dist

from autoshard.errors import ApplyError, RankError, first_line
from autoshard.plan.sharding import coordinates_of, kept, resized
from autoshard.runtime.backward import with_backward
from autoshard.runtime.departed import find_gone, said_of


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Layout:
    """One dimension, cut over ranks.

    Attributes:
        kept: per rank, the indices it keeps; `width`: the most that any rank keeps.
        order: for each index of the whole, its place among the parts one after another, each padded to `width`.
        common: per rank, where in its part the indices are that all ranks keep.
        size: length of the whole; `in_order`: whether the parts, one after another, are the whole.
    """

    kept: tuple[numpy.ndarray, ...]
    order: numpy.ndarray
    width: int
    common: tuple[numpy.ndarray, ...]
    size: int
    in_order: bool


@cache
def layout(axis: str, shares: tuple[int, ...]) -> Layout:
    """Work out how an axis is divided. Raises ValueError for what is not an axis."""
    coordinates = coordinates_of(axis)
    parts = tuple(kept(axis, shares, rank) for rank in range(len(shares)))
    width = max(len(part) for part in parts)
    order = numpy.empty(len(coordinates), dtype=numpy.int64)
    for rank in reversed(range(len(shares))):  # what all keep is taken from rank 0
        order[parts[rank]] = rank * width + numpy.arange(len(parts[rank]))
    common = tuple(numpy.flatnonzero(coordinates[part] < 0) for part in parts)
    size = len(order)
    in_order = width * len(shares) == size and bool((order == numpy.arange(size)).all())
    return Layout(kept=parts, order=order, width=width, common=common, size=size, in_order=in_order)


def count_processes() -> int:
    """How many processes of torch.distributed run, 0 if it is not in use."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 0


class Ranks(Protocol):
    """Who shares a cut model, without any autograd: the functions below add that."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def rank(self) -> int | None:
        """Which of them this process is, None if it is all of them."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks. May use the memory of `tensor`, which nobody may need any more."""

    def add_gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, where every rank gets all summands: at once, but more of them."""

    def gather(self, tensor: torch.Tensor, dim: int, where: Layout, order: torch.Tensor) -> torch.Tensor:
        """Put the parts of all ranks together along a dimension; `order` is `where.order` as a tensor."""

    def own(self, values: "tuple[torch.Tensor, ...]") -> torch.Tensor:
        """Return this rank's of one tensor per rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRanks:
    """Ranks that are processes: a group of torch.distributed, in which this process is number `rank` of `size`.

    The group belongs to torch: a model that kept it would keep its threads, too, after it was destroyed.
    `members`: their ranks among all processes, which is how errors name them.
    """

    known: "weakref.ref[Any]"
    rank: int
    size: int
    members: tuple[int, ...]

    @classmethod
    def of(cls, group: Any = None) -> "ProcessRanks":
        """The ranks of a group, by default of all processes. Raises `RankError` where there is none."""
        if not dist.is_available() or not dist.is_initialized():
            raise RankError(
                "this process belongs to no group. Start with torchrun and call torch.distributed.init_process_group()."
            )
        group = dist.group.WORLD if group is None else group
        return cls(
            known=weakref.ref(group), rank=dist.get_rank(group), size=dist.get_world_size(group),
            members=tuple(dist.get_process_group_ranks(group)),
        )  # fmt: skip

    @property
    def group(self) -> Any:
        """The group of torch.distributed. Raises `RankError` once it was destroyed."""
        group = self.known()
        if group is None:
            raise RankError(
                "the process group that this model was applied with was destroyed. "
                "Make the model and apply the plan again."
            )
        return group

    @property
    def name(self) -> str:
        """The name of the group, the same on all of its ranks."""
        return str(getattr(self.known(), "group_name", ""))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        self._call(dist.all_reduce, tensor)
        return tensor

    def add_gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu":  # what gloo gathers goes around in a ring, in halves; this straight to all
            given = tensor.expand(self.size, *tensor.shape).contiguous()
            parts = torch.empty_like(given)
            self._call(dist.all_to_all_single, parts, given)
        else:
            parts = self._gathered(tensor)
        return parts.sum(0, dtype=tensor.dtype)  # in the same order on all ranks, so with equal bits

    def gather(self, tensor: torch.Tensor, dim: int, where: Layout, order: torch.Tensor) -> torch.Tensor:
        if tensor.shape[dim] < where.width:
            shape = list(tensor.shape)
            shape[dim] = where.width - tensor.shape[dim]
            tensor = torch.cat([tensor, tensor.new_zeros(shape)], dim)
        # contiguous, as the whole is where it was never cut
        whole = self._gathered(tensor).movedim(0, dim).flatten(dim, dim + 1)
        return whole if where.in_order else whole.index_select(dim, order)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensors of all ranks, by rank."""
        part = tensor.contiguous()
        parts = part.new_empty(self.size * part.numel())
        # Its name since torch 2.13, and before.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        self._call(gather, parts, part.view(-1))
        return parts.view(self.size, *part.shape)

    def add_along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Sum over ranks, of which this rank keeps its part along a dimension that they divide evenly."""
        parts = tensor.movedim(dim, 0).contiguous()
        own = parts.new_empty(parts.shape[0] // self.size, *parts.shape[1:])
        # Its name since torch 2.13, and before.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._call(scatter, own, parts)
        return own.movedim(0, dim).contiguous()

    def own_along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's part along a dimension."""
        return tensor.chunk(self.size, dim)[self.rank].clone(memory_format=torch.contiguous_format)

    def whole_along(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Put parts of equal size together along a dimension."""
        return self._gathered(tensor).movedim(0, dim).flatten(dim, dim + 1)

    def exchange_rows(self, tensor: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Send so many rows to each rank, and return those that came, rank by rank."""
        own = tensor.new_empty(sum(received), *tensor.shape[1:])
        self._call(dist.all_to_all_single, own, tensor.contiguous(), received, sent)
        return own

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Overwrite a contiguous tensor with that of rank `source`."""
        self._call(dist.broadcast, tensor, group_src=source)

    def exchange(self, value: Any) -> list[Any]:
        """Give any value that can be pickled and get those of all ranks."""
        values: list[Any] = [None] * self.size
        self._call(dist.all_gather_object, values, value)
        return values

    def _call(self, collective: Callable[..., Any], *tensors: Any, **options: int) -> None:
        if torch.compiler.is_compiling():
            collective(*tensors, group=self.group, **options)
            return
        try:
            collective(*tensors, group=self.group, **options)
        except RuntimeError as error:
            raise lost(self, error) from error

    def own(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return values[self.rank]

    def __deepcopy__(self, memo: dict) -> "ProcessRanks":
        return self  # a copy of a cut model runs on the same ranks

    def __reduce__(self) -> Any:
        raise ApplyError(
            "a model that is divided over processes can't be pickled. Call autoshard.save(model, directory)."
        )


def lost(ranks: ProcessRanks, error: RuntimeError) -> RankError:
    """Describe a collective that failed: mostly because another process ended, or waits for something else."""
    own = ranks.members[ranks.rank]
    if isinstance(error, torch.OutOfMemoryError):  # nobody is lost but this rank
        return RankError(f"rank {own} has no memory left for a collective: {first_line(error)} Plan for less on it.")
    if gone := find_gone(ranks.members, own):
        return RankError(said_of(own, gone))
    reason = (str(error).strip().splitlines() or ["no reason given"])[0]
    others = [str(rank) for rank in ranks.members if rank != own]
    who = f"rank {others[0]}" if len(others) == 1 else f"one of the ranks {', '.join(others)}"
    return RankError(
        f"rank {own} lost {who} in a collective: that process ended, or it runs something else than this one "
        f"({reason}). Look at the first error among the ranks, then start them all again."
    )


ALONG: Mapping[str, tuple[str, str]] = {
    "scatter": ("add_along", "whole_along"), "collect": ("whole_along", "add_along"),
    "divide": ("own_along", "whole_along"), "join": ("whole_along", "own_along"),
    "own": ("own_along", "whole_along"), "whole": ("whole_along", "own_along"),
}  # fmt: skip
"""Actions on divided tokens: what they do, and what their backward does."""


def along(tensor: torch.Tensor, ranks: Ranks, dim: int, kind: str) -> torch.Tensor:
    """Carry out an action on divided tokens."""
    back = next(other for other, kinds in ALONG.items() if kinds == ALONG[kind][::-1])

    def moved(one: torch.Tensor) -> torch.Tensor:
        # The memory is new, also where one sample makes it a view of itself: code may write into it.
        return getattr(ranks, ALONG[kind][0])(one, dim).detach()

    return with_backward(tensor, moved, lambda gradient: along(gradient, ranks, dim, back))


def tracked(tensor: torch.Tensor) -> bool:
    """Whether what is made from a tensor now has a history."""
    return tensor.requires_grad and torch.is_grad_enabled()


def reduce(tensor: torch.Tensor, ranks: Ranks, fresh: bool = False, gathered: bool = False) -> torch.Tensor:
    """Sum over ranks. `fresh`: nobody else has the tensor, so its memory may be used; `gathered`: as in an action."""

    def total(one: torch.Tensor, fresh: bool = False) -> torch.Tensor:
        return ranks.add_gathered(one) if gathered else ranks.all_reduce(one if fresh else one.clone())

    if tracked(tensor):
        return with_backward(tensor, total, lambda gradient: copy_to_region(gradient, ranks))
    return total(tensor.detach() if tensor.requires_grad else tensor, fresh)


def copy_to_region(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return an alias whose gradient is summed over ranks; the very tensor if it has no gradient."""
    if not tracked(tensor):
        return tensor
    return with_backward(tensor, lambda one: one.view_as(one), lambda gradient: reduce(gradient, ranks))


def copy_from_region(tensor: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Return an alias whose gradient only rank 0 hands on; the very tensor if it has no gradient."""

    def of_first(gradient: torch.Tensor) -> torch.Tensor:
        first = ranks.own(tuple(torch.ones((), dtype=gradient.dtype) * (rank == 0) for rank in range(ranks.size)))
        return copy_to_region(gradient, ranks) * first.to(gradient.device)

    return with_backward(tensor, lambda one: one.view_as(one), of_first) if tracked(tensor) else tensor


@dataclass(slots=True, eq=False, kw_only=True)
class Axis:
    """A layout with its indices as tensors, on the device of the tensors that were last seen.

    Attributes:
        text, shares: what is cut how; `ranks`: among whom.
        begin: where this rank's part begins, if it is one piece.
        index: what this rank keeps; `owned`: 1 where its gradient counts, 0 where rank 0 keeps the same.
        places: for each index of the whole, where it is in this rank's part, -1 where it is not (or rank 0's counts).
        others: the same axis in runs with another batch size or length, by its size.
    """

    text: str
    shares: tuple[int, ...]
    ranks: Ranks
    where: Layout
    begin: int | None
    order: torch.Tensor
    index: torch.Tensor
    owned: torch.Tensor
    places: torch.Tensor
    others: "dict[int, Axis]" = field(default_factory=dict)

    @classmethod
    @torch.inference_mode(False)  # the next forward may be one that trains
    def of(cls, ranks: Ranks, axis: str, shares: tuple[int, ...]) -> "Axis":
        """Prepare an axis for these ranks."""
        where = layout(axis, shares)
        index, owned, places = [], [], []
        for rank, part in enumerate(where.kept):
            mine = torch.from_numpy(part.copy())
            common = torch.from_numpy(where.common[rank])
            index.append(mine)
            owned.append(torch.ones(len(mine)))
            places.append(torch.full((where.size,), -1))
            places[rank][mine] = torch.arange(len(mine))
            if rank:
                owned[rank][common] = 0
                places[rank][mine[common]] = -1
        begin = None
        if ranks.rank is not None and len(where.kept[ranks.rank]):
            one = where.kept[ranks.rank]
            begin = int(one[0]) if one[-1] - one[0] + 1 == len(one) else None
        own, first, place = [ranks.own(tuple(x)) for x in (index, owned, places)]
        order = torch.from_numpy(where.order).to(own.device)  # in one process: where parts are put together
        return cls(
            text=axis, shares=shares, ranks=ranks, where=where, begin=begin, order=order, index=own, owned=first,
            places=place,
        )  # fmt: skip

    @property
    def width(self) -> int:
        """How long the part of this rank is."""
        return len(self.where.kept[self.ranks.rank or 0])

    def sized(self, size: int) -> "Axis":
        """This axis where the whole has `size` indices. Raises ValueError if it can't have."""
        if size == self.where.size:
            return self
        if size not in self.others:
            self.others[size] = Axis.of(self.ranks, resized(self.text, size), self.shares)
        return self.others[size]

    def sized_by_part(self, size: int) -> "Axis":
        """This axis where the part of this rank has `size` indices. Raises ValueError if it can't have."""
        if size == self.width:
            return self
        share = self.shares[self.ranks.rank or 0]
        if size % share:
            raise ValueError(f"{self.text!r} can't have a part of {size} on a rank.")
        return self.sized(size // share * sum(self.shares))

    def own_part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        if self.begin is not None:
            return tensor.narrow(dim, self.begin, len(self.index))
        self._follow(tensor)
        return tensor.index_select(dim, self.index)

    def gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The whole of a tensor of which this is this rank's part."""
        self._follow(tensor)
        dim, ranks, order, index, owned = dim % tensor.dim(), self.ranks, self.order, self.index, self.owned

        def whole(part: torch.Tensor) -> torch.Tensor:
            return ranks.gather(part, dim, self.where, order)

        def own(gradient: torch.Tensor) -> torch.Tensor:
            part = copy_to_region(gradient, ranks).index_select(dim, index)
            shape = [1] * part.dim()
            shape[dim] = -1
            return part * owned.to(part.dtype).view(shape)

        return with_backward(tensor, whole, own) if tracked(tensor) else whole(tensor)

    def rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the rows of a table that `ids` name are in this rank's part, and which of them it does not have.

        Of rows that all ranks keep, rank 0 has them and the others do not: they are summed.
        """
        if self.ranks.rank is not None and self.places.device != ids.device:
            self.places = self.places.to(ids.device)
        rows = self.places.index_select(0, ids.reshape(-1)).view(ids.shape)
        return rows.clamp(min=0), rows < 0

    def _follow(self, tensor: torch.Tensor) -> None:
        """Bring the indices to a tensor of this rank; where all ranks are here, tensors are brought to them."""
        if self.ranks.rank is not None and self.index.device != tensor.device:
            with torch.inference_mode(False):  # the next forward may be one that trains
                self.index, self.owned = self.index.to(tensor.device), self.owned.to(tensor.device)
                self.order = self.order.to(tensor.device)

"""Cut parameters and buffers in place, under their own names and as the same objects, and put them together again.

    q.weight  [4096, 4096]   "*32x128", rank 1 of 2   ──cut──▶   q.weight  [2048, 4096]   rows 2048 to 4095
                                                     ◀─merge──

Tied names stay tied: what shares memory is cut once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch
from torch import nn

from autoshard.common.module_paths import join
from autoshard.common.packed import is_packed, repacked
from autoshard.errors import PlanError
from autoshard.plan.sharding import Cut, coordinates_of
from autoshard.runtime.collectives import Ranks, layout
from autoshard.runtime.devices import CPU, fresh_copy
from autoshard.runtime.local_ranks import LocalRanks
from autoshard.runtime.moves import Undo, geometry, memory_groups, named_tensors, replace_all
from autoshard.runtime.rank_tensor import RankTensor, spread

Allocate = Callable[[tuple[int, ...], torch.dtype, torch.device], torch.Tensor]
"""Returns memory of a shape and dtype on a device, with any values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutTensor:
    """How one tensor of a model is cut: dimension `dim` of the whole, which is `axis`, in `shares`."""

    dim: int
    axis: str
    shares: tuple[int, ...]


def find_cut_tensors(model: nn.Module, cuts: Sequence[Cut]) -> dict[str, CutTensor]:
    """Name -> how it is cut, with every name of a tied tensor.

    Raises `PlanError` for what the model does not have, what does not fit its shape, and what is cut in two ways.
    """
    tensors = named_tensors(model)
    groups = {name: names for names in memory_groups(tensors) for name in names}
    found: dict[str, CutTensor] = {}
    for cut in cuts:
        for block in cut.blocks:
            for shard in cut.shards:
                name = join(block, shard.name)
                if name not in tensors:
                    raise PlanError(f"the plan cuts {name!r}, which this {type(model).__name__} does not have.")
                _check_fits(name, tensors[name], shard.dim, shard.axis, cut)
                one = CutTensor(dim=shard.dim, axis=shard.axis, shares=cut.shares)
                for tied in groups[name]:
                    _check_tied(name, tensors[name], tied, tensors[tied])
                    if found.setdefault(tied, one) != one:
                        raise PlanError(
                            f"the plan cuts {name!r} in two ways: dimension {found[tied].dim} as {found[tied].axis} "
                            f"and dimension {one.dim} as {one.axis}. Make the plan again."
                        )
    return found


def _check_fits(name: str, tensor: torch.Tensor, dim: int, axis: str, cut: Cut) -> None:
    try:
        coordinates = coordinates_of(axis)
    except ValueError as error:
        raise PlanError(f"the plan cuts {name!r} along something that is no axis: {error}") from None
    if is_packed(tensor):
        raise PlanError(f"the plan cuts {name!r}, which is packed (quantised) and can't be. Plan with it whole.")
    if dim >= tensor.dim() or dim < 0 or tensor.shape[dim] != len(coordinates):
        raise PlanError(
            f"the plan cuts dimension {dim} of {name!r} as {axis}, and its shape is {list(tensor.shape)}. The plan was "
            "made for another model; make a new one."
        )
    if int(coordinates.max(initial=-1)) + 1 != cut.size:
        raise PlanError(f"the plan cuts {name!r} as {axis}, which does not have {cut.size} slices. Make it again.")


def _check_tied(name: str, tensor: torch.Tensor, tied: str, other: torch.Tensor) -> None:
    if tensor is not other and geometry(tensor) != geometry(other):
        raise PlanError(
            f"the plan cuts {name!r}, and {tied!r} is a different view of the same memory. Plan with both whole."
        )


def cut_tensors(
    model: nn.Module,
    cuts: Mapping[str, CutTensor],
    ranks: Ranks,
    device: torch.device | None,
    log: list[Undo],
    allocate: Allocate | None = None,
) -> None:
    """Give every tensor its part, or a replica, on `device` (None: where it is); `log` takes what undoes it.

    `allocate`: gives memory, to be filled by the caller, to the parts of what is on meta.
    """
    tensors = named_tensors(model)

    def part(name: str, whole: torch.Tensor) -> torch.Tensor:
        if whole.is_meta and allocate is not None:
            return _empty_part(whole, cuts.get(name), ranks, device or CPU, allocate)
        return part_of(whole, cuts.get(name), ranks, device)

    replace_all(tensors, part, log)


def merge_tensors(
    model: nn.Module,
    cuts: Mapping[str, CutTensor],
    ranks: Ranks,
    devices: Mapping[str, torch.device],
    log: list[Undo],
) -> None:
    """Put the whole of every tensor in place again, on the device it was on; all ranks must do it at once."""
    tensors = named_tensors(model)

    def whole(name: str, part: torch.Tensor) -> torch.Tensor:
        merged = merge(part, cuts.get(name), ranks, devices.get(name))
        return repacked(merged, lambda stored: stored.to(devices[name])) if name in devices else merged

    replace_all(tensors, whole, log)


def part_of(whole: torch.Tensor, cut: CutTensor | None, ranks: Ranks, device: torch.device | None) -> torch.Tensor:
    """What the ranks of this process have of a tensor, on `device` (None: where it is)."""
    if is_packed(whole):
        return repacked(whole, lambda stored: part_of(stored, None, ranks, device))
    if isinstance(ranks, LocalRanks):
        if cut is None:
            return spread(whole, ranks.devices)
        parts = [slice_of(whole, cut, rank).to(one) for rank, one in enumerate(ranks.devices)]
        return RankTensor(parts, ranks.devices)
    if cut is not None:
        assert ranks.rank is not None
        whole = slice_of(whole, cut, ranks.rank)
    return whole if device is None else whole.to(device)


def _empty_part(
    whole: torch.Tensor, cut: CutTensor | None, ranks: Ranks, device: torch.device, allocate: Allocate
) -> torch.Tensor:
    """Memory for the part of a tensor on meta; like a part that was cut, it is contiguous."""
    if is_packed(whole):
        return repacked(whole, lambda stored: _empty_part(stored, None, ranks, device, allocate))

    def empty(rank: int, device: torch.device) -> torch.Tensor:
        shape = tuple((whole if cut is None else slice_of(whole, cut, rank)).shape)
        return allocate(shape, whole.dtype, device)

    if isinstance(ranks, LocalRanks):
        return RankTensor([empty(rank, one) for rank, one in enumerate(ranks.devices)], ranks.devices)
    return empty(ranks.rank or 0, device)


def runs_of(cut: CutTensor, rank: int) -> tuple[tuple[int, int], ...]:
    """Return what a rank keeps of the dimension that is cut as (first index, index after the last) of each stretch."""
    index = layout(cut.axis, cut.shares).kept[rank]
    if not len(index):
        return ()
    breaks = numpy.flatnonzero(numpy.diff(index) != 1) + 1
    return tuple((int(run[0]), int(run[-1]) + 1) for run in numpy.split(index, breaks))


def runs_within(runs: tuple[tuple[int, int], ...], begin: int, end: int) -> tuple[tuple[int, int], ...]:
    """What stretches have from place `begin` to `end` of all that they have, one after the other."""
    found, place = [], 0
    for start, stop in runs:
        first, last = max(start, start + begin - place), min(stop, start + end - place)
        if first < last:
            found.append((first, last))
        place += stop - start
    return tuple(found)


def slice_of(whole: torch.Tensor, cut: CutTensor, rank: int) -> torch.Tensor:
    """Copy the part of a tensor that a rank keeps."""
    index = layout(cut.axis, cut.shares).kept[rank]
    if len(index) and index[-1] - index[0] + 1 == len(index):
        return whole.narrow(cut.dim, int(index[0]), len(index)).clone(memory_format=torch.contiguous_format)
    return whole.index_select(cut.dim, torch.from_numpy(index.copy()).to(whole.device))


def merge(part: torch.Tensor, cut: CutTensor | None, ranks: Ranks, device: torch.device | None = None) -> torch.Tensor:
    """The whole of a tensor of which this is this rank's part, as an ordinary tensor.

    One process that has all parts puts them together on `device`, if it is given: theirs may be full.
    """
    part = part.detach()
    if is_packed(part):
        return repacked(part, lambda stored: merge(stored, None, ranks, device))
    if cut is None:
        return part.parts[0] if isinstance(part, RankTensor) else part
    if part.layout is torch.sparse_coo:  # a gradient of an embedding
        return merge(part.to_dense(), cut, ranks, device).to_sparse()
    where = layout(cut.axis, cut.shares)
    ordinary = isinstance(ranks, LocalRanks) and not isinstance(part, RankTensor)
    if ordinary or part.dim() <= cut.dim or part.shape[cut.dim] != len(where.kept[ranks.rank or 0]):
        return part  # no part: code has put another tensor in its place, which all ranks have whole
    if not isinstance(part, RankTensor):
        order = torch.from_numpy(where.order).to(part.device)
        return ranks.gather(part, cut.dim, where, order).contiguous()
    target = device or part.parts[0].device
    whole = torch.cat([one if one.device == target else fresh_copy(one, target) for one in part.parts], cut.dim)
    return whole if where.in_order else whole.index_select(cut.dim, torch.from_numpy(where.order).to(target))

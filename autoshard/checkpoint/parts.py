"""Which parts of which tensors this process holds, whatever plan is applied: what a training checkpoint is made of.

    q.weight [4096, 4096], "*32x128", rank 1 of 2     part at (2048, 0) of size (2048, 4096)
    qkv.weight, "(*8x64|*8x64|*8x64)", rank 1 of 2    parts at (256, 0), (768, 0) and (1280, 0) of size (256, ...)
    of another stage of a pipeline                    no part
    a shard of FSDP                                   what torch says of its DTensor

Optimizer state that has the shape of its parameter is laid out as the parameter is.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.errors import CheckpointError
from autoshard.packed import is_packed
from autoshard.runtime.collectives import layout
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.pipeline_record import pipeline_record
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.slices import CutTensor, runs_of, runs_within


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a tensor of which this process holds the values; `value` is a view of what it holds.

    `written`: whether this process writes it; of what several have, one does.
    """

    value: torch.Tensor
    offset: tuple[int, ...]
    written: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What this process holds of one tensor, whose whole has `shape`; tied tensors are under their first name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]


Layout = Callable[[str, torch.Tensor], Held]
"""Name of a parameter or buffer, and a tensor that is laid out as that is -> what of it is here."""


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the `state_dict` of a model has, tied tensors once: first name -> the tensor itself."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def layout_of(model: nn.Module) -> Layout:
    """Return what tells which parts of a tensor of this model are here. Raises `CheckpointError` for packed ones."""
    cuts = cut_record(model)
    stages = pipeline_record(model)

    def held(name: str, tensor: torch.Tensor) -> Held:
        if is_packed(tensor) and not hasattr(tensor, "__create_chunk_list__"):
            raise CheckpointError(
                f"{name} is quantised, and a training checkpoint holds plain tensors. Train the model as it was before."
            )
        if stages is not None and not stages.has(name):
            return Held(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=())
        cut = cuts.tensors.get(name) if cuts is not None else None
        if hasattr(tensor, "__create_chunk_list__"):
            return _of_dtensor(name, tensor, cut, (cuts.ranks.rank if cuts is not None else None) or 0)
        if isinstance(tensor, RankTensor):
            return _of_ranks(name, tensor, cut)
        written = stages is None or stages.owner(name) == stages.position
        if cut is None or cuts is None or not tensor.dim():
            part = Part(value=tensor.detach(), offset=(0,) * tensor.dim(), written=written)
            return Held(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=(part,))
        parts = _cut_parts(tensor.detach(), cut, cuts.ranks.rank or 0)
        return Held(name=name, shape=_whole_shape(tensor, cut), dtype=tensor.dtype, parts=parts)

    return held


def _of_dtensor(name: str, tensor: torch.Tensor, cut: CutTensor | None, rank: int) -> Held:
    """The shard of a tensor, or of a rank's part of it where it is cut as well."""
    boxes = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    local = tensor.detach().to_local()  # type: ignore[attr-defined]
    parts = tuple(Part(value=local, offset=tuple(box.offsets)) for box in boxes if local.numel())
    if cut is None or not tensor.dim():
        return Held(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=parts)
    found: list[Part] = []
    for part in parts:
        first = part.offset[0]
        for one in _cut_parts(local, cut, rank, first if cut.dim == 0 else 0):
            rows = one.offset[0] if cut.dim == 0 else first
            found.append(Part(value=one.value, offset=(rows, *one.offset[1:]), written=one.written))
    return Held(name=name, shape=_whole_shape(tensor, cut), dtype=tensor.dtype, parts=tuple(found))


def _of_ranks(name: str, tensor: RankTensor, cut: CutTensor | None) -> Held:
    if cut is None or not tensor.dim():
        offset = (0,) * tensor.dim()
        replicas = tuple(
            Part(value=part.detach(), offset=offset, written=not rank) for rank, part in enumerate(tensor.parts)
        )
        return Held(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, parts=replicas)
    parts = [one for rank, part in enumerate(tensor.parts) for one in _cut_parts(part.detach(), cut, rank)]
    return Held(name=name, shape=_whole_shape(tensor, cut), dtype=tensor.dtype, parts=tuple(parts))


def _whole_shape(part: torch.Tensor, cut: CutTensor) -> tuple[int, ...]:
    size = layout(cut.axis, cut.shares).size
    return (*part.shape[: cut.dim], size, *part.shape[cut.dim + 1 :])


def _cut_parts(part: torch.Tensor, cut: CutTensor, rank: int, first: int = 0) -> tuple[Part, ...]:
    """The stretches of what is given of a rank's part, from its place `first` on; what all keep, rank 0 writes."""
    kept = layout(cut.axis, cut.shares).kept[rank]
    common = {int(kept[place]) for place in layout(cut.axis, cut.shares).common[rank]}
    found: list[Part] = []
    place = 0
    for begin, end in runs_within(runs_of(cut, rank), first, first + part.shape[cut.dim]):
        at = begin
        while at < end:  # a stretch may go over from what all keep to what only this rank has
            stop, shared = at + 1, at in common
            while stop < end and (stop in common) == shared:
                stop += 1
            offset = [0] * part.dim()
            offset[cut.dim] = at
            value = part.narrow(cut.dim, place, stop - at)
            found.append(Part(value=value, offset=tuple(offset), written=not shared or rank == 0))
            place += stop - at
            at = stop
    return tuple(found)

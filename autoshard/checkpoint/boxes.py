"""Which boxes of which tensors this process has, whatever plan is applied.

q.weight [4096, 4096], "*32x128", rank 1 of 2     a box at (2048, 0) of size (2048, 4096)
qkv.weight, "(*8x64|*8x64|*8x64)", rank 1 of 2    boxes at (256, 0), (768, 0) and (1280, 0) of size (256, ...)
a shard of FSDP, of a rank's part or of all       the rows that it has
"""

from dataclasses import dataclass

import numpy
import torch

from autoshard.plan.sharding import coordinates_of
from autoshard.runtime.cut_state import CutRecord
from autoshard.runtime.dtensors import is_sharded, own_part, rows_of
from autoshard.runtime.rank_tensor import RankTensor
from autoshard.runtime.slices import CutTensor, runs_of, runs_within


@dataclass(frozen=True, slots=True)
class Box:
    """A box of a whole tensor, or all of it; `value` is a view of what this process has, or memory to be filled.

    Attributes:
        offset: where it begins along each dimension; (): it is all of the tensor.
        written: whether this process writes it to a checkpoint; of what several ranks of a cut have, the first does.
    """

    value: torch.Tensor
    offset: tuple[int, ...] = ()
    written: bool = True


def boxes_of(name: str, tensor: torch.Tensor, record: CutRecord | None) -> list[Box]:
    """The boxes of a parameter or buffer, or of what is laid out as that is; `record`: how the model is cut."""
    own = (record.ranks.rank or 0) if record is not None else 0
    cut = record.tensors.get(name) if record is not None and tensor.dim() else None
    first, here = 0, {own: tensor}
    if isinstance(tensor, RankTensor):
        here = dict(enumerate(tensor.parts))
    elif is_sharded(tensor):
        first, here = rows_of(tensor)[0], {own: own_part(tensor)}
    if cut is not None:
        return [box for rank, value in here.items() for box in _cut_boxes(value.detach(), cut, rank, first)]
    offset = (first, *(0,) * (tensor.dim() - 1)) if tensor.dim() else ()
    return [
        Box(value.detach(), offset, rank == own)
        for rank, value in here.items()
        if value.numel() or not is_sharded(tensor)
    ]


def _cut_boxes(part: torch.Tensor, cut: CutTensor, rank: int, first: int) -> list[Box]:
    """The stretches of a rank's part, or of its rows from `first` on."""
    common = coordinates_of(cut.axis) < 0
    row, begin = (first, 0) if cut.dim else (0, first)
    found: list[Box] = []
    place = 0
    for start, end in runs_within(runs_of(cut, rank), begin, begin + part.shape[cut.dim]):
        # a stretch may go over from what all ranks keep to what only this one has
        breaks = numpy.flatnonzero(numpy.diff(common[start:end])) + 1
        for stretch in numpy.split(numpy.arange(start, end), breaks):
            offset = [row, *[0] * (part.dim() - 1)]
            offset[cut.dim] = int(stretch[0])
            written = rank == 0 or not common[stretch[0]]
            found.append(Box(part.narrow(cut.dim, place, len(stretch)), tuple(offset), bool(written)))
            place += len(stretch)
    return found

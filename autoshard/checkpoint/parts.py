"""What this process holds of each tensor of a model, as the planners of torch's distributed checkpoints ask for it.

Of another stage of a pipeline that is nothing, and what several stages have the first of them writes. Optimizer state
that has the shape of its parameter is laid out as the parameter is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from autoshard.checkpoint.boxes import Box, boxes_of
from autoshard.common.packed import is_packed
from autoshard.errors import CheckpointError
from autoshard.runtime.cut_state import whole_shape
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.dtensors import is_sharded
from autoshard.runtime.pipeline_record import pipeline_record
from autoshard.runtime.rank_tensor import RankTensor


@dataclass(frozen=True, slots=True)
class StoredParts:
    """The boxes that this process holds of one tensor, whose whole has `shape`; tied ones are under their first name.

    The methods are those by which torch's planners ask an object which boxes of a tensor are here.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: Sequence[Box]

    def size(self) -> torch.Size:
        """Shape of the whole."""
        return torch.Size(self.shape)

    def values(self, index: MetadataIndex, number: int | None = None) -> torch.Tensor:
        """The values of a box that was named to torch: by its place among the boxes, or by its offset."""
        if number is not None:
            return self.boxes[number].value
        return next(box.value for box in self.boxes if box.offset == tuple(index.offset or ()))

    def __create_write_items__(self, name: str, stored: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for box, chunk in zip(self.boxes, self.__create_chunk_list__(), strict=True)
            if box.written
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offset), box.value.shape) for box in self.boxes]


Layout = Callable[[str, torch.Tensor], StoredParts]
"""Name of a parameter or buffer, and a tensor that is laid out as that is -> what of it is here."""


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """What the `state_dict` of a model has, tied tensors once: first name -> the tensor itself."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor):
            found.setdefault(id(value), (name, value))
    return dict(found.values())


def layout_of(model: nn.Module) -> Layout:
    """Return what tells which boxes of a tensor of this model are here. Raises `CheckpointError` for packed ones."""
    cuts, stages = cut_record(model), pipeline_record(model)

    def stored(name: str, tensor: torch.Tensor) -> StoredParts:
        if stages is not None and not stages.has(name):
            return StoredParts(tuple(tensor.shape), tensor.dtype, ())
        if is_packed(tensor) and not is_sharded(tensor) and not isinstance(tensor, RankTensor):
            raise CheckpointError(
                f"{name} is quantised, and a training checkpoint holds plain tensors. Train the model as it was before."
            )
        boxes = boxes_of(name, tensor, cuts)
        if stages is not None and stages.owner(name) != stages.pp_rank:
            boxes = [replace(box, written=False) for box in boxes]
        return StoredParts(whole_shape(tensor, name, cuts) if tensor.dim() else (), tensor.dtype, boxes)

    return stored

"""Planners of torch's distributed checkpoints for parts of tensors. Imported only when one is written or read."""

import io
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from autoshard.checkpoint.parts import Held, Part
from autoshard.checkpoint.training import Content


def _box(part: Part) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(part.offset), sizes=part.value.shape)


class SaveParts(DefaultSavePlanner):
    """Write the parts that this process holds; of equal ones the lowest rank's."""

    def __init__(self, content: Content) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)
        self.content = content
        self._parts: dict[tuple[str, torch.Size], Part] = {}

    def create_local_plan(self) -> SavePlan:
        items: list[WriteItem] = []
        for key, held in self.content.tensors.items():
            properties = TensorProperties(dtype=held.dtype)
            for part in held.parts:
                if not part.written:
                    continue
                box = _box(part)
                self._parts[key, box.offsets] = part
                size = torch.Size(held.shape)
                data = TensorWriteData(chunk=box, properties=properties, size=size)
                items.append(
                    WriteItem(index=MetadataIndex(key, box.offsets), type=WriteItemType.SHARD, tensor_data=data)
                )
        for key, blob in self.content.blobs.items():
            size_of = BytesIOWriteData(nbytes=len(blob))
            items.append(WriteItem(index=MetadataIndex(key), type=WriteItemType.BYTE_IO, bytes_io_data=size_of))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self.content.blobs[index.fqn])
        assert index.offset is not None
        return self._parts[index.fqn, index.offset].value.cpu().contiguous()


class LoadParts(DefaultLoadPlanner):
    """Read into the parts that this process holds, and the bytes that it asks for into `blobs`."""

    def __init__(self, content: Content) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.content = content
        self.blobs: dict[str, bytes] = {}
        self._parts: dict[tuple[str, int], Part] = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        self._saved: Mapping[str, Any] = metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, held in self.content.tensors.items():
            items += self._reads(key, held)
        for key in self.content.blobs:
            index, nothing = MetadataIndex(key), torch.Size((0,))
            items.append(_read(LoadItemType.BYTE_IO, index, index, nothing, nothing, nothing))
        return LoadPlan(items)

    def _reads(self, key: str, held: Held) -> list[ReadItem]:
        saved = self._saved[key]
        assert isinstance(saved, TensorStorageMetadata)
        items: list[ReadItem] = []
        for number, part in enumerate(held.parts):
            self._parts[key, number] = part
            for item in create_read_items_for_chunk_list(key, saved, [_box(part)]):
                index = MetadataIndex(key, item.dest_index.offset, number)
                where = item.dest_offsets, item.storage_offsets, item.lengths
                items.append(_read(item.type, index, item.storage_index, *where))
        return items

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        assert index.index is not None
        value = self._parts[index.fqn, index.index].value
        for dim, (begin, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            value = value.narrow(dim, begin, length)
        return value

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing is left to do: the engine has copied into the view."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.blobs[read_item.dest_index.fqn] = value.getvalue()


def _read(
    kind: LoadItemType,
    here: MetadataIndex,
    stored: MetadataIndex,
    offset: torch.Size,
    stored_offset: torch.Size,
    lengths: torch.Size,
) -> ReadItem:
    return ReadItem(
        type=kind,
        dest_index=here,
        dest_offsets=offset,
        storage_index=stored,
        storage_offsets=stored_offset,
        lengths=lengths,
    )

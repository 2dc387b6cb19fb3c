"""Tensors of which each rank has a part (DTensors): the whole, the own part, and what can meet it."""

from typing import Any

import torch

from autoshard.runtime.collectives import ProcessRanks, lost


def rows_of(sharded: Any) -> tuple[int, int]:
    """The first row of a sharded parameter that this rank has, and the first that it has not."""
    box = sharded.__create_chunk_list__()[0]
    begin = int(box.offsets[0])
    return begin, begin + int(sharded.to_local().shape[0])


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with all of its rows; all ranks call it. Any that is not sharded is returned as it is."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    try:
        return sharded.full_tensor()
    except RuntimeError as error:
        raise lost(ProcessRanks.of(sharded.device_mesh.get_group(sharded.device_mesh.ndim - 1)), error) from error


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor that may be sharded, as a view."""
    part: Any = tensor
    return part.to_local() if is_sharded(tensor) else tensor


def alike_on(sharded: Any, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that all ranks have whole, so that it can meet one that may be sharded."""
    if not is_sharded(sharded):
        return tensor
    from torch.distributed.tensor import DTensor, Replicate

    return DTensor.from_local(tensor, sharded.device_mesh, [Replicate()], run_check=False)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of which each rank has a part (a DTensor)."""
    return hasattr(tensor, "full_tensor") and hasattr(tensor, "placements")

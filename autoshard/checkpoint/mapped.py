"""Tensors of a checkpoint that stay in their file: what a plan keeps on disk."""

import torch

from autoshard.checkpoint.data import Entry
from autoshard.runtime.mapped import map_tensor


def mapped_tensor(entry: Entry) -> torch.Tensor:
    """Return a CPU tensor that privately maps its bytes in the file; nothing is read. Raises `ApplyError`."""
    return map_tensor(entry.file, entry.offset, entry.dtype, entry.shape)

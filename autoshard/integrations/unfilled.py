"""A model whose parameters have no values yet, and where those come from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from autoshard.checkpoint.boxes import Box
from autoshard.checkpoint.data import Checkpoint, Source
from autoshard.checkpoint.reading import read_into
from autoshard.checkpoint.traced import META, TracedTensor
from autoshard.common.own_tensors import own_tensors, put_tensor
from autoshard.errors import CheckpointError
from autoshard.runtime.moves import named_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfilled:
    """A model with parameters on meta and real buffers; `sources`: one of each parameter's names -> how it is made.

    What the checkpoint does not have was initialised and is real. `quantised`: some are packed as they are read.
    """

    model: nn.Module
    checkpoint: Checkpoint
    sources: Mapping[str, Source]
    quantised: bool = False


def leave_unfilled(model: nn.Module, checkpoint: Checkpoint) -> Unfilled:
    """Put parameters on meta in the place of traced ones; traced buffers are read: they decide what is run."""
    names: dict[int, str] = {}
    found: dict[str, TracedTensor] = {}
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, TracedTensor) and names.setdefault(id(tensor), name) == name:
            if tensor.shape != tensor.plain.shape or tensor.dtype != tensor.plain.dtype:
                raise CheckpointError(
                    f"{type(model).__name__} changes {name} after loading it, in a way not known here."
                )
            found[name] = tensor
    sources = {
        name: Source(shape=tuple(tensor.shape), dtype=tensor.dtype, made=tensor.expression)
        for name, tensor in found.items()
    }
    buffers = {name: tensor for name, tensor in found.items() if not isinstance(tensor, nn.Parameter)}
    values = {name: torch.empty(tuple(tensor.shape), dtype=tensor.dtype) for name, tensor in buffers.items()}
    read_into(checkpoint, sources, [(name, Box(value)) for name, value in values.items()])
    made: dict[int, torch.Tensor] = {id(buffers[name]): value for name, value in values.items()}
    for tensor in found.values():
        if id(tensor) not in made:
            empty = torch.empty_like(tensor.plain, memory_format=torch.contiguous_format, device=META)
            made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    for module in model.modules():
        for name, value, kind in list(own_tensors(module)):
            if id(value) in made:
                put_tensor(module, name, made[id(value)], kind)
    rest = {name: source for name, source in sources.items() if name not in buffers}
    return Unfilled(model=model, checkpoint=checkpoint, sources=rest)

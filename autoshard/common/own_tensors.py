"""The parameters and buffers that a module itself has, not those of modules in it."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import nn

from autoshard.torch_private import unsaved_buffers

Kind = Literal["parameter", "buffer"]
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes that torch gives to each module: what it holds, and its hooks."""


def own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor, Kind]]:
    """Yield (name, tensor, kind); a tensor once for each of its names."""
    for name, parameter in nn.Module.named_parameters(module, recurse=False, remove_duplicate=False):
        yield name, parameter, "parameter"
    for name, buffer in nn.Module.named_buffers(module, recurse=False, remove_duplicate=False):
        yield name, buffer, "buffer"


def put_tensor(module: nn.Module, name: str, tensor: Any, kind: Kind) -> None:
    """Put another tensor in the place of one that a module has. A parameter may be a buffer as well."""
    if kind == "buffer":
        nn.Module.register_buffer(module, name, tensor, persistent=name not in unsaved_buffers(module))
    else:
        nn.Module.register_parameter(module, name, tensor)


def tables(module: nn.Module) -> list[dict[str, Any]]:
    """The dicts in which a module has its parameters, buffers, modules and hooks; a shallow copy of it has the same."""
    found = [vars(module).get(name) for name in OF_EVERY_MODULE]
    return [table for table in found if isinstance(table, dict)]

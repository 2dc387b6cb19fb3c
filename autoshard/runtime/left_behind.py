"""The tensors that forwards leave in attributes of modules: an auxiliary loss, a table, positions for the next call.

    self.aux = gate.mean()          whole call: of all rows          parts: each makes one of its own rows

A batch is not divided where a forward leaves what parts would each make for themselves.
"""

from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from autoshard.nested import tensors_in

_TABLES = frozenset(vars(nn.Module()))
"""Attributes that every module has: parameters, buffers, children, hooks."""
_NESTED = (torch.Tensor, tuple, list, dict)


def attributes(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of all that modules hold besides what torch has in each of them, if tensors can be in it."""
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in _TABLES and (isinstance(value, _NESTED) or is_dataclass(value)):
                yield (f"{path}.{attribute}" if path else attribute), value


def new_tensors(model: nn.Module, known: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in any attribute besides those that are known, by "path.attribute" and the path inside it."""
    ids = set(map(id, known))
    found = (pair for name, value in attributes(model) for pair in tensors_in(value, name))
    return {place: tensor for place, tensor in found if id(tensor) not in ids}

"""What replicas in one process are made of: objects of the same classes as modules, with attributes of their own."""

import copy
import functools
import types
from collections import OrderedDict
from typing import Any

import torch
from torch import nn

from autoshard.errors import ApplyError
from autoshard.nested import map_tensors

MODULE_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = frozenset(name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set))
"""Registries of hooks: a shell has its own, for what a forward registers on it is not for the model."""
_DEPTH = 4
"""How deep attributes are looked through for modules and tensors."""


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module as they are now, with registries of hooks as copies."""
    return {
        name: copy.copy(value) if name in _HOOKS and name not in MODULE_TABLES else value
        for name, value in vars(module).items()
    }


def but(attributes: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Attributes without some of them."""
    return {name: value for name, value in attributes.items() if name not in names}


def empty(module: nn.Module) -> nn.Module:
    """An object of the same class without any attributes."""
    if isinstance(module, torch.jit.ScriptModule):
        raise ApplyError(
            f"{type(module).__name__} is compiled by TorchScript, and such a module can't be replicated. "
            "Apply the plan to the module it was compiled from."
        )
    return module.__class__.__new__(module.__class__)


def counterpart_of(
    value: Any, shells: dict[int, nn.Module], tensors: dict[int, torch.Tensor], depth: int = _DEPTH
) -> tuple[Any, bool]:
    """An attribute's value with modules and tensors replaced (the very object if it has none); whether it has tensors.

    Looked through are tensors, modules, their bound methods, partial functions, and lists, tuples and dicts of those.
    """
    if isinstance(value, torch.Tensor):
        return tensors.get(id(value), value), True
    if isinstance(value, nn.Module):
        return shells.get(id(value), value), False
    if depth == 0:
        return value, False
    inner = functools.partial(counterpart_of, shells=shells, tensors=tensors, depth=depth - 1)
    if isinstance(value, types.MethodType):
        owner, holds = inner(value.__self__)
        return (value if owner is value.__self__ else types.MethodType(value.__func__, owner)), holds
    if type(value) is functools.partial:
        (function, a), (args, b), (kwargs, c) = inner(value.func), inner(value.args), inner(value.keywords)
        same = function is value.func and args is value.args and kwargs is value.keywords
        return (value if same else functools.partial(function, *args, **kwargs)), a or b or c
    if type(value) in (list, tuple):
        items = [inner(item) for item in value]
        holds = any(one for _, one in items)
        if all(new is old for (new, _), old in zip(items, value, strict=True)):
            return value, holds
        return type(value)(new for new, _ in items), holds
    if type(value) in (dict, OrderedDict):
        entries = {key: inner(item) for key, item in value.items()}
        holds = any(one for _, one in entries.values())
        if all(new is value[key] for key, (new, _) in entries.items()):
            return value, holds
        return type(value)((key, new) for key, (new, _) in entries.items()), holds
    return value, False


def held(value: Any) -> list[torch.Tensor]:
    """The tensors in an attribute's value."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    if isinstance(value, functools.partial):
        map_tensors((value.args, value.keywords), note)
    else:
        map_tensors(value, note)
    return found

"""What comes from outside of a cut model: modules that share its parameters, and nested tensors of others."""

import gc
from collections.abc import Mapping

import torch
from torch import nn

from autoshard.common.collector import all_listed
from autoshard.errors import ApplyError
from autoshard.runtime.rank_tensor import NESTED


def check_not_shared(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ApplyError` if a module outside of `model` has one of its tensors that are to be cut, by name."""
    with all_listed():
        found = _sharing(model, tensors)
        if found:
            gc.collect()  # it may be gone but for a cycle
            found = _sharing(model, tensors)
    if found:
        name, other = found
        raise ApplyError(
            f"{name} is also a parameter of a {other} that is not part of this {type(model).__name__}: it would have a "
            "part of it, and a part of its gradient. Apply to the module that holds both, or untie them."
        )


def _sharing(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> tuple[str, str] | None:
    inside = {id(module) for module in model.modules()}
    names = {id(tensor): name for name, tensor in tensors.items()}
    for other in gc.get_objects():
        if issubclass(type(other), nn.Module) and id(other) not in inside:
            owned = vars(other)
            for held in (owned.get("_parameters"), owned.get("_buffers")):
                for tensor in (held or {}).values():
                    if id(tensor) in names:
                        return names[id(tensor)], type(other).__name__
    return None


class Dense:
    """Pre-hook of a block: a layer that is cut has no sizes for nested tensors."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if any(isinstance(value, torch.Tensor) and value.is_nested for value in args):
            raise ApplyError(f"{type(module).__name__} is cut: {NESTED}")

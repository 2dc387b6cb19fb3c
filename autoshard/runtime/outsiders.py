"""What comes from outside of a cut model: modules that share its parameters, caches and nested tensors of others."""

import gc
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from autoshard.collector import all_listed
from autoshard.errors import ApplyError, AutoshardError
from autoshard.nested import tensors_in
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


_ELSEWHERE = (
    "Tensors that are neither parameters nor buffers stay where they were made. Register them as buffers, or make them "
    "on the device of what they meet (device=x.device)."
)


def explain_devices(module: nn.Module, args: tuple, result: Any) -> None:
    """Hook of the root, also after an exception: say what may be wrong where torch complains of several devices."""
    error = sys.exc_info()[1]
    if isinstance(error, RuntimeError) and not hasattr(error, "__notes__") and "on the same device" in str(error):
        error.add_note(_ELSEWHERE)


class Explain:
    """Hook of the root, also after an exception: say what may be wrong where torch complains of shapes in the model.

    A cache has the sizes of the ranks that made it; and code may take a way that the plan has never seen.
    """

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        error = None if torch.compiler.is_compiling() else sys.exc_info()[1]
        if not isinstance(error, RuntimeError | IndexError | ValueError) or isinstance(error, AutoshardError):
            return
        if hasattr(error, "__notes__"):
            return
        if "on the same device" in str(error):
            error.add_note(_ELSEWHERE)
            return
        objects = [value for value in (*args, *kwargs.values()) if hasattr(value, "__dict__")]
        kinds = [type(value).__name__ for value in objects if not list(tensors_in(value))]
        what = "If it can be called like this when it is whole, plan again with inputs and settings like these."
        if kinds:
            what = (
                f"A {kinds[0]} that was made by the whole model, or over another number of ranks, has tensors of other "
                "sizes: let the cut model make a new one."
            )
        error.add_note(f"This model is cut over {self.size} ranks. {what}")

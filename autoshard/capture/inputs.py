"""What to call the model with: the user's inputs in one form, or inputs derived from a config and a workload."""

from typing import Any

import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.workload import Workload


def as_call(inputs: Any, model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Bring a tensor, a tuple, a dict or a callable returning one of these into (args, kwargs)."""
    if callable(inputs) and not isinstance(inputs, (torch.Tensor, dict)):
        inputs = inputs()
    if isinstance(inputs, torch.Tensor):
        return (inputs,), {}
    if isinstance(inputs, dict):
        return (), {str(name): value for name, value in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    raise CaptureError(
        f"inputs for {type(model).__name__} must be a tensor, a tuple of positional arguments, a dict of keyword arguments "
        f"or a callable returning one of these, got {type(inputs).__name__}."
    )


def derive_inputs(model: nn.Module, workload: Workload) -> tuple[tuple[Any, ...], dict[str, Any]]:
    raise CaptureError("not yet")

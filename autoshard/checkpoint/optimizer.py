"""The state of an optimizer under the names of its parameters, so that it is found again under any plan."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from autoshard.errors import CheckpointError

Group = dict[str, Any]


def parameter_names(model: nn.Module, optimizer: Optimizer) -> dict[int, str]:
    """id of a parameter -> its first name. Raises `CheckpointError` for parameters that the model does not have."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        names.setdefault(id(parameter), name)
    for number, group in enumerate(optimizer.param_groups):
        strange = [parameter for parameter in group["params"] if id(parameter) not in names]
        if strange:
            raise CheckpointError(
                f"group {number} of the optimizer has a parameter of shape {list(strange[0].shape)} that the model "
                "does not have. Make the optimizer after autoshard.apply, from model.parameters()."
            )
    return names


def groups_of(model: nn.Module, optimizer: Optimizer) -> list[Group]:
    """The parameter groups with names in the place of parameters."""
    names = parameter_names(model, optimizer)
    return [
        {**{key: value for key, value in group.items() if key != "params"},
         "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]  # fmt: skip


def check_groups(model: nn.Module, optimizer: Optimizer, saved: list[Group] | None, path: Path) -> None:
    """Raise `CheckpointError` unless an optimizer groups its parameters as the saved one did."""
    if saved is None:
        raise CheckpointError(f"{path} was written without an optimizer. Load it without one, and start a new one.")
    now = groups_of(model, optimizer)
    if [sorted(group["params"]) for group in now] != [sorted(group["params"]) for group in saved]:
        counts = [", ".join(str(len(group["params"])) for group in groups) for groups in (now, saved)]
        raise CheckpointError(
            f"the optimizer has {len(now)} groups of {counts[0]} parameters, and the one in {path} has {len(saved)} of "
            f"{counts[1]}, or of others. Make the optimizer as it was when the checkpoint was written."
        )


def restore_groups(optimizer: Optimizer, saved: list[Group]) -> None:
    """Set learning rates and what else groups have."""
    for group, values in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})


def is_like(value: Any, parameter: torch.Tensor) -> bool:
    """Whether a piece of state is laid out as its parameter."""
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim() > 0


def make_state(parameter: torch.Tensor, like: bool, shape: tuple[int, ...], dtype: torch.dtype, group: Group) -> Any:
    """Memory for a piece of state that is about to be read.

    What counts steps is on the CPU unless the optimizer runs fused or captured, as torch's own has it.
    """
    if like:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    on_device = bool(group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")

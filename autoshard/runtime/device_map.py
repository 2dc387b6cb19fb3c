"""Say where an applied model is in the way that Accelerate does, for what would move it or copy it otherwise."""

from collections.abc import Mapping

from torch import nn

_PREPARED = "_is_accelerate_prepared"
"""What Accelerate asks of a model; before 1.14 it does not, and refuses DTensors or puts the model into DDP."""


class AppliedMap(dict[str, str]):
    """A device map that `apply` wrote; a model that was loaded with `device_map=` keeps its own."""


def with_map(model: nn.Module, device_map: Mapping[str, str]) -> nn.Module:
    """Set `hf_device_map`: with it a Trainer, or `Accelerator.prepare`, leaves the model where it is.

    A map of one entry says to them that the model may be moved, so a model that is on one device is told by its parts.
    """
    if set(device_map) == {""}:
        device_map = {name: device_map[""] for name, _ in model.named_children()} or device_map
    if isinstance(getattr(model, "hf_device_map", AppliedMap()), AppliedMap):
        computing_first = sorted(device_map, key=lambda path: device_map[path] == "disk")  # inputs go to the first one
        model.hf_device_map = AppliedMap({path: device_map[path] for path in computing_first})  # type: ignore[assignment]
    return model


def of_ranks(model: nn.Module) -> nn.Module:
    """Let a Trainer, or `Accelerator.prepare`, take a model that ranks share as it is: not moved and not in DDP."""
    vars(model)[_PREPARED] = True
    return model


def without_map(model: nn.Module) -> None:
    """Delete what `with_map` and `of_ranks` wrote."""
    vars(model).pop(_PREPARED, None)
    if isinstance(getattr(model, "hf_device_map", None), AppliedMap):
        del model.hf_device_map

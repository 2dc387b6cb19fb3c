"""What the parameters of offloaded modules are between calls: where, and whether a model can be offloaded so at all."""

from collections.abc import Mapping

import torch
from torch import nn

from autoshard.common.module_paths import above
from autoshard.errors import ApplyError, PlanError
from autoshard.plan import Plan
from autoshard.runtime.devices import CPU
from autoshard.runtime.mapped import file_of
from autoshard.runtime.moves import tied_groups
from autoshard.runtime.streaming import Streams


def resting(
    tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device], offloaded: Mapping[str, str]
) -> dict[str, torch.device]:
    """Name -> device between calls, from that of computing: the CPU for parameters of offloaded modules."""
    return {
        name: CPU
        if isinstance(tensors[name], nn.Parameter) and offloaded_module(name, offloaded) is not None
        else device
        for name, device in devices.items()
    }


def offloaded_module(name: str, offloaded: Mapping[str, str]) -> str | None:
    """Return the path of the offloaded module that a parameter is in, None if it stays on its device."""
    return next((path for path in above(name) if path in offloaded), None) if offloaded else None


def make_streams(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    devices: Mapping[str, torch.device],
    offloaded: Mapping[str, str],
) -> Streams:
    """Say on which device each offloaded module computes, and find its parameters.

    What is kept in CPU memory and computes there is not offloaded. Raises `PlanError` for a module on several devices,
    and for a parameter that is tied to one that is kept elsewhere.
    """
    used: dict[str, dict[torch.device, str]] = {path: {} for path in offloaded}
    for name, tensor in tensors.items():
        path = offloaded_module(name, offloaded)
        if path is not None and isinstance(tensor, nn.Parameter):
            used[path].setdefault(devices[name], name)
    for path, found in used.items():
        if len(found) > 1:
            places = ", ".join(f"{name} on {device}" for device, name in found.items())
            raise PlanError(
                f"the plan streams {path!r} from the {offloaded[path]}, but places it on several devices ({places}). "
                "Give it one device, or stream its parts one by one."
            )
    if offloaded:
        check_ties(tensors, devices, offloaded)
    computing = {path: next(iter(found)) for path, found in used.items() if found}
    streamed = {path: device for path, device in computing.items() if device != CPU or offloaded[path] == "disk"}
    return Streams(streamed, model)


def check_ties(
    tensors: Mapping[str, torch.Tensor], devices: Mapping[str, torch.device], offloaded: Mapping[str, str]
) -> None:
    """Raise `PlanError` for a tensor that has another name under which it is kept elsewhere."""
    for names in tied_groups(tensors):
        if len(names) == 1:
            continue
        paths = [offloaded_module(name, offloaded) for name in names]
        if any(paths) and (None in paths or len({devices[name] for name in names}) > 1):
            odd = next((name for name, path in zip(names, paths, strict=True) if path is None), names[-1])
            kept = next(name for name, path in zip(names, paths, strict=True) if path is not None and name != odd)
            raise PlanError(
                f"{kept} and {odd} are one tensor, and the plan keeps it off its device between calls for one of them "
                "only. Plan again, or let both stay on their device."
            )


def check_offloaded(model: nn.Module, plan: Plan) -> None:
    """Raise `PlanError` or `ApplyError` unless the model's parameters can be kept where the plan says."""
    if not plan.offloaded:
        return
    modules = dict(model.named_modules())
    for path in plan.offloaded:
        if path not in modules:
            raise PlanError(f"the plan streams {path!r}, which this {type(model).__name__} does not have.")
    if plan.workload.mode == "training":
        raise PlanError(
            f"this plan is for training and keeps the parameters of {len(plan.offloaded)} modules off their device "
            "between calls, where an optimizer can't update them and backward can't read them. Give the devices more "
            "memory, or add devices."
        )
    for path, place in plan.offloaded.items():
        for name, parameter in modules[path].named_parameters() if place == "disk" else ():
            if parameter.numel() and not parameter.is_meta and file_of(parameter) is None:
                raise ApplyError(
                    f"the plan keeps {path}.{name} on disk, but this model has it in memory, not in a file. Save the "
                    "model with autoshard.save(model, directory), then autoshard.load(directory, plan=plan)."
                )

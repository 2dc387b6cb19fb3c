"""Which modules get a hook, and of what kind.

mixed root ── watched if mixed-device
  ├─ embed    uniform, its parent is mixed ── arguments are moved to its device
  ├─ layers
  │    └─ 7   mixed-device:      h + f(h) with f elsewhere ── arguments are moved, its ops are watched
  └─ head     its weight is tied and lives with embed ── watched: the weight is copied once
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from autoshard.common.module_paths import above, is_below, is_container, parent
from autoshard.errors import ApplyError
from autoshard.plan.placement import resolve_execution_devices
from autoshard.runtime.around import surround, take_off
from autoshard.runtime.devices import CPU, is_accelerator, resolve_device, send
from autoshard.runtime.hooks import CallGuard, Hook, RootHook
from autoshard.runtime.microbatches import Divide
from autoshard.runtime.recompute import hook_recompute
from autoshard.runtime.replicas import Scatter, why_not_replicable
from autoshard.runtime.state import Record, Runtime
from autoshard.runtime.streaming import hook_streams


def hook_boundaries(model: nn.Module, runtime: Runtime, hooks: Mapping[str, Hook]) -> None:
    """Hook a model whose tensors are where `runtime.record` says."""
    modules = dict(model.named_modules())
    division = runtime.record.division
    if division is not None and division.devices and (reason := why_not_replicable(model)):
        raise ApplyError(reason)
    for path, hook in hooks.items():
        surround(modules[path], hook)
    if division is not None:
        if division.devices:
            surround(model, Scatter(runtime, division))
        else:
            runtime.copies.carry = send
            surround(model, Divide(runtime, division))
    hook_recompute(modules, runtime.record.recomputed, runtime.record.plan.recompute == "selective")
    hook_streams(modules, runtime.streams)
    mixed_calls = {path for path, hook in hooks.items() if hook.guard is not None and hook.guard.moves_inside}
    runtime.unfused = leaves_fused(modules, {*hooks, *runtime.streams.devices}, mixed_calls)


def unhook(model: nn.Module, runtime: Runtime) -> None:
    """Take all hooks off."""
    take_off(model)
    for handle in runtime.handles:
        handle.remove()
    runtime.handles.clear()


def find_boundaries(model: nn.Module, runtime: Runtime) -> dict[str, Hook]:
    """The hooks of modules by path; the root comes first."""
    record = runtime.record
    modules = dict(model.named_modules())
    uncallable = [path for path, module in modules.items() if is_container(module)]
    # With offloaded modules a model seems to be on the CPU, so code around the forward may bring tensors from there.
    away = set(record.placed) != {CPU}
    opened = {outer for path in record.plan.offloaded for outer in above(path)} if away else set()
    execution_devices = resolve_execution_devices(record.placements, modules, record.placements, uncallable, opened)
    on = {**execution_devices.devices, "": record.execution_devices[""]}
    resolved = {name: resolve_device(name) for name in set(on.values())}
    device = {path: resolved[name] for path, name in on.items()}
    first_path = {id(module): path for path, module in modules.items()}
    names = {path: first_path[id(module)] for path, module in model.named_modules(remove_duplicate=False)}

    moving = set(execution_devices.hooked)
    mixed_device = {names.get(path, path) for path in record.plan.mixed_device} & set(modules)
    mixed_device |= {parent(name) for name in record.devices if _lives_elsewhere(name, record, device)} & set(modules)
    for path, first in names.items():  # a module with a second place in the tree, where it is called from elsewhere
        if path != first and first in device:
            moving.add(first)
            if (
                execution_devices.devices.get(parent(path)) != execution_devices.devices.get(first)
                or parent(path) in execution_devices.mixed
            ):
                mixed_device.add(names[parent(path)])
    if record.conservative and set(record.placed) != {CPU}:
        # tensors that the model makes on the CPU may meet its own, too
        mixed_device |= moving
    # Code around the model looks up tokens by itself, with indices from wherever: `model.embed(ids)`, then a forward.
    if "" in execution_devices.mixed or opened:
        moving |= {path for path, module in modules.items() if isinstance(module, nn.Embedding) and path in device}
    writing = (
        moving
        if record.conservative
        else {_receiver(names.get(path, path), moving) for path in record.plan.written_back}
    )

    found: dict[str, Hook] = {}
    for path in modules:
        if path not in moving | mixed_device:
            continue
        uniform = path in device and path not in execution_devices.mixed
        guard = CallGuard(
            current=device[path] if path in moving and is_accelerator(device[path]) else None,
            moves_inside=path in mixed_device,
            target=device[path] if uniform else None,
            writes_back=path in writing or path == "",
        )
        needed = path == "" or guard != CallGuard(target=guard.target)
        found[path] = (Hook if path else RootHook)(
            runtime,
            path,
            device[path] if path in moving else None,
            guard if needed else None,
            path in execution_devices.mixed,
        )
    return found


def _lives_elsewhere(name: str, record: Record, device: dict[str, torch.device]) -> bool:
    """Whether a tied tensor is not where the module that owns this name of it runs."""
    return record.devices[name] != device.get(parent(name), record.devices[name])


def _receiver(path: str, moving: set[str]) -> str:
    """Return the module around `path`, or itself, whose hook moved the argument that `path` writes into."""
    while path not in moving:
        path = parent(path)
    return path


def leaves_fused(modules: Mapping[str, nn.Module], hooked: Collection[str], mixed_calls: Collection[str]) -> bool:
    """Whether torch's encoder layers leave their fused path where they are hooked or watched: then they all have to.

    What of a padded batch they hand to each other is nested on that path only, and it rounds otherwise.
    """
    layers = [path for path, module in modules.items() if isinstance(module, nn.TransformerEncoderLayer)]
    attention = [path for path, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    return any(is_below(path, layer) for layer in layers for path in hooked) or any(
        is_below(layer, path) for layer in (*layers, *attention) for path in mixed_calls
    )

"""Which modules get a hook, and of what kind.

mixed root ── watched if aligned
  ├─ embed    uniform, its parent is mixed ── arguments are moved to its home
  ├─ layers
  │    └─ 7   mixed and aligned: h + f(h) with f elsewhere ── arguments are moved, its ops are watched
  └─ head     its weight is tied and lives with embed ── watched: the weight is copied once
"""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from autoshard.common.module_paths import above, is_below, is_container, parent
from autoshard.plan.placement import resolve_homes
from autoshard.runtime.around import surround, take_off
from autoshard.runtime.devices import CPU, is_accelerator, resolve_device, send
from autoshard.runtime.hooks import CallGuard, Hook, RootHook
from autoshard.runtime.microbatches import Divide
from autoshard.runtime.recompute import hook_recompute
from autoshard.runtime.replicas import Scatter, check_replicable
from autoshard.runtime.state import Record, Runtime
from autoshard.runtime.streaming import hook_streams


def hook_boundaries(model: nn.Module, runtime: Runtime, hooks: Mapping[str, Hook]) -> None:
    """Hook a model whose tensors are where `runtime.record` says."""
    modules = dict(model.named_modules())
    for path, hook in hooks.items():
        surround(modules[path], hook)
    division = runtime.record.division
    if division is not None:
        if division.devices:
            check_replicable(model)
            surround(model, Scatter(runtime, division))
        else:
            runtime.copies.carry = send
            surround(model, Divide(runtime, division))
    hook_recompute(modules, runtime.record.recomputed, selective=runtime.record.selective)
    hook_streams(modules, runtime.streams)
    watched = {path for path, hook in hooks.items() if hook.guard is not None and hook.guard.watched}
    runtime.unfused = leaves_fused(modules, {*hooks, *runtime.streams.devices}, watched)


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
    # With streamed modules a model seems to be on the CPU, so code around the forward may bring tensors from there.
    away = set(record.placed) != {CPU}
    opened = {outer for path in record.streamed for outer in above(path)} if away else set()
    homes = resolve_homes(record.placements, modules, record.placements, uncallable, opened)
    resolved = {name: resolve_device(name) for name in dict.fromkeys([*homes.homes.values(), record.homes[""]])}
    device = {path: resolved[name] for path, name in {**homes.homes, "": record.homes[""]}.items()}
    first_path = {id(module): path for path, module in modules.items()}
    names = {path: first_path[id(module)] for path, module in model.named_modules(remove_duplicate=False)}

    moving = set(homes.hooked)
    aligned = {names.get(path, path) for path in record.aligned} & set(modules)
    aligned |= {parent(name) for name in record.devices if _lives_elsewhere(name, record, device)} & set(modules)
    for path, first in names.items():  # a module with a second place in the tree, where it is called from elsewhere
        if path != first and first in device:
            moving.add(first)
            if homes.homes.get(parent(path)) != homes.homes.get(first) or parent(path) in homes.mixed:
                aligned.add(names[parent(path)])
    if record.conservative and set(record.placed) != {CPU}:
        # tensors that the model makes on the CPU may meet its own, too
        aligned |= moving
    # Code around the model looks up tokens by itself, with indices from wherever: `model.embed(ids)`, then a forward.
    if "" in homes.mixed or opened:
        moving |= {path for path, module in modules.items() if isinstance(module, nn.Embedding) and path in device}
    writing = (
        moving if record.conservative else {_receiver(names.get(path, path), moving) for path in record.written_back}
    )

    found: dict[str, Hook] = {}
    for path in modules:
        if path not in moving | aligned:
            continue
        uniform = path in device and path not in homes.mixed
        guard = CallGuard(
            current=device[path] if path in moving and is_accelerator(device[path]) else None,
            watched=path in aligned,
            target=device[path] if uniform else None,
            writes_back=path in writing or path == "",
        )
        needed = path == "" or guard != CallGuard(target=guard.target)
        found[path] = (Hook if path else RootHook)(
            runtime, path, device[path] if path in moving else None, guard if needed else None, path in homes.mixed
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


def leaves_fused(modules: Mapping[str, nn.Module], hooked: Collection[str], watched: Collection[str]) -> bool:
    """Whether torch's encoder layers leave their fused path where they are hooked or watched: then they all have to.

    What of a padded batch they hand to each other is nested on that path only, and it rounds otherwise.
    """
    layers = [path for path, module in modules.items() if isinstance(module, nn.TransformerEncoderLayer)]
    attention = [path for path, module in modules.items() if isinstance(module, nn.MultiheadAttention)]
    return any(is_below(path, layer) for layer in layers for path in hooked) or any(
        is_below(layer, path) for layer in (*layers, *attention) for path in watched
    )

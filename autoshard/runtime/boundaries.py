"""Which modules get a hook, and of what kind.

mixed root ── watched if aligned
  ├─ embed    uniform, its parent is mixed ── arguments are moved to its home
  ├─ layers
  │    └─ 7   mixed and aligned: h + f(h) with f elsewhere ── arguments are moved, its ops are watched
  └─ head     its weight is tied and lives with embed ── watched: the weight is copied once
"""

import torch
from torch import nn

from autoshard.placement import Homes, parent, resolve_homes
from autoshard.runtime.devices import CPU, is_accelerator, resolve_device
from autoshard.runtime.hooks import Guard, Hook, RootHook, add_leave
from autoshard.runtime.state import Record, Runtime


def hook_model(model: nn.Module, runtime: Runtime) -> None:
    """Hook the boundaries of a model whose tensors are where `runtime.record` says; hooks it had are replaced."""
    unhook(runtime)
    modules = dict(model.named_modules())
    for path, (home, guard) in _boundaries(model, modules, runtime.record).items():
        kind = Hook if path else RootHook
        hook = kind(runtime, path, home, guard)
        runtime.hooks[path] = hook
        runtime.handles.append(modules[path].register_forward_pre_hook(hook, with_kwargs=True))
        if guard is not None:
            runtime.handles.append(add_leave(modules[path], hook))


def unhook(runtime: Runtime) -> None:
    """Take all hooks off."""
    for handle in runtime.handles:
        handle.remove()
    runtime.handles.clear()
    runtime.hooks.clear()


def _boundaries(
    model: nn.Module, modules: dict[str, nn.Module], record: Record
) -> dict[str, tuple[torch.device | None, Guard | None]]:
    """Module path -> (home its arguments are moved to, if they are; guard, if any). The root comes first."""
    homes = resolve_homes(record.placements, modules, record.placements)
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
    if record.conservative and record.placed != {CPU}:  # tensors that the model makes on the CPU may meet its own, too
        aligned |= moving
    sealed = _sealed(modules, record, homes, aligned)
    moving |= sealed
    writing = (
        moving if record.conservative else {_receiver(names.get(path, path), moving) for path in record.written_back}
    )

    found = {}
    for path in modules:
        if path not in moving and path not in aligned:
            continue
        uniform = path in device and path not in homes.mixed
        guard = Guard(
            current=device[path] if path in moving and is_accelerator(device[path]) else None,
            watched=path in aligned and path not in sealed,
            target=device[path] if uniform else None,
            unwatched=path in sealed,
            writes_back=path in writing or path == "",
        )
        needed = path == "" or guard != Guard(target=guard.target)
        found[path] = (device[path] if path in moving else None, guard if needed else None)
    return found


def _lives_elsewhere(name: str, record: Record, device: dict[str, torch.device]) -> bool:
    """Whether a tied tensor is not where the module that owns this name of it runs."""
    return record.devices[name] != device.get(parent(name), record.devices[name])


def _receiver(path: str, moving: set[str]) -> str:
    """Return the module around `path`, or itself, whose hook moved the argument that `path` writes into."""
    while path not in moving:
        path = parent(path)
    return path


def _sealed(modules: dict[str, nn.Module], record: Record, homes: Homes, aligned: set[str]) -> set[str]:
    """Find torch's own composite layers, all on one device, inside watched modules.

    They choose a fused path, with slightly other bits, unless torch functions are overridden: watching pauses there.
    """
    if not aligned:
        return set()
    live: dict[str, set[torch.device]] = {}
    foreign = set()
    for name, place in record.devices.items():
        path = parent(name)
        while True:
            live.setdefault(path, set()).add(place)
            if not path:
                break
            path = parent(path)
    for path, module in modules.items():
        if not type(module).__module__.startswith("torch.nn."):
            while True:
                foreign.add(path)
                if not path:
                    break
                path = parent(path)
    sealed: set[str] = set()
    for path, module in modules.items():
        inside = any(_is_below(path, outer) for outer in aligned)
        composite = next(module.children(), None) is not None and not isinstance(module, _CONTAINERS)
        whole = len(live.get(path, ())) == 1 and path not in homes.mixed
        if inside and composite and whole and path not in foreign and not any(_is_below(path, s) for s in sealed):
            sealed.add(path)
    return sealed


_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def _is_below(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(outer + ".")

"""Where modules and tensors live under a placement: arithmetic on dotted names, shared by planner and runtime.

placements {"embed": "cuda:0", "layers.0": "cuda:0", "layers.1": "cuda:1", "head": "cuda:1"}

""            mixed, runs on cuda:0     (first child with a device)    hooked: it is the root
embed         uniform, runs on cuda:0                                  hooked: its parent is mixed
layers        mixed, runs on cuda:0                                    hooked: it is mixed
layers.0      uniform, runs on cuda:0                                  hooked: its parent is mixed
layers.0.mlp  uniform, runs on cuda:0                                  no hook: layers.0 is uniform
dropout       floating: no tensors, no device, no hook
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from autoshard.common.module_paths import above, parent
from autoshard.errors import PlanError

Place = TypeVar("Place")
"""A device by its name, or a stage by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionDevices:
    """What a placement says about one module tree.

    Attributes:
        entries: parameter or buffer name -> device of the entry that covers it.
        devices: module path -> device it runs on; floating modules (no tensors below them) are absent, except the root.
        mixed: modules whose tensors are on several devices.
        hooked: modules whose direct tensor arguments are moved to their device, in registration order, the root first.
    """

    entries: Mapping[str, str]
    devices: Mapping[str, str]
    mixed: frozenset[str]
    hooked: tuple[str, ...]

    def device_of(self, path: str) -> str:
        """Return the execution device of a module, or of its nearest ancestor that has one."""
        while path not in self.devices and path:
            path = parent(path)
        return self.devices[path]


def covering_entry(placements: Collection[str], name: str) -> str | None:
    """Return the longest of some paths that is `name` or a dotted prefix of it, None if there is none."""
    while name not in placements:
        if not name:
            return None
        name = parent(name)
    return name


def devices_below(device_of: Mapping[str, Place]) -> dict[str, set[Place]]:
    """Return module -> where the tensors below it are; `device_of`: by their names."""
    below: dict[str, set[Place]] = {}
    for name, device in device_of.items():
        for path in above(name):
            known = below.setdefault(path, set())
            if device in known:  # and so is it in all modules around
                break
            known.add(device)
    return below


def check_known(placements: Mapping[str, str], modules: Collection[str], tensors: Collection[str], model: str) -> None:
    """Raise `PlanError` for entries that are neither modules nor tensors of a model; `model`: what to call it."""
    unknown = [path for path in placements if path not in modules and path not in tensors]
    if unknown:
        listed = ", ".join(map(repr, unknown[:5])) + (" and more" if len(unknown) > 5 else "")
        parts = [path for path in modules if path and "." not in path][:20]
        raise PlanError(
            f"the placement names {listed}, which this {model} does not have. Its parts are {', '.join(parts)}."
        )


def check_known_in(placements: Mapping[str, str], graph: Any) -> None:
    """Raise `PlanError` for entries that are neither modules nor tensors of a recorded model, a `ModelGraph`."""
    modules = [path for module in graph.modules for path in (module.path, *module.aliases)]
    check_known(placements, modules, {tensor.name for tensor in graph.tensors}, graph.modules[0].class_name)


def resolve_execution_devices(
    placements: Mapping[str, str],
    modules: Iterable[str],
    tensors: Iterable[str],
    uncallable: Iterable[str] = (),
    opened: Iterable[str] = (),
) -> ExecutionDevices:
    """Find the execution device of every module; `modules` and `tensors` are dotted names in registration order.

    `tensors` holds every name of every parameter and buffer, tied ones under each name. A name's device is that of its
    own entry, also where a tie makes the tensor live elsewhere. `uncallable`: lists and dicts of modules, which have no
    forward to hook; their elements are hooked instead. `opened`: modules whose children are hooked as if they were
    mixed. Raises `PlanError` if a tensor has no entry.
    """
    entries = {}
    for name in tensors:
        key = covering_entry(placements, name)
        if key is None:
            raise PlanError(
                f"the placement has no entry for {name}. Add an entry for it or for one of its parents, "
                'or "" to place everything that is left.'
            )
        entries[name] = placements[key]

    below = devices_below(entries)
    first_own: dict[str, str] = {}
    for name, device in entries.items():
        first_own.setdefault(parent(name), device)

    # A module shared by two parents is listed once; its second place in the tree is known from tensor names only. It
    # counts for the devices of the parents there, and has its own device and hook at its first place.
    listed = dict.fromkeys(["", *modules])
    paths = list(dict.fromkeys([*listed, *below]))
    children: dict[str, list[str]] = {}
    for path in paths:
        if path:
            children.setdefault(parent(path), []).append(path)

    mixed = frozenset(path for path, devices in below.items() if len(devices) > 1)
    devices: dict[str, str] = {}
    for path in sorted(paths, key=lambda path: -path.count(".") if path else 1):  # children before parents
        if path not in below:
            continue
        if path in mixed:
            device = first_own.get(path) or next(devices[c] for c in children[path] if c in devices)
        else:
            (device,) = below[path]
        devices[path] = device
    if "" not in devices:  # a model without tensors still runs somewhere
        devices[""] = placements.get("") or next(iter(placements.values()), "cpu")

    hooked = _hooked([path for path in listed if path in devices], mixed.union(opened), frozenset(uncallable))
    return ExecutionDevices(entries=entries, devices=devices, mixed=mixed, hooked=hooked)


def _hooked(paths: Iterable[str], mixed: frozenset[str], uncallable: frozenset[str]) -> tuple[str, ...]:
    """Choose among modules with a device those whose arguments may come from elsewhere; the root comes first.

    In a mixed root, code around the forward may call a module with a list of layers by itself, wherever it is (the
    encoder of an inner model, once per `generate`), except inside of such a layer.
    """

    def opened(path: str) -> bool:
        """Whether the children of a module are called from code that may have tensors of several devices."""
        return path in mixed or (path != "" and path in uncallable and opened(parent(path)))

    towers = {parent(path) for path in uncallable} if "" in mixed else set()

    def is_hooked(path: str) -> bool:
        return path in mixed or opened(parent(path)) or (path in towers and not is_inside_list(path))

    def is_inside_list(path: str) -> bool:
        return path != "" and (path in uncallable or is_inside_list(parent(path)))

    return ("", *(path for path in paths if path and path not in uncallable and is_hooked(path)))


def tensor_devices(resolved: ExecutionDevices, tied: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """Return the device each tensor lives on: that of its entry, or, tied, of the entry of the first of its names."""
    devices = dict(resolved.entries)
    for names in tied:
        for name in names:
            devices[name] = resolved.entries[names[0]]
    return devices


def check_placements(placements: Mapping[str, str]) -> None:
    """Raise `PlanError` unless every path and device is a sensible string and no path lies inside another."""
    if not placements:
        raise PlanError(
            "the placements are empty: nothing says where the model goes. {'': 'cuda:0'} would put all there."
        )
    for path, device in placements.items():
        if not isinstance(path, str) or (path and "" in path.split(".")):
            raise PlanError(f"{path!r} in the placements is not a module path such as 'encoder.layers.0'.")
        if not isinstance(device, str) or not device.strip():
            raise PlanError(f"the device of {path!r} in the placements is {device!r}; write a name such as 'cuda:0'.")
    for path in placements:
        for outer in reversed([*above(path)]):
            if outer in placements:
                whole = repr(outer) if outer else "the whole model"
                raise PlanError(
                    f"the placements overlap: {path!r} is inside {whole}, which has its own device. "
                    f"Name the children of {whole} one by one instead."
                )

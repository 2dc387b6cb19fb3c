"""Between units and dotted paths: pins as users write them, placements as short as they can be."""

import difflib
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.common.module_paths import above, is_below, parent
from autoshard.errors import SpecError
from autoshard.plan.placement import devices_below


def pins_of_units(
    pins: Mapping[str, str], paths: Sequence[tuple[str, ...]], graph: ModelGraph, devices: Sequence[str]
) -> dict[int, int]:
    """Turn {path: device} into unit -> device index. A pin holds for all below it; the longest one wins.

    A pin on a tensor holds for the unit that the tensor belongs to. Raises `SpecError` for a path or device that is not
    there.
    """
    found: dict[int, tuple[int, int]] = {}
    tensors = {tensor.name for tensor in graph.tensors}
    for path, device in pins.items():
        if device not in devices:
            raise SpecError(
                f"{path!r} is pinned to {device}, which is not among the devices {', '.join(devices)}. "
                "Pin it to one of these, or add the device."
            )
        depth = len(path)
        touched = [
            unit
            for unit, of_unit in enumerate(paths)
            if any(is_below(own, path) or (own == parent(path) and path in tensors) for own in of_unit)
        ]
        if not touched and path not in {module.path for module in graph.modules}:
            names = [*(module.path for module in graph.modules), *tensors]
            near = difflib.get_close_matches(path, names, n=1)
            raise SpecError(
                f"{path!r} is pinned to {device}, but the model has no module or tensor of that name."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        for unit in touched:
            if unit not in found or depth > found[unit][0]:
                found[unit] = depth, list(devices).index(device)
    return {unit: device for unit, (_, device) in sorted(found.items())}


def collapse(device_of: Mapping[str, str], graph: ModelGraph) -> dict[str, str]:
    """Turn tensor name -> device into the fewest entries that don't overlap, in registration order.

    {"a.w": 0, "a.b": 0, "c.d.w": 0, "c.e.w": 1}  ->  {"a": 0, "c.d": 0, "c.e": 1}
    """
    below = devices_below(device_of)
    placements: dict[str, str] = {}
    for name, device in device_of.items():
        entry = name
        for path in above(name):  # the highest module that is all on this device
            if len(below[path]) > 1:
                break
            entry = path
        placements[entry] = device
    return placements


def cut_depths(paths: Sequence[tuple[str, ...]]) -> np.ndarray:
    """[n] per unit: how many modules of the tree a cut just before it splits (0 for the first unit).

    layers.0.attn.k | layers.0.attn.q     splits "", layers, layers.0, layers.0.attn    4
    layers.0.mlp.w  | layers.1.attn.q     splits "", layers                             2
    """
    parts = [of_unit[0].split(".") if of_unit and of_unit[0] else [] for of_unit in paths]
    depths = np.zeros(len(parts), int)
    for unit in range(1, len(parts)):
        left, right = parts[unit - 1], parts[unit]
        same = 0
        while same < min(len(left), len(right)) and left[same] == right[same]:
            same += 1
        depths[unit] = same + 1
    return depths

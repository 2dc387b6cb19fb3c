"""Which devices have what of every module under a plan, for the module tree of the page."""

from dataclasses import dataclass, field

from autoshard.common.module_paths import above, join
from autoshard.plan import Plan
from autoshard.plan.placement import covering_entry
from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class Places:
    """Of every module and tensor: device -> bytes of parameters and buffers there, and bytes that devices share.

    Tied tensors count at their first name.
    """

    devices: dict[str, dict[str, int]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)


def places_of(plan: Plan, profile: Profile) -> Places:
    """Add every tensor's bytes up the tree, storages once."""
    places, seen = Places(), set()
    names = (
        set() if plan.launch else {join(b, shard.name) for cut in plan.cuts for b in cut.blocks for shard in cut.shards}
    )
    divided = {tensor.storage for tensor in profile.graph.tensors if tensor.name in names}
    for tensor in profile.graph.tensors:
        entry = covering_entry(plan.placements, tensor.name)
        device = "" if entry is None else plan.placements[entry]
        nbytes = 0 if tensor.storage in seen else profile.graph.storages[tensor.storage].nbytes
        seen.add(tensor.storage)
        for path in (tensor.name, *above(tensor.name)):
            held = places.devices.setdefault(path, {})
            held[device] = held.get(device, 0) + nbytes
            if tensor.storage in divided:
                places.cut[path] = places.cut.get(path, 0) + nbytes
    return places

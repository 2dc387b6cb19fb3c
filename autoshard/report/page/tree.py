"""The module tree of a plan, repeated blocks folded where their devices are alike too."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.common.module_paths import above
from autoshard.engine.cuts import trace_cuts
from autoshard.plan import Plan
from autoshard.plan.placement import covering_entry
from autoshard.profile.profile import ModuleProfile, Profile
from autoshard.report.rows import children_of, equal_runs, signatures_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """`count` equal neighbours in the tree, shown once; `module` is the first of them, and the figures are its own.

    Attributes:
        devices: device -> bytes of parameters and buffers there; tied ones count at their first name.
        cut_bytes: of these, bytes of tensors of which every device has a share.
        store: where parameters are kept between calls, if the module is streamed.
    """

    label: str
    count: int
    module: ModuleProfile
    devices: Mapping[str, int]
    cut_bytes: int = 0
    store: str = ""
    children: "tuple[Node, ...]" = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one of them."""
        return self.module.parameter_bytes + self.module.buffer_bytes


@dataclass(slots=True)
class _Where:
    """Bytes per device and cut bytes of every module's subtree, and the order of devices in it."""

    devices: dict[str, dict[str, int]] = field(default_factory=dict)
    cut: dict[str, int] = field(default_factory=dict)


def module_tree(plan: Plan, profile: Profile) -> Node:
    """Return the root with everything below it. Children are equal if their figures, places and children are."""
    children, where = children_of(profile), _find(plan, profile)

    def look(path: str) -> object:
        places = tuple(where.devices.get(path, {}).items())
        return places, where.cut.get(path, 0), plan.streamed.get(path), path in plan.pins

    signatures = signatures_of(profile, children, look)

    def build(module: ModuleProfile, label: str, count: int) -> Node:
        below = [build(first, name, n) for first, name, n in equal_runs(children.get(module.path, []), signatures)]
        return Node(
            label=label,
            count=count,
            module=module,
            devices=where.devices.get(module.path, {}),
            cut_bytes=where.cut.get(module.path, 0),
            store=plan.streamed.get(module.path, ""),
            children=tuple(below),
        )

    root = profile.modules[0]
    return build(root, root.class_name, 1)


def _find(plan: Plan, profile: Profile) -> _Where:
    """Add every tensor's bytes up the tree, storages once."""
    where, seen = _Where(), set()
    parts = trace_cuts(profile.graph, plan.cuts).parts if plan.cuts and not plan.launch else {}
    for tensor in profile.graph.tensors:
        entry = covering_entry(plan.placements, tensor.name)
        device = "" if entry is None else plan.placements[entry]
        nbytes = 0 if tensor.storage in seen else profile.graph.storages[tensor.storage].nbytes
        seen.add(tensor.storage)
        for path in (tensor.name, *above(tensor.name)):
            held = where.devices.setdefault(path, {})
            held[device] = held.get(device, 0) + nbytes
            if tensor.value in parts:
                where.cut[path] = where.cut.get(path, 0) + nbytes
    return where

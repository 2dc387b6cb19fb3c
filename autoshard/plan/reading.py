"""A plan file read back: every key and every type is checked before there is a plan; nothing is guessed."""

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from autoshard.common.module_paths import above, join
from autoshard.common.strict import Misread, expect, read_as
from autoshard.errors import PlanError, SpecError
from autoshard.plan.batching import BatchAxis
from autoshard.plan.mesh import Mesh, PlanDevice
from autoshard.plan.placement import check_placements
from autoshard.plan.sharding import LOSSES, Cut, is_axis
from autoshard.plan.workload import Workload

PLAN_VERSION = 3
PLAN_FORMAT = "autoshard plan"
RENAMED_FIELDS = {"streamed": "offloaded", "aligned": "mixed_device"}
"""As versions 1 and 2 had them -> as they are called now."""
RENAMED_ACTIONS = {"enter": "copy_to", "leave": "copy_from"}
CHOICES = {"launch": ("", "one-process", "processes"), "recompute": ("none", "selective", "full")}
T = TypeVar("T")


def read_plan(kind: type[T], text: str) -> T:
    """Check every key and type of a plan document, then build the plan, a `kind`. Raises `PlanError`."""
    data = _as_written_now(_document(text))
    try:
        _check_complete(data)
        plan = read_as(kind, data, "")
        _check(plan)
    except Misread as error:
        raise PlanError(f"this plan is damaged: {error}. Make the plan again.") from None
    except SpecError as error:
        raise PlanError(f"the workload of this plan does not make sense: {error}") from None
    return plan


def _document(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"this is not a plan: damaged JSON ({error}). Make the plan again.") from None
    if not isinstance(data, dict) or data.pop("format", None) != PLAN_FORMAT:
        raise PlanError("this is not a plan of autoshard. Make one with `autoshard plan … -o plan.json`.")
    version: Any = data.get("version")
    if isinstance(version, bool) or not isinstance(version, int) or version < 1:
        raise PlanError(f"this plan has no usable version ({version!r}). Make the plan again.")
    if version > PLAN_VERSION:
        raise PlanError(
            f"this plan was made by a newer autoshard (plan version {version}, this one reads up to {PLAN_VERSION}). "
            "Update autoshard, or make the plan again with this version."
        )
    return data


def _as_written_now(data: dict[str, Any]) -> dict[str, Any]:
    """A document of an earlier version as this one writes it."""
    if data["version"] < 3:
        _rename(data)
    data["version"] = PLAN_VERSION
    data.pop("unfolded", None)  # the order in which gradients are added
    mesh, batch = data.get("mesh"), data.get("batch")
    if isinstance(mesh, Mapping) and "data" in mesh:
        names = {"data": "fsdp" if mesh.get("sharded") else "dp", "pipeline": "pp", "tensor": "tp"}
        data["mesh"] = {names.get(key, key): value for key, value in mesh.items() if key != "sharded"}
    if isinstance(batch, Mapping) and not batch.get("attributes"):  # what forwards leave in attributes of modules
        left = ("attributes", "kept", "tracked", "cached")
        data["batch"] = {name: value for name, value in batch.items() if name not in left}
    return data


def _rename(data: dict[str, Any]) -> None:
    """Give fields and actions of versions 1 and 2 their present names."""
    for name, now in RENAMED_FIELDS.items():
        if name in data:
            data[now] = data.pop(name)
    cuts = data.get("cuts")
    for cut in cuts if isinstance(cuts, list) else ():
        actions = cut.get("actions") if isinstance(cut, Mapping) else None
        for action in actions if isinstance(actions, list) else ():
            if isinstance(action, dict) and isinstance(action.get("kind"), str):
                action["kind"] = RENAMED_ACTIONS.get(action["kind"], action["kind"])


def _check_complete(data: Mapping[str, Any]) -> None:
    """Raise `Misread` where a figure of the workload or of a device is missing, though it has a default."""
    devices = data.get("devices")
    rows = [
        (PlanDevice, f"devices[{index}]", row) for index, row in enumerate(devices if isinstance(devices, list) else ())
    ]
    for kind, name, row in [(Workload, "workload", data.get("workload")), *rows]:
        wanted = [one.name for one in fields(kind) if one.name != "network"]
        expect(isinstance(row, Mapping) and set(wanted) <= set(row), name, f"an object with {', '.join(wanted)}", row)


def _check(plan: Any) -> None:
    """Raise `Misread` or `PlanError` unless the parts of a plan fit together."""
    for name, known in CHOICES.items():
        value = getattr(plan, name)
        expect(value in known, name, f"one of {', '.join(filter(None, known))}", value)
    for name in ("micro_batch", "kept_layers"):
        expect(getattr(plan, name) >= 0, name, "a number from 0", getattr(plan, name))
    expect(plan.num_microbatches >= 1, "num_microbatches", "a positive integer", plan.num_microbatches)
    for device in plan.devices:
        expect(bool(device.name and device.kind and device.host), "devices", "named", device)
        expect(device.memory_bytes >= 0, "memory_bytes", "a size in bytes", device.memory_bytes)
    names = [device.name for device in plan.devices]
    expect(0 < len(set(names)) == len(names), "devices", "different names", names)
    check_placements(plan.placements)
    for path, device in plan.placements.items():
        expect(device in names, "placements", f"one of the devices {sorted(names)} for {path!r}", device)
    expect(all(plan.pins.values()), "pins", "path: device", dict(plan.pins))
    for path, place in plan.offloaded.items():
        expect(place in ("cpu", "disk"), f"offloaded of {path!r}", '"cpu" or "disk"', place)
        inside = [outer for outer in above(path) if outer in plan.offloaded]
        expect(not inside, "offloaded", "paths of which none is inside another", [*inside, path])
    if plan.mesh is not None:
        _check_mesh(plan.mesh, len(names))
    if plan.batch is not None:
        _check_batch(plan.batch)
    _check_stages(plan)
    _check_cuts(plan.cuts, plan.mesh.cut_ranks if plan.mesh else len(names))
    for part in [part for row in plan.results for part in row.parts]:
        expect(part.dim >= 0, "results.parts", "a dimension from 0", part.dim)
        expect(0 <= part.cut < len(plan.cuts), "results.parts", "one of the cuts", part.cut)
        _check_axis("results.parts", part.axis, plan.cuts[part.cut].size)
    if plan.cuts and (plan.mesh is None or plan.mesh.pp == 1):
        first = {"": names[0]}
        expect(plan.placements == first, "placements", f"{first}, as parameters are cut", plan.placements)


def _check_axis(name: str, axis: str, size: int) -> None:
    expect(is_axis(axis, size), name, f"an axis with *{size} in it", axis)


def _check_mesh(mesh: Mesh, devices: int) -> None:
    sizes = tuple(mesh.degrees.values())
    expect(min(sizes) >= 1 and mesh.size == devices, "mesh", f"degrees with a product of {devices}", sizes)
    good = len(mesh.shares) in (0, mesh.data) and all(share > 0 for share in mesh.shares)
    expect(good, "mesh.shares", f"{mesh.data} positive numbers", mesh.shares)


def _check_batch(batch: BatchAxis) -> None:
    expect(batch.size >= 1, "batch.size", "a number of rows", batch.size)
    expect(len(batch.inputs) > 0, "batch.inputs", "what is divided", batch.inputs)
    for axis in [one.axis for one in batch.inputs] + [one.axis for one in batch.outputs if one.how == "cat"]:
        _check_axis("batch.axis", axis, batch.size)
    dims = [one.dim for one in batch.inputs] + [one.dim for one in batch.outputs]
    expect(min(dims) >= 0, "batch.dim", "a dimension from 0", min(dims))


def _check_stages(plan: Any) -> None:
    """Stages have all that is placed, but for those of sharded replicas, which are modules that are gathered as one."""
    mesh = plan.mesh
    paths = [path for stage in plan.stages for path in stage.paths]
    expect(len(set(paths)) == len(paths), "stages", "different paths", paths)
    pipeline = mesh.pp if mesh is not None else 1
    gathered = mesh is not None and (mesh.sharded or (bool(plan.launch) and mesh.data > 1)) and pipeline == 1
    if plan.stages and not gathered:
        other = sorted(set(paths) ^ set(plan.placements))
        expect(not other, "stages", "the paths of the placements", other)
        expect(len(plan.stages) % pipeline == 0, "stages", f"a multiple of {pipeline} stages", len(plan.stages))


_OF_NO_TENSOR = (
    "divide", "own", "scatter", "whole", "collect", "join", "context", "spread_tokens", *LOSSES, "dispatch",
)  # fmt: skip


def _check_cuts(cuts: tuple[Cut, ...], ranks: int) -> None:
    seen: set[str] = set()
    spread = {cut.blocks for cut in cuts if any(action.kind == "dispatch" for action in cut.actions)}
    for index, cut in enumerate(cuts):
        where = f"cuts[{index}]"
        expect(len(set(cut.blocks)) == len(cut.blocks) > 0, f"{where}.blocks", "different module paths", cut.blocks)
        alone = cut.size == 1 and cut.blocks in spread  # experts of a list, each on one rank
        expect(cut.size > 1 or alone, f"{where}.size", "more than one slice", cut.size)
        least = 0 if alone else 1
        good = len(cut.shares) == ranks and min(cut.shares) >= least and sum(cut.shares) == cut.size
        expect(good, f"{where}.shares", f"{ranks} positive shares of {cut.size} slices", cut.shares)
        others = any(action.kind in _OF_NO_TENSOR for action in cut.actions)
        expect(len(cut.shards) > 0 or others, f"{where}.shards", "what is cut", cut.shards)
        names = [join(block, shard.name) for block in cut.blocks for shard in cut.shards]
        twice = sorted(seen.intersection(names)) or sorted({name for name in names if names.count(name) > 1})
        expect(not twice, f"{where}.shards", "tensors that nothing else cuts", twice[:1])
        seen.update(names)
        for shard in cut.shards:
            expect(shard.dim >= 0, f"{where}.shards", "a dimension from 0", shard.dim)
        axes = [shard.axis for shard in cut.shards]
        axes += [action.axis for action in cut.actions if action.axis and action.kind != "dispatch"]
        for axis in axes:
            _check_axis(f"{where}.axis", axis, cut.size)
        numbers = [action.axis.removeprefix("*") for action in cut.actions if action.kind == "dispatch"]
        expect({*numbers} <= {str(cut.size)}, f"{where}.axis", f"{cut.size} experts", numbers)
        for scale in cut.scales:
            expect(len(scale.local) == ranks, f"{where}.scales", f"{ranks} numbers", scale.local)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("the same key twice")
    return keys


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")

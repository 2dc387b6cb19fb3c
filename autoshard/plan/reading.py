"""A plan file read back: every key and every type is checked before there is a plan; nothing is guessed."""

import json
from dataclasses import fields
from typing import Any

from autoshard.common.module_paths import above
from autoshard.errors import PlanError, SpecError
from autoshard.plan import PLAN_FORMAT, PLAN_VERSION, Mesh, Plan, PlanDevice, Stage, check_placements
from autoshard.plan.cuts import expect, read_batch, read_cuts, read_mesh, read_results, read_stages, read_whole
from autoshard.plan.workload import Workload

_OPTIONAL = {"num_microbatches": 1, "schedule": "none", "pins": {}, "aligned": [], "written_back": [],
             "reasons": [], "fingerprint": "", "cuts": [], "whole": [], "results": [], "streamed": {}, "mesh": None,
             "batch": None, "stages": [], "layers": [], "target": "", "launch": "", "micro_batch": 0,
             "recompute": "none", "kept_layers": 0, "precision": "", "compiled": False,
             "sequence_parallel": True}  # fmt: skip


def read_plan(text: str) -> Plan:
    """Check every key and type of a plan document, then build the plan. Raises `PlanError`."""
    try:
        data = json.loads(text, object_pairs_hook=_unique_keys, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"this is not a plan: damaged JSON ({error}). Make the plan again.") from None
    if not isinstance(data, dict) or data.pop("format", None) != PLAN_FORMAT:
        raise PlanError("this is not a plan of autoshard. Make one with `autoshard plan … -o plan.json`.")
    version: Any = data.get("version")
    if not _is_int(version) or version < 1:
        raise PlanError(f"this plan has no usable version ({version!r}). Make the plan again.")
    if version > PLAN_VERSION:
        raise PlanError(
            f"this plan was made by a newer autoshard (plan version {version}, this one reads up to {PLAN_VERSION}). "
            "Update autoshard, or make the plan again with this version."
        )
    data.pop("unfolded", None)  # of earlier plans, which kept the order in which gradients are added
    names = {item.name for item in fields(Plan)}
    unknown, missing = sorted(set(data) - names), sorted(names - set(data) - set(_OPTIONAL))
    if unknown or missing:
        problem = f"unknown {', '.join(map(repr, unknown))}" if unknown else f"without {', '.join(map(repr, missing))}"
        raise PlanError(f"this is not a plan that this version understands: {problem}. Make the plan again.")
    data = {**_OPTIONAL, **data}
    data["version"] = PLAN_VERSION
    for name in ("strategy", "objective", "schedule", "fingerprint", "target", "launch", "recompute", "precision"):
        expect(isinstance(data[name], str), name, "a string", data[name])
    launches = ("", "one-process", "processes")
    expect(data["launch"] in launches, "launch", '"one-process", "processes" or nothing', data["launch"])
    expect(
        data["recompute"] in ("none", "selective", "full"), "recompute", "none, selective or full", data["recompute"]
    )
    for name in ("compiled", "sequence_parallel"):
        expect(isinstance(data[name], bool), name, "true or false", data[name])
    for name in ("micro_batch", "kept_layers"):
        expect(_is_int(data[name]) and data[name] >= 0, name, "a number", data[name])
    count: Any = data["num_microbatches"]
    expect(_is_int(count) and count >= 1, "num_microbatches", "a positive integer", count)
    for name in ("aligned", "written_back", "reasons", "layers"):
        expect(_is_list_of(data[name], str), name, "a list of strings", data[name])
        data[name] = tuple(data[name])
    for name in ("placements", "pins"):
        expect(isinstance(data[name], dict), name, "an object of path: device", data[name])
    check_placements(data["placements"])
    if data["pins"]:
        expect(all(isinstance(v, str) and v for v in data["pins"].values()), "pins", "path: device", data["pins"])
    data["workload"] = _read_workload(data["workload"])
    data["devices"] = _read_devices(data["devices"])
    listed = {device.name for device in data["devices"]}
    for path, device in data["placements"].items():
        expect(device in listed, "placements", f"one of the devices {sorted(listed)} for {path!r}", device)
    _check_streamed(data["streamed"])
    mesh = data["mesh"] = read_mesh(data["mesh"], Mesh, len(data["devices"]))
    data["batch"] = read_batch(data["batch"])
    layered = mesh is not None and (mesh.sharded or (bool(data["launch"]) and mesh.data > 1))
    data["stages"] = read_stages(data["stages"], Stage, data["placements"], mesh.pipeline if mesh else 1, layered)
    data["cuts"] = read_cuts(data["cuts"], mesh.tensor if mesh else len(data["devices"]))
    data["whole"] = read_whole(data["whole"])
    data["results"] = read_results(data["results"], data["cuts"])
    if data["cuts"] and (mesh is None or mesh.pipeline == 1):
        first = {"": data["devices"][0].name}
        expect(data["placements"] == first, "placements", f"{first}, as parameters are cut", data["placements"])
    return Plan(**data)


def _check_streamed(streamed: Any) -> None:
    wanted = 'an object of module path: "cpu" or "disk"'
    expect(isinstance(streamed, dict), "streamed", wanted, streamed)
    for path, place in streamed.items():
        expect(place in ("cpu", "disk"), f"streamed of {path!r}", '"cpu" or "disk"', place)
        inside = [outer for outer in above(path) if outer in streamed]
        expect(not inside, "streamed", "paths of which none is inside another", [*inside, path])


def _read_workload(data: Any) -> Workload:
    wanted = {item.name for item in fields(Workload)}
    expect(isinstance(data, dict) and set(data) == wanted, "workload", f"an object with {sorted(wanted)}", data)
    for name in ("batch_size", "sequence_length"):
        expect(data.get(name) is None or _is_int(data[name]), f"workload.{name}", "an integer or null", data.get(name))
    expect(_is_int(data.get("new_tokens", 0)), "workload.new_tokens", "an integer", data.get("new_tokens"))
    for name in ("mode", "optimizer", "dtype"):
        expect(isinstance(data.get(name, ""), str), f"workload.{name}", "a string", data.get(name))
    expect(isinstance(data.get("assumed", False), bool), "workload.assumed", "true or false", data.get("assumed"))
    try:
        return Workload.from_dict(data)
    except SpecError as error:
        raise PlanError(f"the workload of this plan does not make sense: {error}") from None


def _read_devices(data: Any) -> tuple[PlanDevice, ...]:
    expect(_is_list_of(data, dict) and len(data) > 0, "devices", "a list of devices", data)
    devices = []
    for entry in data:
        expect(
            {*entry, "network"} == {item.name for item in fields(PlanDevice)},
            "devices",
            "name, memory_bytes, kind, host",
            entry,
        )
        expect(isinstance(entry.get("network", ""), str), "devices", "a network such as '1600Gb/s'", entry)
        expect(
            all(isinstance(entry[k], str) and entry[k] for k in ("name", "kind", "host")), "devices", "strings", entry
        )
        expect(_is_int(entry["memory_bytes"]) and entry["memory_bytes"] >= 0, "memory_bytes", "a size in bytes", entry)
        devices.append(PlanDevice(**entry))
    names = [device.name for device in devices]
    expect(len(set(names)) == len(names), "devices", "different names", names)
    return tuple(devices)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = dict(pairs)
    if len(keys) != len(pairs):
        raise ValueError("the same key twice")
    return keys


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")

"""Plans, profiles and devices as JSON documents: every figure of the tables, in bytes and seconds."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from autoshard.engine.estimate import Estimate
from autoshard.plan import Plan
from autoshard.profile.profile import Profile

VERSION = 1


def plan_document(
    plan: Plan, estimate: Estimate, profile: Profile, *, title: str = "", notes: Iterable[str] = ()
) -> dict[str, Any]:
    """Return a plan with its estimate. `plan` in it is what a plan file holds."""
    return {
        "format": "autoshard plan report",
        "version": VERSION,
        "model": _model(profile, title),
        "plan": json.loads(plan.to_json()),
        "estimate": estimate_data(estimate, training=plan.workload.training),
        "notes": list(notes),
    }


def profile_document(profile: Profile, *, title: str = "", notes: Iterable[str] = ()) -> dict[str, Any]:
    """Return the figures of the whole model on one device, and of every module."""
    totals = {
        name: getattr(profile, name)
        for name in (
            *("parameter_bytes", "buffer_bytes", "gradient_bytes", "optimizer_bytes", "cache_bytes"),
            *("activation_peak_bytes", "peak_bytes", "flops", "bytes_moved", "dtype"),
        )
    }
    return {
        "format": "autoshard profile report",
        "version": VERSION,
        "model": _model(profile, title),
        "workload": profile.workload.to_dict(),
        **totals,
        "modules": [asdict(module) for module in profile.modules],
        "notes": list(notes),
    }


def estimate_data(estimate: Estimate, *, training: bool = True) -> dict[str, Any]:
    """Return an estimate as plain data, with what is derived from its fields, and without what is not known of it."""
    data = asdict(estimate) | {"fits": estimate.fits}
    for device, row in zip(estimate.devices, data["devices"], strict=True):
        row["free_bytes"] = device.free_bytes
    if estimate.pipelining is not None:  # what happens when is what `autoshard trace` writes
        del data["pipelining"]["events"]
    if estimate.streaming is not None:
        data["streaming"]["nbytes"] = estimate.streaming.nbytes
    if estimate.ranks:  # no bound is known of processes, and each rank has its waits
        for name in ("lower_bound_seconds", "gap", "collective_seconds", "all_reduces", "all_gathers"):
            del data[name]
        if not training:
            del data["exposed_seconds"]
    return data


def _model(profile: Profile, title: str) -> dict[str, Any]:
    graph = profile.graph
    return {
        "title": title,
        "class": profile.modules[0].class_name,
        "fingerprint": graph.fingerprint,
        "capture_level": graph.level,
        "capture_notes": list(graph.notes),
        "tied": [list(names) for names in graph.tied()],
    }

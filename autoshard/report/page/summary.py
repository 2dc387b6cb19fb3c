"""A plan in words: what a person who reads nothing else should know."""

from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Estimate, level
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.figures import fullest_row, time_rows, what_is_timed
from autoshard.report.layout import format_count, format_flops
from autoshard.report.rows import device_parts


def verdict(estimate: Estimate) -> tuple[str, str]:
    """("good", "amber" or "bad", whether it fits and on how many devices)."""
    used = [device for device in estimate.devices if device.peak_bytes]
    worst = max(used, key=lambda device: device.peak_bytes / max(device.memory_bytes, 1))
    on = f"{len(used)} of {len(estimate.devices)} devices" if len(estimate.devices) > 1 else worst.name
    kind = level(worst.peak_bytes, worst.memory_bytes)
    if kind == "bad":
        return kind, f"Does not fit on {on}: {worst.name} lacks {format_bytes(-worst.free_bytes)}"
    if kind == "amber":
        return kind, f"Fits on {on}, but {worst.name} is {worst.peak_bytes / worst.memory_bytes:.1%} full"
    return "good", f"Fits on {on}"


def key_figures(plan: Plan, estimate: Estimate, profile: Profile) -> list[tuple[str, str, str]]:
    """(what, figure, remark) of the few figures that count."""
    found, moved = [*time_rows(plan, estimate, profile), fullest_row(estimate)], estimate.moved_bytes
    if moved:
        brought = f"{format_bytes(estimate.brought_bytes)} of parameters" if estimate.brought_bytes else ""
        tensors = f"{len(estimate.transfers)} tensors" if estimate.transfers else ""
        what = "moved for prompt and token" if estimate.token_seconds else "moved per pass"
        found.append((what, format_bytes(moved), ", ".join(filter(None, (brought, tensors)))))
    return found


def sentences(plan: Plan, estimate: Estimate, profile: Profile) -> list[str]:
    """The summary."""
    by_storage = {t.storage: t for t in reversed(profile.graph.tensors) if t.kind == "parameter"}
    parameters = sum(t.nbytes // t.dtype.itemsize for t in by_storage.values())
    weights = format_bytes(profile.parameter_bytes + profile.buffer_bytes)
    return [
        f"{profile.modules[0].class_name} has {format_count(parameters)} parameters, {weights}; "
        f"{what_is_timed(profile)} takes {format_flops(profile.flops)}, mostly in {profile.dtype}.",
        _how(plan, estimate),
        _memory(estimate),
    ]


def _how(plan: Plan, estimate: Estimate) -> str:
    used = [device.name for device in estimate.devices if device.compute_seconds > 0]
    pipelining, mesh = estimate.pipelining, plan.mesh
    if pipelining is not None:
        count = pipelining.num_microbatches
        return f"{count} micro-batches go through {len(pipelining.stages)} stages ({pipelining.schedule})."
    if mesh is not None:
        kinds = ((mesh.data, "replicas"), (mesh.pipeline, "stages"), (mesh.tensor, "tensor-parallel ranks"))
        shape = " × ".join(f"{count} {kind}" for count, kind in kinds if count > 1)
        return f"The devices form {shape or 'one group'}."
    if plan.cuts:
        return f"Parameters are cut over {len(plan.devices)} devices, which all work on the same pass."
    if len(used) == 1:
        return f"Everything computes on {used[0]}." if not plan.streamed else f"{used[0]} computes everything."
    return f"Whole modules are on {len(used)} devices, which take turns on one input."


def _memory(estimate: Estimate) -> str:
    totals: dict[str, int] = {}
    for device in estimate.devices:
        for part, nbytes in device_parts(device).items():
            totals[part] = totals.get(part, 0) + nbytes
    parts = sorted(((nbytes, part) for part, nbytes in totals.items() if nbytes), reverse=True)
    named = {"optimizer": "optimizer state", "streamed": "streamed parameters"}
    said = ", ".join(f"{format_bytes(nbytes)} of {named.get(part, part)}" for nbytes, part in parts)
    return f"At their peaks the devices hold {said}."

"""A plan in words: what `Plan.summary()`, `repr` and notebooks show."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from autoshard.common.sizes import format_bytes

if TYPE_CHECKING:
    from autoshard.plan import Plan


def heading(plan: "Plan") -> str:
    """Return the strategy, the objective and the devices in one line."""
    count = len(plan.devices)
    return f"{plan.strategy}, for {plan.objective}, {count} device{'s' if count != 1 else ''}"


def remarks(plan: "Plan") -> list[str]:
    """Return what the plan does beside placing modules, one line each."""
    found = []
    if plan.mesh is not None:
        degrees = [f"{name}={degree}" for name, degree in plan.mesh.degrees.items() if degree > 1]
        found.append(f"mesh {', '.join(degrees) or 'of one device'}")
    if plan.num_microbatches > 1:
        found.append(f"{plan.num_microbatches} micro-batches, {plan.schedule}")
    if plan.cuts:
        found.append(f"{len(plan.cuts)} groups of parameters are cut over {len(plan.devices)} devices")
    if plan.streamed:
        found.append(f"{len(plan.streamed)} modules are kept on {', '.join(sorted(set(plan.streamed.values())))}")
    return found


def runs(plan: "Plan") -> list[tuple[str, list[str]]]:
    """Return (device, paths) of placements that follow one another on a device; none of a plan with cuts."""
    if plan.cuts:
        return []
    return [(device, [path for path, _ in rows]) for device, rows in groupby(plan.placements.items(), lambda x: x[1])]


def span(paths: Sequence[str]) -> tuple[str, str]:
    """Return the first and last of some paths, and how many there are."""
    first = paths[0] or "(whole model)"
    return (first, "") if len(paths) == 1 else (f"{first} … {paths[-1]}", f"{len(paths)} entries")


def summary(plan: "Plan") -> str:
    """Return the plan as lines of text: devices, what is on each, and why."""
    lines = [f"Plan  {heading(plan)}"]
    for device in plan.devices:
        size = format_bytes(device.memory_bytes) if device.memory_bytes else "memory unknown"
        lines.append(f"  {device.name}  {device.kind}  {size}")
    lines += [f"  {remark}" for remark in remarks(plan)]
    for home, paths in runs(plan):
        where, count = span(paths)
        lines.append(f"  {where}{f'  ({count})' if count else ''} -> {home}")
    lines += [f"  - {reason}" for reason in plan.reasons]
    return "\n".join(lines)

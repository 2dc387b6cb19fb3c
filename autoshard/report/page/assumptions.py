"""What the figures of a plan rest on: hardware figures with their sources, formulas, notes."""

from collections.abc import Iterable
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.hardware import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, MEMORY_EFFICIENCY, hardware_table
from autoshard.common.sizes import format_seconds
from autoshard.engine.estimate import Estimate
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.devices import link_rows
from autoshard.report.layout import format_number
from autoshard.report.terminal import as_sentence, capture_notes, estimate_notes

FORMULAS = (
    ("Seconds of an op", "max(FLOPs ÷ rate of its dtype, bytes moved ÷ memory bandwidth) + launch time"),
    ("Seconds of a copy", "latency of the link + bytes ÷ its bandwidth"),
    ("Seconds of the optimizer", "bytes it reads and writes ÷ memory bandwidth"),
    ("Peak memory", "tensors alive at the fullest moment of the recorded run, in the allocator's blocks, + overhead"),
    ("Lower bound", "linear relaxation: units may be split over devices, copies are free; valued by its dual"),
)


def assumptions(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, notes: Iterable[str]
) -> dict[str, Any]:
    """Return rows for the sections "Why" and "Assumptions"."""
    every = [
        *capture_notes(profile),
        *estimate_notes(estimate),
        *map(as_sentence, notes),
        *map(as_sentence, cluster.notes),
    ]
    return {
        "why": [as_sentence(reason) for reason in dict.fromkeys(plan.reasons)],
        "hardware": _hardware(cluster),
        "links": link_rows(cluster),
        "formulas": FORMULAS,
        "notes": list(dict.fromkeys(every)),
        "efficiency": f"Published peaks count {COMPUTE_EFFICIENCY:.0%} for compute, {MEMORY_EFFICIENCY:.0%} for memory "
        f"and {LINK_EFFICIENCY:.0%} for links, unless the figures were measured.",
    }


def _hardware(cluster: Cluster) -> list[dict[str, str]]:
    """One row per kind of device, with the source of its figures."""
    rows: dict[tuple, list[Device]] = {}
    for device in cluster.devices:
        rows.setdefault((device.kind, device.measured, device.bytes_per_second), []).append(device)
    table = hardware_table()
    found = []
    for devices in rows.values():
        first, row = devices[0], table.get(devices[0].kind)
        source = "measured on this machine" if first.measured else row.source if row is not None else "given"
        if row is not None and row.unverified and not first.measured:
            source += " (not verified: " + ", ".join(row.unverified).replace("_", " ") + ")"
        found.append(
            {
                "kind": first.kind,
                "devices": devices[0].name if len(devices) == 1 else f"{devices[0].name} and {len(devices) - 1} more",
                "flops": f"{format_number(first.flops('bfloat16') / 1e12)} bf16, "
                f"{format_number(first.flops('float32') / 1e12)} fp32 TFLOP/s",
                "bandwidth": f"{format_number(first.bytes_per_second / 1e9)} GB/s",
                "launch": format_seconds(first.launch_seconds),
                "source": source,
            }
        )
    return found

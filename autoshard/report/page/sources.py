"""What the figures of a plan rest on: hardware figures with their sources, and formulas."""

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.hardware import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, MEMORY_EFFICIENCY, hardware_table
from autoshard.common.sizes import format_seconds
from autoshard.plan import Plan
from autoshard.report.layout import format_number

FORMULAS = (
    ("Seconds of an op", "max(FLOPs ÷ rate of its dtype, bytes moved ÷ memory bandwidth) + launch time"),
    ("Seconds of a copy", "latency of the link + bytes ÷ its bandwidth"),
    ("Seconds of the optimizer", "bytes it reads and writes ÷ memory bandwidth"),
    ("Peak memory", "tensors alive at the fullest moment of the recorded run, in the allocator's blocks, + overhead"),
    ("Lower bound", "every op on the device that is fastest for it, copies free, memory without end"),
)


def formulas(plan: Plan) -> tuple[tuple[str, str], ...]:
    """What a plan of one process is priced by; for processes there is more to it."""
    return () if plan.launch else FORMULAS


def efficiency(plan: Plan) -> str:
    """What of published peaks is counted on."""
    if plan.launch:
        return "What kernels and collectives reach of these peaks is fitted on published runs, per generation of cards."
    return (
        f"Published peaks count {COMPUTE_EFFICIENCY:.0%} for compute, {MEMORY_EFFICIENCY:.0%} for memory and "
        f"{LINK_EFFICIENCY:.0%} for links, unless the figures were measured."
    )


def hardware_rows(cluster: Cluster) -> list[list[str]]:
    """[name, devices, compute, memory, launch, source] of every kind of device."""
    rows: dict[tuple, list[Device]] = {}
    for device in cluster.devices:
        rows.setdefault((device.kind, device.measured, device.bytes_per_second), []).append(device)
    table, found = hardware_table(), []
    for devices in rows.values():
        first, row = devices[0], table.get(devices[0].kind)
        source = "measured on this machine" if first.measured else row.source if row is not None else "given"
        if row is not None and row.unverified and not first.measured:
            source += " (not verified: " + ", ".join(row.unverified).replace("_", " ") + ")"
        rates = [format_number(first.flops(dtype) / 1e12) for dtype in ("bfloat16", "float32")]
        found.append([
            first.kind,
            first.name if len(devices) == 1 else f"{first.name} and {len(devices) - 1} more",
            f"{rates[0]} bf16, {rates[1]} fp32 TFLOP/s",
            f"{format_number(first.bytes_per_second / 1e9)} GB/s",
            format_seconds(first.launch_seconds),
            source,
        ])  # fmt: skip
    return found

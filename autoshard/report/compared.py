"""A comparison of strategies, for a terminal of 80 columns and as a document."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.report.layout import INDENT, CellText, Column, numbers, print_section, print_sentences, print_table
from autoshard.search.best import AS_GOOD
from autoshard.strategies.compare import Alternative, Comparison, devices_used


def print_comparison(console: Console, found: Comparison, *, title: str) -> None:
    """Print every strategy with its figures, what peers would do, and why the winner wins."""
    console.print(Text(title, style="bold"))
    doing = "training" if found.training else "inference"
    print_section(console, "Strategies", f"for {found.objective}, {doing}; the best plan of each")
    _print_rows(console, sorted(found.alternatives, key=lambda one: one.value), found)
    if not all(one.usable for one in found.alternatives):
        console.print(Text(f"{INDENT}torchrun: takes one process per device", style="bright_black"), soft_wrap=True)
    if found.peers:
        print_section(console, "Others", "their own maps, priced alike")
        _print_rows(console, found.peers, found)
    print_sentences(console, "Why", _why(found))
    refused = [f"{one.name}: {one.refused}" for one in (*found.alternatives, *found.peers) if one.plan is None]
    print_sentences(console, "Not possible", refused)


def strategy_columns() -> list[Column]:
    """What a row says of a strategy."""
    return [Column(title="Strategy", flexible=True), *numbers("Devices", "Fullest", "Time", "Busiest", "Moved")]


def strategy_cells(one: Alternative) -> list[CellText]:
    """A row of a table of strategies."""
    if one.plan is None or one.estimate is None:
        return [one.name, Text("not possible", style="bright_black"), "", "", "", ""]
    estimate = one.estimate
    fullest = estimate.fullest
    share = f"{fullest.peak_bytes / max(fullest.memory_bytes, 1):.0%}"
    return [
        one.name,
        str(devices_used(one)),
        Text(share, style="" if estimate.fits else "bold red"),
        format_seconds(estimate.latency_seconds),
        format_seconds(estimate.bottleneck_seconds),
        format_bytes(estimate.moved_bytes) if estimate.moved_bytes else "-",
    ]


def _print_rows(console: Console, rows: Sequence[Alternative], found: Comparison) -> None:
    cells = []
    for one in rows:
        name = Text(one.name, style="bold" if one is found.chosen else "")
        name = name if one.usable else name.append("  torchrun", style="bright_black")
        cells.append([name, *strategy_cells(one)[1:]])
    print_table(console, strategy_columns(), cells)


def _why(found: Comparison) -> list[str]:
    """Why the one that is taken is, and how far the others are from it."""
    chosen = found.chosen
    assert chosen.plan is not None
    measure = {"memory": "leaves the most memory", "throughput": "has the least to do on its busiest device"}
    best = measure.get(found.objective, "has the fastest pass")
    if found.objective == "throughput" and found.training:
        best = "has the fastest step"
    if not found.bound:  # of recipes for processes: none is known
        sentences = [f"{chosen.name} {best}, or is the simplest of those within {AS_GOOD - 1:.0%} of that."]
    else:
        above = f", {found.gap:.1%} above what no plan on these devices can be below" if found.gap < 1 else ""
        sentences = [f"{chosen.name} {best}{above}."]
    faster = [one for one in found.alternatives if not one.usable and one.value < chosen.value * (1 - 1e-9)]
    if faster and found.bound:
        one = min(faster, key=lambda row: row.value)
        sentences.append(
            f"With one process per device (torchrun) {one.name} would be {1 - one.value / chosen.value:.0%} better."
        )
    return [*sentences, *(f"{reason}." for reason in chosen.plan.reasons[:2])]


def comparison_document(found: Comparison, *, title: str) -> dict[str, Any]:
    """The comparison as plain data."""
    return {
        "title": title,
        "objective": found.objective,
        "training": found.training,
        "chosen": found.chosen.name,
        "lower_bound": found.bound,
        "gap": found.gap,
        "strategies": [_data(one) for one in found.alternatives],
        "others": [_data(one) for one in found.peers],
    }


def _data(one: Alternative) -> dict[str, Any]:
    row: dict[str, Any] = {"name": one.name, "possible": one.plan is not None, "usable_now": one.usable}
    if one.plan is None or one.estimate is None:
        return {**row, "refused": one.refused}
    estimate = one.estimate
    return {
        **row,
        "value": one.value,
        "fits": estimate.fits,
        "devices": devices_used(one),
        "latency_seconds": estimate.latency_seconds,
        "bottleneck_seconds": estimate.bottleneck_seconds,
        "transfer_bytes": sum(transfer.nbytes for transfer in estimate.transfers),
        "moved_bytes": estimate.moved_bytes,
        "peak_bytes": {device.name: device.peak_bytes for device in estimate.devices},
        "reasons": list(one.plan.reasons),
    }

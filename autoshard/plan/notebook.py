"""How plans and profiles show themselves in a notebook: short tables, light and dark alike, nothing fetched."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from autoshard.common.sizes import format_bytes
from autoshard.plan.summary import remarks, runs, span

if TYPE_CHECKING:
    from autoshard.plan import Plan

_CELL = "text-align:left;padding:.15em .8em .15em 0"
_NUMBER = "text-align:right;padding:.15em .8em .15em 0;font-variant-numeric:tabular-nums"
MOST_ROWS = 40


def plan_html(plan: "Plan") -> str:
    """Return a plan: its devices, runs of placements on one device, what is cut or streamed, and why."""
    devices = [[device.name, device.kind, _size(device.memory_bytes)] for device in plan.devices]
    where = [[*span(paths), device] for device, paths in runs(plan)]
    parts = [
        f"<b>Plan: {escape(plan.strategy)}, for {escape(plan.objective)}</b>",
        _table(("Device", "Hardware", "Memory"), devices, {2}),
        *(f"<div>{escape(remark)}</div>" for remark in remarks(plan)),
        _table(("Modules", "", "Device"), where, set()) if where else "",
    ]
    if plan.reasons:
        parts.append(f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in plan.reasons)}</ul>")
    return f"<div>{''.join(parts)}</div>"


def profile_html(heading: str, totals: Mapping[str, int], modules: Sequence[tuple[str, str, int, int, int]]) -> str:
    """Return a profile: totals on one device, and (path, class, weights, peak, FLOPs) of some modules."""
    rows = [
        [path or "(whole model)", name, _size(weights), _size(peak), f"{flops / 1e9:,.3g}" if flops else "–"]
        for path, name, weights, peak, flops in modules
    ]
    return (
        f"<div><b>{escape(heading)}</b>"
        + _table(("On one device", ""), [[name, _size(nbytes)] for name, nbytes in totals.items() if nbytes], {1})
        + _table(("Module", "Class", "Weights", "Peak", "GFLOP"), rows, {2, 3, 4})
        + "</div>"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]], numbers: set[int]) -> str:
    styles = [_NUMBER if i in numbers else _CELL for i in range(len(titles))]

    def row_of(cells: Sequence[str], tag: str) -> str:
        pairs = zip(cells, styles, strict=True)
        return "<tr>" + "".join(f'<{tag} style="{style}">{escape(cell)}</{tag}>' for cell, style in pairs) + "</tr>"

    head, body = row_of(titles, "th"), "".join(row_of(row, "td") for row in rows[:MOST_ROWS])
    more = f"<div>and {len(rows) - MOST_ROWS} more</div>" if len(rows) > MOST_ROWS else ""
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>{more}"


def _size(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "–"

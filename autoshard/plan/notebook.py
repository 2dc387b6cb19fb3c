"""How plans and profiles show themselves in a notebook: short tables, light and dark alike, nothing fetched."""

from collections.abc import Mapping, Sequence
from html import escape

from autoshard.common.sizes import format_bytes

_CELL = "text-align:left;padding:.15em .8em .15em 0"
_NUMBER = "text-align:right;padding:.15em .8em .15em 0;font-variant-numeric:tabular-nums"
MOST_ROWS = 40


def plan_html(
    heading: str, devices: Sequence[tuple[str, str, int]], remarks: Sequence[str], runs: Sequence[tuple[str, str, str]],
    reasons: Sequence[str],
) -> str:  # fmt: skip
    """Return a plan: its devices (name, kind, bytes), what is cut or streamed, runs of placements on one, and why."""
    sizes = [(name, kind, _size(nbytes)) for name, kind, nbytes in devices]
    parts = [
        f"<b>Plan: {escape(heading)}</b>",
        _table(("Device", "Hardware", "Memory"), sizes, {2}),
        *(f"<div>{escape(remark)}</div>" for remark in remarks),
        _table(("Modules", "", "Device"), runs, set()) if runs else "",
    ]
    if reasons:
        parts.append(f"<ul>{''.join(f'<li>{escape(reason)}</li>' for reason in reasons)}</ul>")
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

"""How plans and profiles show themselves in a notebook: short tables, light and dark alike, nothing fetched."""

from collections.abc import Mapping, Sequence
from html import escape

from autoshard.common.sizes import format_bytes

_CELL = "text-align:left;padding:.15em .8em .15em 0"
_NUMBER = "text-align:right;padding:.15em .8em .15em 0;font-variant-numeric:tabular-nums"
MOST_LINES = 60
MOST_ROWS = 40


def plan_html(summary: str) -> str:
    """Return the summary of a plan, the first lines of a long one."""
    lines = summary.splitlines()
    more = [f"and {len(lines) - MOST_LINES} more lines"] if len(lines) > MOST_LINES else []
    return f"<pre>{escape(chr(10).join([*lines[:MOST_LINES], *more]))}</pre>"


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

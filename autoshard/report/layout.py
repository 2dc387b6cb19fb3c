"""Drawing for terminals: tables that fit the width, sections, wrapped sentences, figures with three digits.

Lines never end in spaces, so that what is piped or copied is clean.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

INDENT = "  "
LEAST_WIDTH = 12
"""A flexible column is not cut below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table. Flexible ones give way, the last first, when the table is wider than the terminal."""

    title: str = ""
    right: bool = False
    style: str = ""
    flexible: bool = False


CellText = str | Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table that the page has. `label`: what it is called there; `chosen`: first cell of the row that is marked."""

    label: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[CellText]]
    chosen: str = ""


def numbers(*titles: str) -> list[Column]:
    """Columns whose cells stand to the right."""
    return [Column(title=title, right=True) for title in titles]


def print_table(
    console: Console, columns: Sequence[Column], rows: Sequence[Sequence[CellText]], indent: str = ""
) -> None:
    """Print rows under grey titles; no titles, no title line."""
    texts = [
        [cell if isinstance(cell, Text) else Text(cell, style=columns[i].style) for i, cell in enumerate(row)]
        for row in rows
    ]
    titles = [Text(column.title, style="bright_black") for column in columns]
    lines = [titles, *texts] if any(column.title for column in columns) else texts
    if not lines:
        return
    widths = [max(line[i].cell_len for line in lines) for i in range(len(columns))]
    excess = len(indent) + sum(widths) + 2 * (len(columns) - 1) - console.width
    for i in reversed([i for i, column in enumerate(columns) if column.flexible]):
        cut = max(0, min(excess, widths[i] - LEAST_WIDTH))
        widths[i], excess = widths[i] - cut, excess - cut
    for line in lines:
        text = Text(indent)
        for i, (cell, column) in enumerate(zip(line, columns, strict=True)):
            cell = fitted(console, cell, widths[i])
            space = " " * (widths[i] - cell.cell_len)
            text.append_text(Text(space) + cell if column.right else cell + Text(space))
            if i + 1 < len(columns):
                text.append("  ")
        text.rstrip()
        console.print(text, soft_wrap=True)


def table_width(columns: Sequence[Column], rows: Sequence[Sequence[CellText]]) -> int:
    """Return how wide a table is if nothing in it is cut."""
    lines = [[column.title for column in columns], *rows]
    cells = [[cell.cell_len if isinstance(cell, Text) else cell_len(cell) for cell in line] for line in lines]
    return sum(map(max, zip(*cells, strict=True))) + 2 * (len(columns) - 1)


def is_unicode(console: Console) -> bool:
    """Tell whether the terminal, or the file, takes more than ASCII."""
    return (console.encoding or "").lower().startswith("utf")


def fitted(console: Console, cell: Text, width: int) -> Text:
    """Return the cell, cut with an ellipsis: words lose their end, a module path its beginning, which tells less."""
    if cell.cell_len <= width:
        return cell
    plain, mark = cell.plain, "…" if is_unicode(console) else "..."
    words = " " in plain
    while cell_len(plain) > width - len(mark):
        plain = plain[:-1] if words else plain[1:]
    return Text(plain.rstrip(" ,") + mark if words else mark + plain, style=cell.style)


def print_section(console: Console, title: str, sentence: str = "") -> None:
    """Print a blank line, a title, and what it says in short."""
    console.print()
    line = Text(title, style="bold cyan")
    if sentence:
        line.append(f"  {sentence}", style="default not bold")
    console.print(line, soft_wrap=True)


def print_sentences(console: Console, title: str, sentences: Sequence[str]) -> None:
    """Print a section of wrapped sentences, equal ones once; nothing if there are none."""
    if not sentences:
        return
    print_section(console, title)
    for sentence in dict.fromkeys(sentences):
        _print_wrapped(console, sentence, f"{INDENT}- ")


def print_item(console: Console, text: str, remark: str) -> None:
    """Print a text, and in grey what there is to say of it."""
    _print_wrapped(console, text, INDENT)
    _print_wrapped(console, remark, INDENT * 2, "bright_black")


def _print_wrapped(console: Console, text: str, begin: str, style: str = "") -> None:
    width = max(console.width - 2 * len(INDENT), 20)
    for number, line in enumerate(textwrap.wrap(text, width, break_long_words=False)):
        console.print(Text(f"{begin if number == 0 else INDENT * 2}{line}", style=style), soft_wrap=True)


def print_items(console: Console, items: Sequence[Text]) -> None:
    """Print short items side by side, as many in a line as fit."""
    line = Text(INDENT)
    for item in items:
        if line.plain.strip() and line.cell_len + 3 + item.cell_len > console.width:
            console.print(line, soft_wrap=True)
            line = Text(INDENT)
        if line.plain.strip():
            line.append("   ")
        line.append_text(item)
    console.print(line, soft_wrap=True)


def print_left_off(console: Console, count: int, what: str, where: str) -> None:
    """Say that a table was cut."""
    if count > 0:
        console.print(Text(f"{INDENT}and {count} more {what}; {where}", style="bright_black"), soft_wrap=True)


def format_number(value: float) -> str:
    """Print three significant digits, never an exponent for what a card has: 1,400; 23.4; 0.12."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def format_count(number: float) -> str:
    """Print a count with a scale: 405 B, 1.2 k."""
    return _scaled(number, ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k"), (0, "")))


def format_flops(flops: float) -> str:
    """Print floating-point operations with a fitting unit."""
    return _scaled(flops, ((1e15, " PFLOP"), (1e12, " TFLOP"), (1e9, " GFLOP"), (1e6, " MFLOP"), (0, " FLOP")))


def _scaled(number: float, units: Sequence[tuple[float, str]]) -> str:
    scale, unit = next(one for one in units if number >= one[0])
    return f"{number / scale:.3g}{unit}" if scale else f"{number:.0f}{unit}"

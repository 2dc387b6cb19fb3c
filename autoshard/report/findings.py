"""What the doctor found, for a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.report.doctor import Finding

_MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("fix", "bold red")}


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line per check, what to do below it, and a sentence at the end."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.status]
        table.add_row(Text(mark, style=style), finding.check, Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(finding.fix, style="yellow"))
    console.print(table)
    bad = sum(finding.status == "bad" for finding in findings)
    console.print()
    words = "Nothing is wrong here." if not bad else f"{bad} thing{'s' if bad > 1 else ''} to fix."
    console.print(Text(words, style="bold"))

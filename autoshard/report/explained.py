"""An explanation, for a terminal of 80 columns."""

from rich.console import Console
from rich.text import Text

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.report.explanation import Explanation, OtherDevice
from autoshard.report.layout import INDENT, Column, print_section, print_table
from autoshard.report.words import print_item

_HEADS = {
    "seconds per step": "One step", "seconds per answer": "Answer",
    "seconds per pass": "One pass", "seconds of the busiest device": "Busiest", "share of the fullest device": "Share",
}  # fmt: skip


def print_explanation(console: Console, found: Explanation) -> None:
    """Print where a module or device stands, why, and what the other choices cost."""
    console.print(Text(found.subject or "the whole model", style="bold"))
    for sentence in found.sentences:
        print_item(console, sentence, "")
    if not found.alternatives or found.chosen is None:
        return
    same = "the best recipe of each mesh" if found.kind == "the plan" else "everything else as it is"
    print_section(console, "Other choices", same)
    columns = [
        Column(title="Choice", flexible=True),
        *(Column(title=title, right=True) for title in (_HEADS[found.unit], "", "Fullest", "Lacks")),
    ]
    rows = [_row(one, found) for one in (found.chosen, *found.alternatives)]
    print_table(console, columns, rows, INDENT)


def _row(one: OtherDevice, found: Explanation) -> list[str | Text]:
    assert found.chosen is not None
    value = f"{one.value:.1%}" if found.unit.startswith("share") else format_seconds(one.value)
    change = "" if one is found.chosen or not found.chosen.value else f"{one.value / found.chosen.value - 1:+.1%}"
    lacks = format_bytes(one.lacking_bytes) if one.lacking_bytes else ""
    return [one.title, value, change, format_bytes(one.peak_bytes), Text(lacks, style="red")]

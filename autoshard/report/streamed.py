"""A plan with streamed modules: what stays where, what is brought from where, and what bounds a pass."""

from rich.console import Console
from rich.text import Text

from autoshard.estimate import Streaming
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.layout import print_left_off, print_section
from autoshard.report.rows import PlacedRow, entry_rows
from autoshard.report.words import fold, print_item
from autoshard.sizes import format_bytes, format_seconds

MOST_GROUPS = 24


def print_streamed(console: Console, plan: Plan, profile: Profile, streaming: Streaming | None) -> None:
    """Print what stays on its device, then what is kept elsewhere, equal neighbours as ranges."""
    rows = entry_rows(plan, profile)
    print_section(console, "Stays")
    _print_groups(console, [row for row in rows if row.path not in plan.streamed], plan)
    nbytes = f", {format_bytes(streaming.nbytes)} brought per pass" if streaming else ""
    print_section(console, "Streamed", f"{len(plan.streamed)} modules{nbytes}")
    _print_groups(console, [row for row in rows if row.path in plan.streamed], plan)


def _print_groups(console: Console, rows: list[PlacedRow], plan: Plan) -> None:
    groups: dict[tuple[str, str, str], list[PlacedRow]] = {}
    for row in rows:
        groups.setdefault((row.class_name, plan.streamed.get(row.path, ""), row.device), []).append(row)
    for (class_name, store, device), group in [*groups.items()][:MOST_GROUPS]:
        count = f"{len(group)} x " if len(group) > 1 else ""
        where = f"kept on {store}, brought to {device}" if store else f"on {device}"
        size = format_bytes(sum(row.nbytes for row in group))
        paths = [path.replace(",", ", ") for path in fold([row.path for row in group])]  # long ranges can be wrapped
        print_item(console, ", ".join(paths), f"{count}{class_name}, {size} {where}")
    print_left_off(console, len(groups) - MOST_GROUPS, "groups", "--json and -o list all")


def streaming_lines(streaming: Streaming, latency_seconds: float) -> "list[list[str | Text]]":
    """What a pass is made of, as rows of the table of times."""
    lines: list[list[str | Text]] = [["computing", format_seconds(streaming.compute_seconds), ""]]
    for link in streaming.links:
        what = f"{format_bytes(link.nbytes)} in {link.fetches} fetches"
        lines.append([f"{link.source} to {link.destination}", format_seconds(link.seconds), what])
    share = streaming.stall_seconds / latency_seconds if latency_seconds else 0.0
    lines.append(["waiting", format_seconds(streaming.stall_seconds), f"{share:.0%} of the pass"])
    over = latency_seconds / streaming.bound_seconds - 1 if streaming.bound_seconds else 0.0
    reached = "reached" if over < 5e-4 else f"the pass is {100 * over:.1f} % above it"
    lines.append(["slowest of these", format_seconds(streaming.bound_seconds), reached])
    return lines

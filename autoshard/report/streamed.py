"""A plan with streamed modules: what stays where, what is brought from where, and what bounds a pass."""

from rich.console import Console
from rich.text import Text

from autoshard.estimate import Estimate, Streaming
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.layout import INDENT, print_left_off, print_section
from autoshard.report.rows import PlacedRow, entry_rows
from autoshard.report.words import fold, print_item
from autoshard.sizes import format_bytes, format_seconds

MOST_GROUPS = 24


def print_streamed(console: Console, plan: Plan, profile: Profile, streaming: Streaming | None) -> None:
    """Print what stays on its device, then what is kept elsewhere, equal neighbours as ranges."""
    rows = entry_rows(plan, profile)
    print_section(console, "Stays")
    print_groups(console, [row for row in rows if row.path not in plan.streamed], plan)
    each = "token" if plan.workload.new_tokens > 1 else "pass"
    nbytes = f", {format_bytes(streaming.nbytes)} brought per {each}" if streaming else ""
    print_section(console, "Streamed", f"{len(plan.streamed)} modules{nbytes}")
    print_groups(console, [row for row in rows if row.path in plan.streamed], plan)


def print_groups(console: Console, rows: list[PlacedRow], plan: Plan) -> None:
    """Print where modules are, those of a class on one device together."""
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


def with_streaming(
    lines: "list[list[str | Text]]", streaming: Streaming, estimate: Estimate
) -> "list[list[str | Text]]":
    """Add to rows of times what a pass is made of; of an answer, below the row of a token."""
    if not estimate.token_seconds:
        return lines + _streaming_lines(streaming, estimate.latency_seconds, "pass")
    parts = [[f"{INDENT}{row[0]}", *row[1:]] for row in _streaming_lines(streaming, estimate.token_seconds, "token")]
    return [*lines[:2], *parts, *lines[2:]]


def _streaming_lines(streaming: Streaming, latency_seconds: float, each: str) -> "list[list[str | Text]]":
    """What a pass or a token is made of, as rows of the table of times."""
    lines: list[list[str | Text]] = [["computing", format_seconds(streaming.compute_seconds), ""]]
    for link in streaming.links:
        what = f"{format_bytes(link.nbytes)} in {link.fetches} fetches"
        lines.append([f"{link.source} to {link.destination}", format_seconds(link.seconds), what])
    share = streaming.stall_seconds / latency_seconds if latency_seconds else 0.0
    lines.append(["waiting", format_seconds(streaming.stall_seconds), f"{share:.0%} of the {each}"])
    over = latency_seconds / streaming.bound_seconds - 1 if streaming.bound_seconds else 0.0
    reached = "reached" if over < 5e-4 else f"the {each} is {100 * over:.1f} % above it"
    lines.append(["slowest of these", format_seconds(streaming.bound_seconds), reached])
    return lines

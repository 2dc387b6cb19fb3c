"""A plan with streamed modules: what stays where, what is brought from where, and what bounds a pass."""

from rich.console import Console

from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Streaming
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.layout import print_left_off, print_section
from autoshard.report.rows import PlacedRow, entry_rows
from autoshard.report.words import fold, print_item

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

"""Where a plan of one process has what: modules placed, modules offloaded, and matrices cut over devices."""

from rich.console import Console

from autoshard.common.module_paths import join
from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Streaming
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut
from autoshard.profile.profile import Profile
from autoshard.report.layout import Column, print_left_off, print_section, print_table
from autoshard.report.rows import PlacedRow, entry_rows, placed_rows, tied_modules
from autoshard.report.words import after, fold, fold_paths, is_part, members, print_item

MOST_ROWS = 48
SCATTERED = 24
"""Rows of modules above which those of a kind on one device are told together: experts of some layers, say."""
MOST_GROUPS = 24
MOST_WHOLE = 16


def print_placements(console: Console, plan: Plan, profile: Profile) -> None:
    """Print which modules are on which device, runs of equal blocks in one row."""
    print_section(console, "Modules")
    rows, tied, pinned = placed_rows(plan, profile), tied_modules(profile), set(plan.pins)
    if len(rows) > SCATTERED and not pinned:
        _print_groups(console, entry_rows(plan, profile), plan)
        return
    columns = [
        Column(title="Module", flexible=True),
        Column(right=True),
        Column(title="Class", style="bright_black", flexible=True),
        Column(title="Weights", right=True),
        Column(title="Device", style="bold"),
    ]
    table = []
    for row in rows[:MOST_ROWS]:
        device = f"{row.device} (pinned)" if row.path in pinned else row.device
        weights = "tied" if row.path in tied and not row.nbytes else format_bytes(row.nbytes) if row.nbytes else "-"
        table.append([row.path, f"{row.count} x" if row.count > 1 else "", row.class_name, weights, device])
    print_table(console, columns, table)
    print_left_off(console, len(rows) - MOST_ROWS, "rows", "--json and -o list all")


def print_offloaded(console: Console, plan: Plan, profile: Profile, streaming: Streaming | None) -> None:
    """Print what stays on its device, then what is kept elsewhere, equal neighbours as ranges."""
    rows = entry_rows(plan, profile)
    print_section(console, "Stays")
    _print_groups(console, [row for row in rows if row.path not in plan.offloaded], plan)
    each = "token" if plan.workload.new_tokens > 1 else "pass"
    nbytes = f", {format_bytes(streaming.nbytes)} brought per {each}" if streaming else ""
    print_section(console, "Offloaded", f"{len(plan.offloaded)} modules{nbytes}")
    _print_groups(console, [row for row in rows if row.path in plan.offloaded], plan)


def _print_groups(console: Console, rows: list[PlacedRow], plan: Plan) -> None:
    """Print where modules are, those of a class on one device together."""
    groups: dict[tuple[str, str, str], list[PlacedRow]] = {}
    for row in rows:
        groups.setdefault((row.class_name, plan.offloaded.get(row.path, ""), row.device), []).append(row)
    for (class_name, store, device), group in [*groups.items()][:MOST_GROUPS]:
        count = f"{len(group)} x " if len(group) > 1 else ""
        where = f"kept on {store}, brought to {device}" if store else f"on {device}"
        size = format_bytes(sum(row.nbytes for row in group))
        paths = [path.replace(",", ", ") for path in fold([row.path for row in group])]  # long ranges can be wrapped
        print_item(console, ", ".join(paths), f"{count}{class_name}, {size} {where}")
    print_left_off(console, len(groups) - MOST_GROUPS, "groups", "--json and -o list all")


def print_cuts(console: Console, plan: Plan, profile: Profile) -> None:
    """Print what is cut and into which shares, and what stays whole on every device, and why."""
    ndims = {tensor.name: len(tensor.shape) for tensor in profile.graph.tensors}
    print_section(console, "Cut")
    for cut in filter(lambda cut: cut.shards, plan.cuts):  # others divide tokens
        rows = [(s.name, s.dim, ndims.get(join(cut.blocks[0], s.name), 1), is_part(s.axis)) for s in cut.shards]
        label = fold_paths(cut.blocks) if cut.blocks != ("",) else ""
        print_item(console, after(label, *members(rows)), f"{_shares(cut)}{'; ' + cut.proof if cut.proof else ''}")
    if not plan.whole:
        return
    print_section(console, "Whole on every device")
    for row in plan.whole[:MOST_WHOLE]:
        label = fold_paths(row.blocks) if row.blocks != ("",) else ""
        names = [name.removesuffix(".weight") for name in row.names]
        few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        print_item(console, after(label, "", few), row.reason)
    print_left_off(console, len(plan.whole) - MOST_WHOLE, "reasons", "--json and -o list all")


def _shares(cut: Cut) -> str:
    """How many slices each device has."""
    if len(set(cut.shares)) == 1:
        return f"{cut.size} slices, {cut.shares[0]} on each device"
    return f"{cut.size} slices: {', '.join(map(str, cut.shares))}"

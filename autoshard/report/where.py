"""Where a plan of one process has what: modules placed, modules offloaded, and matrices cut over devices."""

from rich.console import Console

from autoshard.common.module_paths import join
from autoshard.common.sizes import format_bytes
from autoshard.engine.estimate import Streaming
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut
from autoshard.profile.profile import Profile
from autoshard.report.layout import Column, print_left_off, print_section, print_table
from autoshard.report.rows import placed_rows, tied_modules
from autoshard.report.words import after, fold_paths, is_part, members, print_item

MOST_ROWS = 48
MOST_WHOLE = 16


def print_placements(console: Console, plan: Plan, profile: Profile, streaming: Streaming | None) -> None:
    """Print which modules are on which device, and where those are kept that are brought to it for each call."""
    each = "token" if plan.workload.new_tokens > 1 else "pass"
    brought = f", {format_bytes(streaming.nbytes)} brought per {each}" if streaming else ""
    print_section(console, "Modules", f"{len(plan.offloaded)} of them offloaded{brought}" if plan.offloaded else "")
    rows, tied = placed_rows(plan, profile), tied_modules(profile)
    columns = [
        Column(title="Module", flexible=True),
        Column(right=True),
        Column(title="Class", style="bright_black", flexible=True),
        Column(title="Weights", right=True),
        Column(title="Device", style="bold"),
    ]
    table = []
    for row in rows[:MOST_ROWS]:
        weights = "tied" if row.path in tied and not row.nbytes else format_bytes(row.nbytes) if row.nbytes else "-"
        table.append([row.path, f"{row.count} x" if row.count > 1 else "", row.class_name, weights, row.device])
    print_table(console, columns, table)
    print_left_off(console, len(rows) - MOST_ROWS, "rows", "--json and -o list all")


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

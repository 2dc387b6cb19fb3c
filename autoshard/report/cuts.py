"""A plan with cuts: what every device has a share of, what all of them have whole and why."""

from rich.console import Console

from autoshard.common.module_paths import join
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut
from autoshard.profile.profile import Profile
from autoshard.report.layout import print_left_off, print_section
from autoshard.report.words import after, fold_paths, is_part, members, print_item

MOST_WHOLE = 16


def print_cuts(console: Console, plan: Plan, profile: Profile) -> None:
    """Print what is cut and into which shares, and what stays whole."""
    ndims = {tensor.name: len(tensor.shape) for tensor in profile.graph.tensors}
    print_section(console, "Cut")
    for cut in filter(lambda cut: cut.shards, plan.cuts):  # others divide tokens
        rows = [(s.name, s.dim, ndims.get(join(cut.blocks[0], s.name), 1), is_part(s.axis)) for s in cut.shards]
        label = fold_paths(cut.blocks) if cut.blocks != ("",) else ""
        print_item(console, after(label, *members(rows)), f"{shares(cut)}{'; ' + cut.proof if cut.proof else ''}")
    if not plan.whole:
        return
    print_section(console, "Whole on every device")
    for row in plan.whole[:MOST_WHOLE]:
        label = fold_paths(row.blocks) if row.blocks != ("",) else ""
        names = [name.removesuffix(".weight") for name in row.names]
        few = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        print_item(console, after(label, "", few), row.reason)
    print_left_off(console, len(plan.whole) - MOST_WHOLE, "reasons", "--json and -o list all")


def shares(cut: Cut) -> str:
    """How many slices each device has."""
    if len(set(cut.shares)) == 1:
        return f"{cut.size} slices, {cut.shares[0]} on each device"
    return f"{cut.size} slices: {', '.join(map(str, cut.shares))}"

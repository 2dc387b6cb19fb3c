"""Plans and profiles as tables for a terminal of 80 columns or more."""

from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

from autoshard.common.module_paths import join
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, Estimate, Streaming, level
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile
from autoshard.report.layout import (
    INDENT,
    Column,
    fitted,
    format_count,
    format_flops,
    format_number,
    is_unicode,
    numbers,
    print_item,
    print_items,
    print_left_off,
    print_section,
    print_sentences,
    print_table,
    table_width,
)
from autoshard.report.ranks import print_curve, print_mesh, print_ranks, print_stages
from autoshard.report.rows import (
    cut_bar,
    device_runs,
    flat,
    module_tree,
    peak_parts,
    placed_rows,
    tied_modules,
    transfer_rows,
    transfer_table,
)
from autoshard.report.summary import count_parameters, time_rows, used_devices, what_is_timed
from autoshard.report.words import after, fold_paths, is_part, members

MARKS = {
    "weights": ("blue", "█", "#"),
    "gradients": ("red", "▚", "g"),
    "optimizer": ("magenta", "▓", "o"),
    "activations": ("yellow", "▒", "a"),
    "cache": ("green", "▪", "c"),
    "offloaded": ("cyan", "░", "s"),
    "overhead": ("bright_black", "x", "x"),
    "free": ("bright_black", "·", "."),
}
"""(colour, mark, mark in ASCII) of what fills a device: parts must be told apart without colour too."""
PARTS = tuple(MARKS)[:-1]
FULLNESS = {"": "", "amber": "bold yellow", "bad": "bold red"}
BAR_WIDTH = 22
LEAST_BAR = 12
"""Bars are as wide as fits beside the figures."""
MOST_ROWS = 48
MOST_WHOLE = 16
MOST_TRANSFERS = 12


def print_plan(
    console: Console, plan: Plan, estimate: Estimate, profile: Profile, *, title: str = "",
    kinds: "dict[str, str] | None" = None, notes: Iterable[str] = (),
) -> None:  # fmt: skip
    """Print a plan of any kind and what it costs: devices, what is where, times, transfers, reasons, notes."""
    print_heading(console, title, profile)
    how = "as the device map says" if plan.strategy == "device_map" else f"{plan.strategy}, for {plan.objective}"
    sentence = f"{how}: {len(used_devices(plan, estimate))} of {len(estimate.devices)} devices used"
    print_section(console, "Plan", sentence if estimate.fits else f"{sentence}, and it does not fit")
    _print_bars(console, estimate, kinds or {d.name: d.kind for d in plan.devices})
    if plan.mesh is not None:
        print_mesh(console, plan)
        if plan.mesh.pp > 1:
            print_stages(console, plan, estimate)
    if plan.cuts and not plan.launch:
        print_cuts(console, plan, profile)
    elif plan.mesh is None:
        print_placements(console, plan, profile, estimate.streaming)
    print_section(console, "Predicted")
    rows: list[list[str | Text]] = [[*row] for row in time_rows(plan, estimate, profile)]
    for row in rows:
        row[1] = Text(str(row[1]), style="bold" if row[1] == format_seconds(estimate.latency_seconds) else "")
    print_table(console, [Column(), Column(right=True), Column(flexible=True)], rows, INDENT)
    print_ranks(console, plan, estimate)
    print_curve(console, plan, estimate)
    _print_transfers(console, estimate)
    print_sentences(console, "Why", [as_sentence(reason) for reason in plan.reasons])
    print_sentences(console, "Notes", [*capture_notes(profile), *estimate_notes(estimate), *notes])


def print_profile(
    console: Console, profile: Profile, *, title: str = "", depth: int = 3, notes: Iterable[str] = ()
) -> None:
    """Print memory and compute module by module, repeated blocks folded, and the totals on one device."""
    print_heading(console, title, profile)
    training = profile.workload.training
    rows, tied = [*flat(module_tree(profile).children, depth)], tied_modules(profile)
    columns = [
        Column(title="Module", flexible=True),
        Column(title="Class", style="bright_black", flexible=True),
        *numbers("Weights", "Saved" if training else "Peak", "GFLOP", *(["Cache"] if profile.cache_bytes else [])),
    ]
    table: list[list[str | Text]] = []
    for level_of, row in rows[:MOST_ROWS]:
        module = row.module
        label = Text(INDENT * level_of + row.label)
        if row.count > 1:
            label.append(f"  {row.count} x", style="bold")
            label.append(" each", style="bright_black")
        cells: list[str | Text] = [
            label, module.class_name, "tied" if module.path in tied else _bytes(row.nbytes),
            _bytes(module.saved_bytes if training else module.peak_bytes),
            format_number(module.flops / 1e9) if module.flops else "-",
        ]  # fmt: skip
        table.append([*cells, *([_bytes(module.cache_bytes)] if profile.cache_bytes else [])])
    console.print()
    print_table(console, columns, table)
    print_left_off(console, len(rows) - MOST_ROWS, "modules", "--json lists all")
    print_section(console, "On one device", "at its fullest moment")
    lines: list[list[str | Text]] = [[name, _bytes(nbytes)] for name, nbytes in peak_parts(profile).items() if nbytes]
    lines.append(["in all", Text(format_bytes(profile.peak_bytes), style="bold")])
    lines.append(["compute", f"{format_flops(profile.flops)} for {what_is_timed(profile)}, mostly in {profile.dtype}"])
    print_table(console, [Column(), Column()], lines, INDENT)
    print_sentences(console, "Notes", [*capture_notes(profile), *notes])


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


def describe_workload(workload: Workload, dtype: str) -> str:
    """Say in one line what the figures are valid for."""
    shape = [f"batch {workload.batch_size}"] if workload.batch_size else []
    if workload.sequence_length:
        shape.append(f"{workload.sequence_length} tokens")
    if workload.new_tokens:
        shape.append(f"{workload.new_tokens} new tokens")
    what = f"training with {workload.optimizer}" if workload.training else "inference"
    sentence = f"{what}, {', '.join(shape) if shape else 'inputs as given'}, {dtype}"
    return f"{sentence} (assumed)" if workload.assumed else sentence


def print_heading(console: Console, title: str, profile: Profile) -> None:
    """Print what the model is and what the figures are valid for."""
    root = profile.modules[0]
    weights = format_bytes(profile.parameter_bytes + profile.buffer_bytes)
    about = f"  {format_count(count_parameters(profile))} parameters, {weights}"
    if title:
        about = f"  {root.class_name}{about}"
    line = fitted(console, Text(title or root.class_name, style="bold"), max(console.width - len(about), 12))
    console.print()
    console.print(line.append(about, style="default not bold"), soft_wrap=True)
    console.print(Text(describe_workload(profile.workload, profile.dtype), style="bright_black"))


def _print_bars(console: Console, estimate: Estimate, kinds: "dict[str, str]") -> None:
    """One line per device with a bar of what fills it, and a legend of the parts that occur."""
    named = any(kind != "generic" for kind in kinds.values())
    columns = [
        Column(title="Device", style="bold"),
        *([Column(title="Hardware", flexible=True)] if named else []),
        Column(title="Memory"),
        *numbers("Peak", "of", "Free", "Compute"),
    ]
    shown = device_runs(estimate.devices)
    rows: list[list[str | Text]] = [
        [
            label,
            *([kinds.get(device.name, "")] if named else []),
            "",
            format_bytes(device.peak_bytes) if device.peak_bytes else "unused",
            format_bytes(device.memory_bytes),
            Text(format_bytes(device.free_bytes), style=FULLNESS[level(device.peak_bytes, device.memory_bytes)]),
            format_seconds(device.compute_seconds) if device.compute_seconds else "-",
        ]
        for device, label in shown
    ]
    place = len(columns) - 5
    spare = console.width - table_width(columns, rows) + len(columns[place].title)
    for row, (device, _) in zip(rows, shown, strict=True):
        row[place] = _bar(console, device, max(LEAST_BAR, min(BAR_WIDTH, spare)))
    print_table(console, columns, rows)
    items = []
    for part in PARTS:
        total = sum(device.parts[part] for device in estimate.devices)
        if total:
            items.append(_cells(console, part).append(f" {part} {format_bytes(total)}", style="default"))
    items.append(_cells(console, "free").append(" free", style="default"))
    print_items(console, items)


def _bar(console: Console, device: DeviceEstimate, width_of_all: int) -> Text:
    bar = Text()
    widths = cut_bar(list(device.parts.values()), device.memory_bytes, width_of_all)
    for part, width in zip((*PARTS, "free"), (*widths, width_of_all - sum(widths)), strict=True):
        bar.append_text(_cells(console, part, width))
    return bar


def _cells(console: Console, part: str, count: int = 1) -> Text:
    style, mark, ascii_mark = MARKS[part]
    return Text((mark if is_unicode(console) else ascii_mark) * count, style=style)


def _print_transfers(console: Console, estimate: Estimate) -> None:
    rows = transfer_rows(estimate.transfers)
    if not rows:
        return
    count, nbytes = sum(row.count for row in rows), sum(row.nbytes for row in rows)
    seconds = format_seconds(sum(row.seconds for row in rows))
    tensors = f"{count} tensor{'s' if count > 1 else ''}"
    per = "step" if any(row.backward for row in rows) else "pass"
    print_section(console, "Transfers", f"{tensors}, {format_bytes(nbytes)}, {seconds} per {per}")
    slowest = sorted(rows, key=lambda row: -row.seconds)[:MOST_TRANSFERS]
    shown = [row for row in rows if row in slowest]
    table = transfer_table(shown)
    print_table(console, table.columns, table.rows)
    print_left_off(console, len(rows) - len(shown), "pairs of devices", "the slowest are shown, --json lists all")


def capture_notes(profile: Profile) -> list[str]:
    """Say how the model was captured, as far as it matters."""
    levels = {
        "fake": "",
        "real": "The model was captured by running it with values.",
        "invented": "The model was captured with invented values where it branches on them: good for planning only.",
    }
    notes = (levels[profile.graph.level], *profile.graph.notes)
    return [as_sentence(note) for note in notes if note]


def estimate_notes(estimate: Estimate) -> list[str]:
    """Say what the runtime does beside placing modules."""
    notes = []
    if estimate.mixed_device and sum(device.peak_bytes > 0 for device in estimate.devices) > 1:
        some = _some(estimate.mixed_device)
        notes.append(f"Tensors of several devices meet inside {some}: its ops are watched there, which costs time.")
    if estimate.written_back:
        some = _some(estimate.written_back)
        notes.append(f"Arguments that are written in place are copied back after {some}.")
    return notes


def _some(paths: tuple[str, ...]) -> str:
    """The first three of some module paths."""
    shown = ", ".join(path or "the model itself" for path in paths[:3])
    return f"{shown} and {len(paths) - 3} more" if len(paths) > 3 else shown


def as_sentence(text: str) -> str:
    """End with a full stop. The beginning may be the name of a module or a device and stays."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"

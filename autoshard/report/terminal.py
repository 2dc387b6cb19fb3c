"""Plans, profiles and devices as tables for a terminal of 80 columns or more."""

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.hardware import hardware_table
from autoshard.estimate import DeviceEstimate, Estimate
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.rows import PARTS, cut_bar, device_parts, module_rows, placed_rows, tied_modules, transfer_rows
from autoshard.sizes import format_bytes, format_seconds
from autoshard.workload import Workload

STYLES = {
    "weights": "blue",
    "gradients": "red",
    "optimizer": "magenta",
    "activations": "yellow",
    "cache": "green",
    "overhead": "bright_black",
    "free": "bright_black",
}
# Parts must be told apart without colour too.
CELLS = {
    "weights": "█",
    "gradients": "▚",
    "optimizer": "▓",
    "activations": "▒",
    "cache": "▪",
    "overhead": "x",
    "free": "·",
}
ASCII_CELLS = {
    "weights": "#",
    "gradients": "g",
    "optimizer": "o",
    "activations": "a",
    "cache": "c",
    "overhead": "x",
    "free": ".",
}
BAR_WIDTH = 22
MOST_ROWS = 48
MOST_TRANSFERS = 12


def print_plan(
    console: Console,
    plan: Plan,
    estimate: Estimate,
    profile: Profile,
    *,
    title: str = "",
    kinds: "dict[str, str] | None" = None,
    notes: Iterable[str] = (),
) -> None:
    """Print a plan and what it costs: devices, modules, times, transfers, reasons, notes."""
    _heading(console, title, profile, plan.workload)
    used = [device for device in estimate.devices if device.peak_bytes > 0]
    sentence = f"{plan.strategy}, for {plan.objective}: {len(used)} of {len(estimate.devices)} devices used"
    if not estimate.fits:
        sentence += ", and it does not fit"
    _section(console, "Plan", sentence)
    console.print(_devices_table(console, estimate, kinds or {d.name: d.kind for d in plan.devices}))
    console.print(_legend(console, estimate))
    _section(console, "Modules", "")
    _print_modules(console, plan, profile)
    _section(console, "Predicted", "")
    console.print(_indented(_times(plan, estimate)))
    if estimate.transfers:
        _print_transfers(console, estimate)
    _print_sentences(console, "Why", plan.reasons)
    _print_sentences(console, "Notes", [*_capture_notes(profile), *_estimate_notes(estimate), *notes])


def print_profile(
    console: Console, profile: Profile, *, title: str = "", depth: int = 3, notes: Iterable[str] = ()
) -> None:
    """Print memory and compute module by module, repeated blocks folded, and the totals on one device."""
    _heading(console, title, profile, profile.workload)
    training = profile.workload.training
    table = _table()
    table.add_column("Module", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("Class", no_wrap=True, overflow="ellipsis", max_width=22)
    for name in ("Weights", "Saved" if training else "Peak", "GFLOP"):
        table.add_column(name, justify="right", no_wrap=True)
    if profile.cache_bytes:
        table.add_column("Cache", justify="right", no_wrap=True)
    rows, tied = module_rows(profile, depth), tied_modules(profile)
    for row in rows[:MOST_ROWS]:
        module = row.module
        label = Text("  " * row.depth + row.label)
        if row.count > 1:
            label.append(f"  {row.count} x", style="bold")
            label.append(" each", style="bright_black")
        cells: list[Any] = [
            label,
            Text(module.class_name, style="bright_black"),
            "tied" if module.path in tied else _bytes(module.parameter_bytes + module.buffer_bytes),
            _bytes(module.saved_bytes if training else module.peak_bytes),
            _gflop(module.flops),
        ]
        if profile.cache_bytes:
            cells.append(_bytes(module.cache_bytes))
        table.add_row(*cells)
    console.print(table)
    _print_left_off(console, len(rows) - MOST_ROWS, "modules", "--json lists all")
    _section(console, "On one device", "")
    totals = {
        "weights": profile.parameter_bytes + profile.buffer_bytes,
        "gradients": profile.gradient_bytes,
        "optimizer state": profile.optimizer_bytes,
        "activations at their peak": profile.activation_peak_bytes,
        "cache": profile.cache_bytes,
    }
    lines = Table.grid(padding=(0, 2))
    for name, nbytes in totals.items():
        if nbytes:
            lines.add_row(name, _bytes(nbytes))
    lines.add_row("in all, at the peak", Text(format_bytes(profile.peak_bytes), style="bold"))
    lines.add_row("compute", f"{_flops(profile.flops)}, mostly in {profile.dtype}")
    console.print(_indented(lines))
    _print_sentences(console, "Notes", [*_capture_notes(profile), *notes])


def print_devices(console: Console, cluster: Cluster) -> None:
    """Print devices with their rates, the links between them, and what the figures rest on."""
    table = _table()
    table.add_column("Device", style="bold", no_wrap=True)
    table.add_column("Hardware", no_wrap=True)
    for name in ("Memory", "bf16 TFLOP/s", "fp32", "Memory GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    several_hosts = len({device.host for device in cluster.devices}) > 1
    if several_hosts:
        table.add_column("Machine", no_wrap=True)
    table.add_column("", no_wrap=True, style="bright_black")
    for device in cluster.devices:
        row = [
            device.name,
            device.kind,
            format_bytes(device.memory_bytes),
            _number(device.flops("bfloat16") / 1e12),
            _number(device.flops("float32") / 1e12),
            _number(device.bytes_per_second / 1e9),
        ]
        table.add_row(*row, *([device.host] if several_hosts else []), "measured" if device.measured else "")
    console.print(table)
    if len(cluster.devices) > 1:
        _section(console, "Links", "")
        console.print(_indented(_links_table(cluster)))
    _print_sentences(console, "Notes", cluster.notes)


def print_hardware(console: Console) -> None:
    """Print the hardware table with what is not verified marked."""
    table = _table()
    table.add_column("Name", style="bold", no_wrap=True)
    for name in ("Usable", "bf16", "fp16", "fp32", "GB/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Between cards, GB/s", no_wrap=True, overflow="ellipsis", max_width=24)
    for row in hardware_table().values():
        if not row.is_card:
            continue
        rates = [row.flops_per_second.get(dtype, 0) / 1e12 for dtype in ("bfloat16", "float16", "float32")]
        mark = "*" if "all" in row.unverified else ""
        link = f"{row.peer_bytes_per_second / 1e9:g} {row.peer_link}" if row.peer_topology else "through the host"
        cells = [format_bytes(row.memory_bytes), *map(_number, rates), _number(row.bytes_per_second / 1e9)]
        table.add_row(row.name + mark, *cells, link)
    console.print(table)
    remark = "Peaks, dense, in TFLOP/s; links one way. * not verified in a source."
    console.print(_indented(Text(remark, style="bright_black")))


def _heading(console: Console, title: str, profile: Profile, workload: Workload) -> None:
    root = profile.modules[0]
    line = Text()
    line.append(title or root.class_name, style="bold")
    if title:
        line.append(f"  {root.class_name}")
    parameters = sum(t.nbytes // max(t.dtype.itemsize, 1) for t in _distinct_parameters(profile))
    line.append(f"  {_count(parameters)} parameters, {format_bytes(profile.parameter_bytes + profile.buffer_bytes)}")
    console.print()
    console.print(line, overflow="ellipsis", no_wrap=True)
    console.print(Text(describe_workload(workload, profile.dtype), style="bright_black"))


def _distinct_parameters(profile: Profile) -> list[Any]:
    by_storage = {t.storage: t for t in reversed(profile.graph.tensors) if t.kind == "parameter"}
    return list(by_storage.values())


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


def _devices_table(console: Console, estimate: Estimate, kinds: "dict[str, str]") -> Table:
    table = _table()
    table.add_column("Device", style="bold", no_wrap=True)
    if any(kind != "generic" for kind in kinds.values()):
        table.add_column("Hardware", no_wrap=True)
    table.add_column("Memory", no_wrap=True)
    for name in ("Peak", "of", "Free", "Time"):
        table.add_column(name, justify="right", no_wrap=True)
    for device in estimate.devices:
        kind = [kinds.get(device.name, "")] if len(table.columns) == 7 else []
        free = Text(format_bytes(device.free_bytes), style="" if device.free_bytes >= 0 else "bold red")
        table.add_row(
            device.name,
            *kind,
            _bar(console, device),
            format_bytes(device.peak_bytes),
            format_bytes(device.memory_bytes),
            free,
            format_seconds(device.compute_seconds) if device.compute_seconds else "-",
        )
    return table


def _bar(console: Console, device: DeviceEstimate) -> Text:
    cells = _cells(console)
    bar = Text()
    widths = cut_bar(list(device_parts(device).values()), device.memory_bytes, BAR_WIDTH)
    for part, width in zip(PARTS, widths, strict=True):
        bar.append(cells[part] * width, style=STYLES[part])
    bar.append(cells["free"] * (BAR_WIDTH - sum(widths)), style=STYLES["free"])
    return bar


def _legend(console: Console, estimate: Estimate) -> Padding:
    """The parts that occur, each with its cell and its sum."""
    cells, legend = _cells(console), Text()
    for part in PARTS:
        total = sum(device_parts(device)[part] for device in estimate.devices)
        if total:
            legend.append(cells[part], style=STYLES[part])
            legend.append(f" {part} {format_bytes(total)}   ")
    legend.append(cells["free"], style=STYLES["free"])
    legend.append(" free")
    return _indented(legend)


def _print_modules(console: Console, plan: Plan, profile: Profile) -> None:
    table = _table()
    table.add_column("Module", no_wrap=True, overflow="ellipsis", ratio=1)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("Class", no_wrap=True, overflow="ellipsis", max_width=24, style="bright_black")
    table.add_column("Weights", justify="right", no_wrap=True)
    table.add_column("Device", no_wrap=True, style="bold")
    rows = placed_rows(plan, profile)
    pinned = set(plan.pins)
    for row in rows[:MOST_ROWS]:
        device = f"{row.device} (pinned)" if row.path in pinned else row.device
        table.add_row(row.path, f"{row.count} x" if row.count > 1 else "", row.class_name, _bytes(row.nbytes), device)
    console.print(table)
    _print_left_off(console, len(rows) - MOST_ROWS, "rows", "--json and -o list all")


def _times(plan: Plan, estimate: Estimate) -> Table:
    lines = Table.grid(padding=(0, 2))
    what = "training step" if plan.workload.training else "pass"
    lines.add_row(
        f"one {what}",
        Text(format_seconds(estimate.latency_seconds), style="bold"),
        _rate(plan, estimate.latency_seconds),
    )
    busiest = max(estimate.devices, key=lambda d: d.compute_seconds + d.transfer_seconds)
    rate = _rate(plan, estimate.bottleneck_seconds)
    several = sum(1 for device in estimate.devices if device.peak_bytes > 0) > 1
    if several:
        lines.add_row(
            "busiest device",
            Text(format_seconds(estimate.bottleneck_seconds)),
            f"{busiest.name}; {rate} if passes overlap",
        )
    if estimate.lower_bound_seconds > 0 and estimate.objective != "memory":
        gap = "proved optimal" if estimate.gap < 5e-4 else f"this plan is within {100 * estimate.gap:.1f} % of it"
        lines.add_row("lower bound", format_seconds(estimate.lower_bound_seconds), gap)
    return lines


def _rate(plan: Plan, seconds: float) -> str:
    """Tokens, or samples, or passes per second."""
    if seconds <= 0:
        return ""
    batch, length = plan.workload.batch_size, plan.workload.sequence_length
    if batch and length:
        return f"{_count(batch * length / seconds)} tokens/s"
    if batch:
        return f"{_count(batch / seconds)} samples/s"
    return f"{_count(1 / seconds)} per second"


def _print_transfers(console: Console, estimate: Estimate) -> None:
    rows = transfer_rows(estimate.transfers)
    total = sum(row.nbytes for row in rows)
    seconds = sum(row.seconds for row in rows)
    count = sum(row.count for row in rows)
    plural = "s" if count > 1 else ""
    _section(console, "Transfers", f"{count} tensor{plural}, {format_bytes(total)}, {format_seconds(seconds)} per pass")
    table = _table()
    table.add_column("From", no_wrap=True)
    table.add_column("To", no_wrap=True)
    for name in ("Tensors", "Bytes", "Time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("Largest", no_wrap=True, overflow="ellipsis", ratio=1, style="bright_black")
    shown = rows
    if len(rows) > MOST_TRANSFERS:
        slowest = sorted(rows, key=lambda row: -row.seconds)[:MOST_TRANSFERS]
        shown = [row for row in rows if row in slowest]
    for row in shown:
        largest = f"{row.producer or 'inputs'} -> {row.consumer or 'outputs'}"
        source = f"{row.source} (backward)" if row.backward else row.source
        table.add_row(
            source, row.destination, str(row.count), format_bytes(row.nbytes), format_seconds(row.seconds), largest
        )
    console.print(table)
    _print_left_off(console, len(rows) - len(shown), "pairs of devices", "the slowest are shown; --json lists all")


def _links_table(cluster: Cluster) -> Table:
    """Links folded by rate: one line for the many pairs that are alike."""
    groups: dict[tuple[float, float], list[str]] = {}
    for link in cluster.links:
        key = (float(f"{link.bytes_per_second:.3g}"), float(f"{link.latency_seconds:.2g}"))
        groups.setdefault(key, []).append(f"{link.source} -> {link.destination}")
    lines = Table.grid(padding=(0, 2))
    for (rate, latency), pairs in sorted(groups.items(), reverse=True):
        shown = ", ".join(pairs[:2]) + (f" and {len(pairs) - 2} more" if len(pairs) > 2 else "")
        lines.add_row(f"{rate / 1e9:.3g} GB/s", format_seconds(latency), Text(shown, style="bright_black"))
    return lines


def _capture_notes(profile: Profile) -> list[str]:
    levels = {
        "fake": "",
        "real": "The model was captured by running it with values.",
        "invented": "The model was captured with invented values where it branches on them: good for planning only.",
    }
    return [note for note in (levels[profile.graph.level], *profile.graph.notes) if note]


def _estimate_notes(estimate: Estimate) -> list[str]:
    notes = []
    if estimate.aligned:
        some = ", ".join(path or WHOLE_MODEL for path in estimate.aligned[:3])
        more = f" and {len(estimate.aligned) - 3} more" if len(estimate.aligned) > 3 else ""
        notes.append(
            f"Tensors of several devices meet inside {some}{more}: their ops are watched there, which costs time."
        )
    if estimate.written_back:
        some = ", ".join(path or WHOLE_MODEL for path in estimate.written_back[:3])
        notes.append(f"Arguments that are written in place are copied back after {some}.")
    return notes


WHOLE_MODEL = "the model itself"


def _section(console: Console, title: str, sentence: str) -> None:
    console.print()
    line = Text(title, style="bold cyan")
    if sentence:
        line.append(f"  {sentence}", style="default not bold")
    console.print(line)


def _print_sentences(console: Console, title: str, sentences: Sequence[str]) -> None:
    """One bullet per sentence, wrapped and indented; equal ones once."""
    if not sentences:
        return
    _section(console, title, "")
    grid = Table.grid(padding=(0, 1))
    for sentence in dict.fromkeys(sentences):
        grid.add_row("-", Text(sentence))
    console.print(_indented(grid))


def _print_left_off(console: Console, count: int, what: str, where: str) -> None:
    if count > 0:
        console.print(_indented(Text(f"and {count} more {what}; {where}", style="bright_black")))


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black", show_edge=False)


def _indented(content: Any) -> Padding:
    return Padding(content, (0, 0, 0, 2), expand=False)


def _cells(console: Console) -> "dict[str, str]":
    encoding = (console.encoding or "").lower()
    return CELLS if encoding.startswith("utf") else ASCII_CELLS


def _bytes(nbytes: int) -> str:
    return format_bytes(nbytes) if nbytes else "-"


def _gflop(flops: int) -> str:
    return _number(flops / 1e9) if flops else "-"


def _number(value: float) -> str:
    """Three significant digits, never an exponent for what a card has: 1,400; 23.4; 0.12."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _flops(flops: float) -> str:
    for scale, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if flops >= scale:
            return f"{flops / scale:.3g} {unit}"
    return f"{flops:.0f} FLOP"


def _count(number: float) -> str:
    for scale, unit in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.3g}"

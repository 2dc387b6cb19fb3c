"""A plan for one process per device on the terminal: its mesh, what it predicts, and memory over a step."""

from rich.console import Console
from rich.text import Text

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Estimate, RankEstimate
from autoshard.plan import Plan
from autoshard.report.layout import INDENT, Column, print_left_off, print_section, print_table

MEANING = {
    "dp": "replicas with all parameters of their part",
    "fsdp": "replicas that share parameters, gradients and optimizer state",
    "tp": "ranks that share every matrix",
    "pp": "pipeline stages",
    "cp": "parts of every sequence",
    "ep": "groups of experts",
}
MOST_STAGES = 8
MOST_RANKS = 8
CURVE_WIDTH = 10


def print_mesh(console: Console, plan: Plan) -> None:
    """Print the degrees larger than 1, the micro-batches, and the stages of a pipeline."""
    assert plan.mesh is not None
    degrees = {name: degree for name, degree in plan.mesh.degrees.items() if degree > 1}
    print_section(console, "Mesh", ", ".join(f"{name}={degree}" for name, degree in degrees.items()) or "one device")
    rows: list[list[str | Text]] = [[name, str(degree), MEANING[name]] for name, degree in degrees.items()]
    if plan.workload.training:
        rows.append(["micro-batch", str(plan.micro_batch), f"samples, {plan.num_microbatches} of them per step"])
        rows.append(["recompute", plan.recompute, ""])
        rows.append(["precision", plan.precision, ""])
    elif plan.precision:
        rows.append(["weights", plan.precision, ""])
    if plan.schedule != "none":
        rows.append(["schedule", plan.schedule, ""])
    print_table(console, [Column(style="bold"), Column(), Column(style="bright_black", flexible=True)], rows, INDENT)
    if plan.mesh.pp > 1:
        _print_stages(console, plan)


def _print_stages(console: Console, plan: Plan) -> None:
    columns = [Column(title="Stage", right=True), Column(title="Modules", flexible=True), Column(title="First rank on")]
    shown = list(range(len(plan.stages)))
    if len(shown) > MOST_STAGES:
        shown = [*shown[: MOST_STAGES - 2], -1, shown[-1]]
    rows: list[list[str | Text]] = []
    for index in shown:
        if index < 0:
            rows.append(["…", "", ""])
            continue
        paths = plan.stages[index].paths
        text = ", ".join(paths) if len(paths) < 4 else f"{paths[0]}, {paths[1]} … {paths[-1]} ({len(paths)})"
        rows.append([str(index), text, plan.placements[paths[0]] if paths else ""])
    print_table(console, columns, rows)


def ranks_label(rank: RankEstimate, plan: Plan) -> str:
    """Name a class of equal ranks: its pipeline rank, and its devices."""
    more = f" and {rank.devices - 1} more" if rank.devices > 1 else ""
    if plan.mesh is None or plan.mesh.pp == 1:
        return f"every rank · {rank.first}{more}"
    stages = sorted(rank.stages)
    named = ", ".join(map(str, stages[:2])) + (f" … {stages[-1]}" if len(stages) > 2 else "")
    return f"stage{'s' if len(stages) > 1 else ''} {named} · {rank.first}{more}"


def print_ranks(console: Console, plan: Plan, estimate: Estimate) -> None:
    """Print what each class of ranks does with the time, and how full it is."""
    if len(estimate.ranks) < 2:
        return
    print_section(console, "Ranks", "seconds of kernels, of waiting for communication, and idle")
    rows: list[list[str | Text]] = [
        [
            ranks_label(rank, plan), format_bytes(rank.peak_bytes), format_seconds(rank.compute_seconds),
            format_seconds(rank.exposed_seconds), format_seconds(rank.idle_seconds),
        ]
        for rank in estimate.ranks[:MOST_RANKS]
    ]  # fmt: skip
    titles = ("Peak", "Kernels", "Waits", "Idle")
    print_table(console, [Column(flexible=True), *(Column(title=title, right=True) for title in titles)], rows, INDENT)
    print_left_off(console, len(estimate.ranks) - MOST_RANKS, "classes of ranks", "--json lists all")


def print_curve(console: Console, plan: Plan, estimate: Estimate) -> None:
    """Print what the fullest rank holds at each moment of a step or an answer."""
    if not estimate.curve:
        return
    totals = [sum(moment.bytes.values()) for moment in estimate.curve]
    over = "a step" if plan.workload.training else "an answer"
    print_section(console, f"Memory over {over}", "of tensors on the fullest rank")
    rows: list[list[str | Text]] = []
    for moment, total in zip(estimate.curve, totals, strict=True):
        largest = sorted(moment.bytes.items(), key=lambda item: -item[1])[:2]
        width = round(CURVE_WIDTH * total / max(totals))
        style = "bold" if total == max(totals) else ""
        about = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in largest if nbytes)
        rows.append([moment.name, Text("#" * width, style="yellow"), Text(format_bytes(total), style=style), about])
    columns = [Column(), Column(), Column(right=True), Column(style="bright_black", flexible=True)]
    print_table(console, columns, rows, INDENT)

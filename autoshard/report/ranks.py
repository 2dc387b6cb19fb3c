"""A plan over a mesh on the terminal: its degrees, its stages, what ranks do with the time, and memory over a step."""

from rich.console import Console
from rich.text import Text

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Estimate, RankEstimate
from autoshard.plan import Plan
from autoshard.report.layout import INDENT, CellText, Column, Table, numbers, print_left_off, print_section, print_table
from autoshard.report.words import fold_paths
from autoshard.search.reasons import WHAT

MOST_STAGES = 16
MOST_RANKS = 8
CURVE_WIDTH = 10


def print_mesh(console: Console, plan: Plan) -> None:
    """Print the degrees larger than 1, and how a step is divided."""
    assert plan.mesh is not None
    degrees = {name: degree for name, degree in plan.mesh.degrees.items() if degree > 1}
    print_section(console, "Mesh", ", ".join(f"{name}={degree}" for name, degree in degrees.items()) or "one device")
    rows: list[list[CellText]] = [[name, str(degree), WHAT[name]] for name, degree in degrees.items()]
    if plan.launch and plan.workload.training:
        samples = "1 sample" if plan.micro_batch == 1 else f"{plan.micro_batch} samples"
        rows.append(["micro-batches", str(plan.num_microbatches), f"per step, of {samples} each"])
        rows += [["recompute", plan.recompute, ""], ["precision", plan.precision, ""]]
    elif plan.num_microbatches > 1:
        rows.append(["micro-batches", str(plan.num_microbatches), "per step" if plan.workload.training else "per pass"])
    elif plan.precision:
        rows.append(["weights", plan.precision, ""])
    if plan.schedule != "none":
        rows.append(["schedule", plan.schedule, ""])
    print_table(console, [Column(style="bold"), Column(), Column(style="bright_black", flexible=True)], rows, INDENT)


def print_stages(console: Console, plan: Plan, estimate: Estimate) -> None:
    """Print the stages of a pipeline."""
    said = "and their first ranks" if estimate.pipelining is None else "seconds and bytes of one micro-batch"
    print_section(console, "Stages", said)
    table = stage_table(plan, estimate)
    print_table(console, table.columns, table.rows[:MOST_STAGES])
    print_left_off(console, len(plan.stages) - MOST_STAGES, "stages", "--json lists all")


def stage_table(plan: Plan, estimate: Estimate) -> Table:
    """Return the stages of a pipeline, with seconds and bytes of one micro-batch where each was priced by itself."""
    priced = estimate.pipelining.stages if estimate.pipelining is not None else ()
    training = any(stage.backward_seconds for stage in priced)
    titles = ("Forward", "Backward", "Keeps", "In flight") if training else ("Forward",) if priced else ()
    rows: list[list[CellText]] = []
    for index, stage in enumerate(plan.stages):
        device = priced[index].device if priced else plan.placements.get(stage.paths[0], "") if stage.paths else ""
        row: list[CellText] = [str(index), device, fold_paths(stage.paths)]
        if priced:
            one = priced[index]
            cells = [format_seconds(one.forward_seconds), format_seconds(one.backward_seconds)]
            cells += [format_bytes(one.activation_bytes), f"{one.in_flight}{', recomputed' if one.recompute else ''}"]
            row += cells[: len(titles)]
        rows.append(row)
    columns = [Column(title="Stage", right=True), Column(title="Device", style="bold")]
    columns += [Column(title="Modules", flexible=True), *numbers(*titles)]
    label = "Stages" if plan.mesh is not None and plan.mesh.pp > 1 else "Modules that are gathered as one"
    return Table(label=label, columns=columns, rows=rows)


def ranks_label(rank: RankEstimate, plan: Plan) -> str:
    """Name a class of equal ranks: its pipeline rank, and its devices."""
    more = f" and {rank.devices - 1} more" if rank.devices > 1 else ""
    if plan.mesh is None or plan.mesh.pp == 1:
        return f"every rank · {rank.first}{more}"
    stages = sorted(rank.stages)
    named = ", ".join(map(str, stages[:2])) + (f" … {stages[-1]}" if len(stages) > 2 else "")
    return f"stage{'s' if len(stages) > 1 else ''} {named} · {rank.first}{more}"


def rank_table(plan: Plan, estimate: Estimate) -> Table:
    """Return what each class of ranks does with the time, and how full it is."""
    rows = [
        [
            ranks_label(rank, plan), format_bytes(rank.peak_bytes), format_seconds(rank.compute_seconds),
            format_seconds(rank.exposed_seconds), format_seconds(rank.idle_seconds),
        ]
        for rank in estimate.ranks
    ]  # fmt: skip
    columns = [Column(title="Devices", flexible=True), *numbers("Peak", "Kernels", "Waits", "Idle")]
    return Table(label="Seconds of kernels, of waiting for communication, and idle", columns=columns, rows=rows)


def print_ranks(console: Console, plan: Plan, estimate: Estimate) -> None:
    """Print the classes of ranks; nothing of one class."""
    if len(estimate.ranks) < 2:
        return
    table = rank_table(plan, estimate)
    print_section(console, "Ranks", f"{table.label[0].lower()}{table.label[1:]}")
    print_table(console, table.columns, table.rows[:MOST_RANKS], INDENT)
    print_left_off(console, len(estimate.ranks) - MOST_RANKS, "classes of ranks", "--json lists all")


def print_curve(console: Console, plan: Plan, estimate: Estimate) -> None:
    """Print what the fullest rank holds at each moment of a step or an answer, where that was followed."""
    if not estimate.curve:
        return
    totals = [moment.total for moment in estimate.curve]
    print_section(console, f"Memory over {plan.workload.unit}", "of tensors on the fullest rank")
    rows: list[list[CellText]] = []
    for moment, total in zip(estimate.curve, totals, strict=True):
        largest = sorted(moment.bytes.items(), key=lambda item: -item[1])[:2]
        width = round(CURVE_WIDTH * total / max(totals))
        style = "bold" if total == max(totals) else ""
        about = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in largest if nbytes)
        rows.append([moment.name, Text("#" * width, style="yellow"), Text(format_bytes(total), style=style), about])
    columns = [Column(), Column(), Column(right=True), Column(style="bright_black", flexible=True)]
    print_table(console, columns, rows, INDENT)

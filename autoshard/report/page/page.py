"""The page of a plan of any kind: what its estimate has, as tables and pictures, and the data that its script draws."""

from collections.abc import Iterable, Sequence
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.hardware import COMPUTE_EFFICIENCY, LINK_EFFICIENCY, MEMORY_EFFICIENCY
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, Estimate, RankEstimate, level
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.compared import strategy_cells, strategy_columns
from autoshard.report.devices import LINKS, device_table, link_rows
from autoshard.report.layout import Column, Table, format_number, numbers
from autoshard.report.page.colours import HELD, KINDS, PARTS, device_colours
from autoshard.report.page.lanes import events_of, timeline_data
from autoshard.report.page.places import Places, places_of
from autoshard.report.ranks import rank_table, ranks_label, stage_table
from autoshard.report.rows import (
    TransferRow,
    device_runs,
    module_tree,
    tied_modules,
    transfer_rows,
    transfer_table,
)
from autoshard.report.summary import about_model, fullest_row, moved_row, time_rows, unit_of, verdict, what_is_timed
from autoshard.report.terminal import as_sentence, capture_notes, describe_workload, estimate_notes
from autoshard.search.reasons import beside, shown_mesh
from autoshard.search.sizes import Cell
from autoshard.search.study import Study
from autoshard.strategies.compare import Alternative, value_of

if TYPE_CHECKING:
    from jinja2 import Template

MOST_CURVES = 4
OUTSIDE = "context, allocator"
"""What is taken of a device beside tensors: it is there all the time."""


def make_page(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, *, title: str = "", notes: Iterable[str] = (),
    alternatives: Sequence[Alternative] = (), cells: Sequence[Cell] = (), study: Study | None = None,
) -> str:  # fmt: skip
    """Return one HTML document that needs no other file and no network.

    `alternatives`: the best plan of every strategy, this one among them. `cells`: of other sizes and devices, the
    plan's own first. `study`: of a plan for processes, which has the other meshes and sizes itself.
    """
    places = places_of(plan, profile)
    ranks, reasons = estimate.ranks, plan.reasons if study is None else study.reasons
    timeline, drawn = _timeline(plan, estimate, profile, cluster, study)
    start = next((reason for reason in reversed(reasons) if reason.startswith("start it")), "")
    parts = [part for part in PARTS if any(device.parts[part] for device in estimate.devices)]
    every = [*capture_notes(profile), *estimate_notes(estimate), *map(as_sentence, (*notes, *cluster.notes))]
    cells = cells if study is None else study.cells
    return _template().render(
        title=title or profile.modules[0].class_name, workload=describe_workload(plan.workload, profile.dtype),
        plan=plan, estimate=estimate, profile=profile, verdict=verdict(plan, estimate),
        figures=[*time_rows(plan, estimate, profile), fullest_row(estimate), *moved_row(estimate)],
        about=about_model(profile),
        to_fit="" if study is None else study.to_fit,
        start=start.partition(": ")[2],
        devices=[
            _device(device, label, cluster, "waits" if plan.launch else "copies tensors")
            for device, label in device_runs(estimate.devices)
        ],
        parts={f"{part} {format_bytes(_sum(estimate, part))}": PARTS[part] for part in parts},
        part_colours=PARTS,
        moments=[_moments(rank, plan, estimate) for rank in _evenly(ranks)],
        kinds=_kinds(ranks),
        ranks=rank_table(plan, estimate),
        drawn=drawn, drawn_of=plan.workload.unit if study is not None else what_is_timed(profile),
        tree=module_tree(profile, partial(_places_in, plan, places)), places=places, tied=tied_modules(profile),
        cut=bool(plan.cuts) and not plan.launch,
        placed=plan.mesh is None or plan.mesh.pp > 1,
        ranks_each=len(plan.devices) // plan.mesh.pp if plan.launch and plan.mesh is not None else 1,
        mesh="" if study is None else shown_mesh(study.own.recipe),
        device_colours=device_colours(cluster.names),
        stages=stage_table(plan, estimate),
        transfers=_transfers(estimate),
        grids=_grids(cells, unit_of(plan.workload)) if len(cells) > 1 else [],
        priced_how=_priced_how(plan),
        alternatives=_meshes(study) if study is not None else _strategies(alternatives, plan, estimate),
        why=[as_sentence(reason) for reason in dict.fromkeys(reasons) if reason != start],
        efficiency=efficiency(plan), notes=list(dict.fromkeys(every)),
        hardware=device_table(cluster, sources=True),
        links=Table(label="Links", columns=LINKS, rows=link_rows(cluster)),
        plan_json=plan.to_json(),
        data={"timeline": timeline, "kinds": KINDS},
        style=_page_file("page.css"), script=_page_file("page.js"),
    )  # fmt: skip


def _timeline(
    plan: Plan, estimate: Estimate, profile: Profile, cluster: Cluster, study: Study | None
) -> tuple[dict[str, Any], str]:
    """The timeline as data, and what is drawn; lanes of ranks have their names."""
    happening, drawn = events_of(plan, profile, cluster, study)
    if study is None:
        return timeline_data(happening, cluster.names, estimate.recorded_seconds), drawn
    timeline = timeline_data(happening, [rank.first for rank in estimate.ranks], estimate.recorded_seconds)
    labels = {rank.first: ranks_label(rank, plan).partition(" · ")[0] for rank in estimate.ranks}
    timeline["lanes"] = [" ".join(labels.get(word, word) for word in name.split()) for name in timeline["lanes"]]
    return timeline, drawn


def _places_in(plan: Plan, places: Places, path: str) -> object:
    """What makes equal modules different under a plan."""
    return (
        tuple(places.devices.get(path, {}).items()),
        places.cut.get(path),
        plan.offloaded.get(path),
        path in plan.pins,
    )


def _template() -> "Template":
    """The template of the page, with the filters that write figures."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("autoshard.report.page", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "ensure_ascii": False, "allow_nan": False}
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds, "number": format_number}
    return environment.get_template("page.html.j2")


def _page_file(name: str) -> str:
    """The text of a file of the page."""
    return resources.files("autoshard.report.page").joinpath(name).read_text(encoding="utf-8")


# ---- memory and time


def _sum(estimate: Estimate, part: str) -> int:
    return sum(device.parts[part] for device in estimate.devices)


def _device(device: DeviceEstimate, label: str, cluster: Cluster, communicates: str) -> dict[str, Any]:
    """What fills a device's memory, as shares of its lane, and in words."""
    full = max(device.memory_bytes, device.peak_bytes, 1)
    parts = {name: nbytes for name, nbytes in device.parts.items() if nbytes}
    kind = cluster.device(device.name).kind
    free = device.free_bytes
    left = f"{format_bytes(free)} free" if free >= 0 else f"{format_bytes(-free)} too little"
    words = [f"{format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}, {left}"]
    words += [f"computes {format_seconds(device.compute_seconds)}"] if device.compute_seconds else []
    words += [f"{communicates} {format_seconds(device.transfer_seconds)}"] if device.transfer_seconds else []
    return {
        "label": (label, "" if kind == "generic" else kind),
        "words": "; ".join(words) if device.peak_bytes else f"unused, {format_bytes(device.memory_bytes)}",
        "parts": {name: 100 * nbytes / full for name, nbytes in parts.items()},
        "bar": ", ".join([*(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items()), left]),
        "limit": 100 * device.memory_bytes / full,
    }


def _evenly(ranks: Sequence[RankEstimate]) -> list[RankEstimate]:
    """A few of the classes, the fullest first, and the emptiest among them."""
    by_peak, most = sorted(ranks, key=lambda rank: -rank.peak_bytes), min(MOST_CURVES, len(ranks))
    return [by_peak[round(at * (len(ranks) - 1) / max(most - 1, 1))] for at in range(most)]


def _held(rank: RankEstimate) -> list[tuple[str, dict[str, float]]]:
    """(moment, bytes by kind) of a class of ranks; the fullest moment adds up to its peak."""
    fullest = max(moment.total for moment in rank.curve)
    return [(moment.name, {OUTSIDE: rank.peak_bytes - fullest, **moment.bytes}) for moment in rank.curve]


def _kinds(ranks: Sequence[RankEstimate]) -> dict[str, str]:
    """The kinds of memory that occur, with their colours, what is there all the time first."""
    found = {kind for rank in ranks for _, kinds in _held(rank) for kind, nbytes in kinds.items() if nbytes}
    return {kind: HELD.get(kind, "#999999") for kind in (*(k for k in HELD if k in found), *sorted(found - set(HELD)))}


def _moments(rank: RankEstimate, plan: Plan, estimate: Estimate) -> dict[str, Any]:
    """What a class of ranks holds at each moment, as shares of a lane, and in words."""
    memory = next(device.memory_bytes for device in estimate.devices if device.name == rank.first)
    full = max(memory, rank.peak_bytes, 1)
    lanes = []
    for name, parts in _held(rank):
        said = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in sorted(parts.items(), key=lambda p: -p[1]) if n)
        lanes.append({
            "label": (name, ""), "words": f"{format_bytes(sum(parts.values()))}: {said}",
            "parts": {kind: 100 * parts.get(kind, 0) / full for kind in _kinds([rank])},
            "limit": 100 * memory / full,
        })  # fmt: skip
    said = f"at most {format_bytes(rank.peak_bytes)} of {format_bytes(memory)}"
    return {"label": ranks_label(rank, plan), "said": said, "lanes": lanes, "level": level(rank.peak_bytes, memory)}


# ---- tables


def _transfers(estimate: Estimate) -> Table:
    """What moves in the recorded run: tensors by pair of devices, and offloaded parameters."""
    links = estimate.streaming.links if estimate.streaming is not None else ()
    passes = estimate.brought_bytes // max(1, sum(link.nbytes for link in links))
    brought = [
        TransferRow(
            source=link.source, destination=link.destination, backward=False,
            count=passes * link.fetches, nbytes=passes * link.nbytes,
            seconds=passes * link.seconds, largest=f"parameters of {link.modules} offloaded modules",
        ) for link in links
    ]  # fmt: skip
    return transfer_table([*transfer_rows(estimate.transfers), *brought])


def _grids(cells: Sequence[Cell], unit: str) -> list[Table]:
    """Cells as tables of batches and devices, one per length of the sequence, the plan's own first."""
    lengths = sorted({cell.tokens for cell in cells}, key=lambda n: (n != next(c.tokens for c in cells if c.own), n))
    found = []
    for tokens in lengths:
        own = [cell for cell in cells if cell.tokens == tokens]
        places = sorted({(cell.card, cell.devices) for cell in own})
        rows = []
        for batch in sorted({cell.batch for cell in own}):
            at = {(cell.card, cell.devices): cell for cell in own if cell.batch == batch}
            rows.append([str(batch or "as recorded"), *(_cell(at.get(place), unit) for place in places)])
        heads = [f"{n} x {card}" if card else f"{n} device{'s' if n > 1 else ''}" for card, n in places]
        label = f"{tokens} tokens per sequence: batch by devices" if tokens else "Batch by devices"
        chosen = next((str(cell.batch or "as recorded") for cell in own if cell.own), "")
        columns = [Column(title=head) for head in ("Batch", *heads)]
        found.append(Table(label=label, columns=columns, rows=rows, chosen=chosen))
    return found


def _cell(cell: Cell | None, unit: str) -> str:
    if cell is None:
        return "not priced"
    if not cell.mesh:
        return "nothing fits"
    said = f"{format_seconds(cell.seconds)}, {format_number(cell.tokens_per_second)} {unit}/s"
    return f"{said}; {cell.mesh}, " + (f"does not fit: {cell.full:.0%}" if cell.full > 1 else f"{cell.full:.0%} full")


def _priced_how(plan: Plan) -> str:
    if plan.launch:
        return "The best plan of each size."
    return (
        "On its own devices, this plan with another batch or length, as `autoshard estimate PLAN --batch B --seq S`; "
        f"on others, whole modules placed anew, as `autoshard plan TARGET --devices SPEC --strategy {plan.strategy}`."
    )


def _meshes(study: Study) -> Table:
    """The best recipe of every mesh that fits."""
    rows, own, goal = [], study.own, study.task.goal
    for one in study.rows:
        recipe = one.recipe
        how = [f"{recipe.num_microbatches} x {recipe.micro_batch}, recompute {recipe.recompute}"] * study.task.training
        if recipe.pp > 1 and not study.task.new_tokens:  # the passes of an answer follow each other
            how.append(recipe.schedule + (f" x {recipe.stages_per_rank}" if recipe.stages_per_rank > 1 else ""))
        remark = "this plan" if one is own else beside(one.value(goal) / own.value(goal), goal)
        figures = [format_seconds(one.seconds), format_number(one.tokens_per_second), format_bytes(one.memory.used)]
        rows.append([shown_mesh(recipe), ", ".join(how), *figures, remark])
    columns = [Column(title="Mesh"), Column(title="Recipe"), *numbers("Time", "Tokens/s", "Fullest device")]
    columns.append(Column(title="Beside this plan"))
    if not any(row[1] for row in rows):
        rows, columns = [[row[0], *row[2:]] for row in rows], [columns[0], *columns[2:]]
    label = f"The best recipe of every mesh that fits, of {study.searched.priced} that were priced"
    return Table(label=label, columns=columns, rows=rows, chosen=shown_mesh(own.recipe))


def _strategies(alternatives: Sequence[Alternative], plan: Plan, estimate: Estimate) -> Table:
    """The best plan of every strategy, and this one, which none of them may be."""
    rows, chosen = [], ""
    if alternatives and not any(
        one.plan is not None and _decisions(one.plan) == _decisions(plan) for one in alternatives
    ):
        own = Alternative(
            name=plan.strategy,
            plan=plan,
            estimate=estimate,
            value=value_of(estimate, plan.objective, plan.workload.training),
        )
        alternatives = (own, *alternatives)
    for one in sorted(alternatives, key=lambda one: one.value):
        remark = one.refused or ("" if one.usable else "needs one process per device (torchrun)")
        if one.plan is not None and not chosen and _decisions(one.plan) == _decisions(plan):
            chosen, remark = one.name, "this plan"
        rows.append([*strategy_cells(one), remark])
    columns = [*strategy_columns(), Column(title="Remark")]
    return Table(label="Table of alternatives", columns=columns, rows=rows, chosen=chosen)


def _decisions(plan: Plan) -> tuple[object, ...]:
    """What makes two plans the same."""
    order = plan.mesh, plan.stages, plan.num_microbatches, plan.schedule
    return dict(plan.placements), plan.cuts, dict(plan.offloaded), *order


# ---- what figures rest on


def efficiency(plan: Plan) -> str:
    """What of published peaks is counted on."""
    if plan.launch:
        return "What kernels and collectives reach of these peaks is fitted on published runs, per generation of cards."
    return (
        f"Published peaks count {COMPUTE_EFFICIENCY:.0%} for compute, {MEMORY_EFFICIENCY:.0%} for memory and "
        f"{LINK_EFFICIENCY:.0%} for links, unless the figures were measured."
    )

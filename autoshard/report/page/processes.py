"""The page of a plan for one process per device: pictures first, tables folded, every figure of the one Estimate."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Estimate, Event, RankEstimate, level
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.figures import fullest_row, time_rows
from autoshard.report.page.colours import HELD, SPENT
from autoshard.report.page.curves import curve_rows, curve_svg, kinds_of, percent
from autoshard.report.page.lanes import timeline_data
from autoshard.report.page.page import render
from autoshard.report.processes import ranks_label
from autoshard.report.rows import device_runs
from autoshard.report.terminal import as_sentence
from autoshard.search.best import AS_GOOD
from autoshard.search.study import Study

MOST_SPANS = 10_000
MOST_CURVES, MOST_LANES, MOST_RANKED = 4, 16, 8


def make_process_page(
    study: Study, profile: Profile, cluster: Cluster, *, title: str = "", notes: Iterable[str] = ()
) -> str:  # fmt: skip
    """Return one HTML document that needs no other file and no network."""
    plan, estimate = study.plan, study.estimate
    events, said = events_of(study)
    lanes = timeline_data(events, [rank.first for rank in estimate.ranks], estimate.latency_seconds)
    labels = {rank.first: ranks_label(rank, plan) for rank in estimate.ranks}
    lanes["lanes"] = [_lane(name, labels) for name in lanes["lanes"]]
    shown = [*study.rows[:MOST_RANKED]]
    if not any(row.chosen for row in shown):
        shown = [*shown[:-1], *(row for row in study.rows if row.chosen)]
    return render(
        "processes.html.j2", plan, estimate, profile, cluster, title=title, notes=notes, cells=study.cells,
        scripts=("page.js", "sizes.js"),
        timeline=lanes,
        subtitle=study.reasons[0],
        figures=[*time_rows(plan, estimate, profile), fullest_row(estimate)],
        study=study,
        curves=[_curve(rank, plan, estimate) for rank in shown_ranks(estimate.ranks)],
        kinds=kinds_of(estimate.ranks),
        held=HELD,
        tables=[(ranks_label(rank, plan), curve_rows(rank, kinds_of(estimate.ranks))) for rank in estimate.ranks],
        spent=SPENT,
        lanes=[_spent(rank, plan, estimate) for rank in _evenly(estimate.ranks, MOST_LANES)],
        drawn=said,
        most=max((row.seconds for row in shown), default=1.0),
        ranked=shown,
        reasons=[as_sentence(reason) for reason in study.reasons[:-1]],
        start=study.reasons[-1].partition(": ")[2],
        changes=[as_sentence(change) for change in study.changes],
        devices=device_runs(estimate.devices),
        level=level,
        as_good=f"{AS_GOOD - 1:.0%}",
    )  # fmt: skip


def _lane(name: str, labels: Mapping[str, str]) -> str:
    link, _, device = name.rpartition(" ")
    return f"{link}{' ' if link else ''}{labels[device].partition(' · ')[0]}"


def shown_ranks(ranks: Sequence[RankEstimate]) -> list[RankEstimate]:
    """The fullest class of ranks first, then the others that differ most: the first, the last, the emptiest."""
    fullest = max(ranks, key=lambda rank: rank.peak_bytes)
    found = [fullest]
    for other in (ranks[0], ranks[-1], min(ranks, key=lambda rank: rank.peak_bytes)):
        if other not in found:
            found.append(other)
    return found[:MOST_CURVES]


def _evenly(ranks: Sequence[RankEstimate], most: int) -> list[RankEstimate]:
    """So many of the classes, first and last among them."""
    if len(ranks) <= most:
        return list(ranks)
    return [ranks[round(at * (len(ranks) - 1) / (most - 1))] for at in range(most)]


def _curve(rank: RankEstimate, plan: Plan, estimate: Estimate) -> dict[str, Any]:
    memory = next(device.memory_bytes for device in estimate.devices if device.name == rank.first)
    label = ranks_label(rank, plan)
    said = f"{format_bytes(rank.peak_bytes)} of {format_bytes(memory)}"
    svg = curve_svg(rank, memory, f"{label}: memory over time, at most {said}")
    return {"label": label, "said": said, "svg": svg, "level": level(rank.peak_bytes, memory)}


def _spent(rank: RankEstimate, plan: Plan, estimate: Estimate) -> dict[str, Any]:
    seconds = (rank.compute_seconds, rank.exposed_seconds, rank.idle_seconds)
    parts = dict(zip(SPENT, seconds, strict=True))
    words = ", ".join(f"{name} {format_seconds(part)}" for name, part in parts.items() if part)
    return {
        "label": ranks_label(rank, plan), "words": words, "percent": percent(parts, estimate.latency_seconds),
    }  # fmt: skip


def events_of(study: Study, most: int = MOST_SPANS) -> tuple[list[Event], str]:
    """The played step as events on the first device of every class of ranks, and what was left out to keep few."""
    played = study.played()
    each = len(study.plan.devices) // study.own.recipe.pp
    names = [device.name for device in study.plan.devices[::each]]
    first = {rank.first for rank in study.estimate.ranks}
    numbers = [number for number, name in enumerate(names) if name in first]
    said = [] if abs(played.stretch - 1) < 0.0005 else [
        f"The order of the micro-batches, played by the clock, is stretched by {played.stretch - 1:+.1%} to the price."
    ]  # fmt: skip
    own = [span for span in played.spans if span.rank in numbers]
    if len(own) > most:
        kept = max(2, most * len(numbers) // len(own))
        some = {numbers[round(at * (len(numbers) - 1) / (kept - 1))] for at in range(kept)}
        own = [span for span in own if span.rank in some]
        said.append(f"{len(some)} of {len(numbers)} classes of ranks are drawn.")
    events = [
        Event(
            device=names[span.rank], kind=span.kind, begin_seconds=span.begin, end_seconds=span.end, stage=span.stage,
            microbatch=span.microbatch, label=span.label,
        )
        for span in own
    ]  # fmt: skip
    return events, " ".join(said)

"""What happens when under a plan of any kind, and as compact data: lanes, and events that refer to them by number."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import Event
from autoshard.engine.events import LINKS, events
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.search.study import Study

MOST_EVENTS = 4000


def events_of(
    plan: Plan, profile: Profile, cluster: Cluster, study: Study | None, most: int = 10_000
) -> tuple[Sequence[Event], str]:
    """Return what happens in a pass, and in words what was left out; of equal ranks the first is followed."""
    return (events(plan, profile, cluster), "") if study is None else _played(study, most)


def _played(study: Study, most: int) -> tuple[list[Event], str]:
    """The played step as events on the first device of every class of ranks, of fewer classes where they are many."""
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
    found = [
        Event(
            device=names[span.rank], kind=span.kind, begin_seconds=span.begin, end_seconds=span.end, stage=span.stage,
            microbatch=span.microbatch, label=span.label,
        )
        for span in own
    ]  # fmt: skip
    return found, " ".join(said)


def lane_of(event: Event) -> tuple[str, bool]:
    """A device, or the links into it (True)."""
    return event.device, event.kind in LINKS


def lanes_of(events: Sequence[Event], names: Sequence[str]) -> list[tuple[str, bool]]:
    """Return the lanes that have events, devices in their order, each followed by the links into it."""
    used = {lane_of(event) for event in events}
    order = [(name, link) for name in names for link in (False, True)]
    return [lane for lane in order if lane in used]


def timeline_data(events: Sequence[Event], names: Sequence[str], latency_seconds: float) -> dict[str, Any]:
    """Return {"lanes": [label], "labels": [text], "kinds": [name], "events": [[lane, kind, begin, end, label, …]],
    "end": of the pass}.

    Seconds have nine significant digits. `stage`, `micro-batch`, `source` and `bytes` follow where there are any.
    """
    folded = fold(events, MOST_EVENTS)
    lanes = lanes_of(folded, names)
    lane_number = {lane: i for i, lane in enumerate(lanes)}
    labels: dict[str, int] = {}
    kinds: dict[str, int] = {}
    rows = []
    for event in folded:
        row: list[Any] = [
            lane_number[lane_of(event)],
            kinds.setdefault(event.kind, len(kinds)),
            float(f"{event.begin_seconds:.9g}"),
            float(f"{event.end_seconds:.9g}"),
            labels.setdefault(event.label, len(labels)),
        ]
        if event.stage >= 0 or event.microbatch >= 0 or event.source or event.nbytes:
            row += [event.stage, event.microbatch, labels.setdefault(event.source, len(labels)), event.nbytes]
        rows.append(row)
    return {
        "lanes": [f"→ {name}" if link else name for name, link in lanes],
        "labels": list(labels),
        "kinds": list(kinds),
        "events": rows,
        "end": max([latency_seconds, *(row[3] for row in rows)]),
    }


def fold(events: Sequence[Event], most: int) -> list[Event]:
    """Join neighbours of a lane under ever shorter module paths until there are few enough of them."""
    depth = max((event.label.count(".") + 1 for event in events), default=1)
    found = list(events)
    while len(found) > most and depth > 0:
        depth -= 1
        found = _joined(found, depth)
    return found


def _joined(events: Sequence[Event], depth: int) -> list[Event]:
    """Join events of one lane that follow each other, whose paths begin alike."""
    found: list[Event] = []
    last: dict[tuple[str, bool], int] = {}
    for event in events:
        short = event if event.kind in LINKS else replace(event, label=".".join(event.label.split(".")[:depth]))
        at = last.get(lane_of(event))
        before = found[at] if at is not None else None
        follows = before is not None and short.begin_seconds - before.end_seconds <= 1e-9 * before.end_seconds
        same = before is not None and replace(
            before, begin_seconds=short.begin_seconds, end_seconds=short.end_seconds
        ) == short  # fmt: skip
        if at is not None and follows and same and event.kind not in LINKS:
            found[at] = replace(found[at], end_seconds=short.end_seconds)
        else:
            last[lane_of(event)] = len(found)
            found.append(short)
    return found

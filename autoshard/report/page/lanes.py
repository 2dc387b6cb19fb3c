"""What happens when under a plan of any kind, and as compact data: lanes, and events that refer to them by number."""

from collections.abc import Sequence
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import Event
from autoshard.engine.events import LINKS, events
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.search.study import Study

MOST_DRAWN = 20_000


def events_of(
    plan: Plan, profile: Profile, cluster: Cluster, study: Study | None, most: int = MOST_DRAWN
) -> tuple[Sequence[Event], str]:
    """Return what happens in a pass, and in words what was left out; of equal ranks the first is followed."""
    if study is not None:
        return _played(study, most)
    found = events(plan, profile, cluster)
    if len(found) <= most:
        return found, ""
    least = sorted((event.end_seconds - event.begin_seconds for event in found), reverse=True)[most - 1]
    longest = [event for event in found if event.end_seconds - event.begin_seconds >= least]
    return longest, f"Of {len(found)} events the {len(longest)} longest are drawn."


def _played(study: Study, most: int) -> tuple[list[Event], str]:
    """The played step on the first device of every class of ranks, of fewer classes where they are many."""
    played, stretch = study.played()
    names = [rank.first for rank in study.estimate.ranks]
    said = [] if abs(stretch - 1) < 0.0005 else [
        f"The order of the micro-batches, played by the clock, is stretched by {stretch - 1:+.1%} to the price."
    ]  # fmt: skip
    own = [event for event in played if event.device in names]
    if len(own) > most:
        kept = max(2, most * len(names) // len(own))
        some = {names[round(at * (len(names) - 1) / (kept - 1))] for at in range(kept)}
        own = [event for event in own if event.device in some]
        said.append(f"{len(some)} of {len(names)} classes of ranks are drawn.")
    return own, " ".join(said)


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
    lanes = lanes_of(events, names)
    lane_number = {lane: i for i, lane in enumerate(lanes)}
    labels: dict[str, int] = {}
    kinds: dict[str, int] = {}
    rows = []
    for event in events:
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

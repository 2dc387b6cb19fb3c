"""Events in the trace format of Chrome and Perfetto: JSON that ui.perfetto.dev and chrome://tracing open.

One process per machine, one thread per device and one for the links into it; times in microseconds. The format is that
of "Trace Event Format" (Google, 2016): complete events ("X") and metadata ("M").
"""

from collections.abc import Sequence
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import Event
from autoshard.report.page.lanes import lane_of, lanes_of

MICROSECONDS = 1e6


def trace_document(
    events: Sequence[Event], cluster: Cluster, *, title: str = "", measured: Sequence[Event] = ()
) -> dict[str, Any]:
    """Return a trace of a predicted pass as plain data; `measured`: of a real one, as processes beside it."""
    rows = trace_events(events, cluster)
    if measured:
        first = 1 + max(row["pid"] for row in rows)
        rows += trace_events(measured, cluster, what="measured", first_process=first)
    return {
        "traceEvents": rows,
        "displayTimeUnit": "ms",
        "otherData": {"title": title, "made by": "autoshard"},
    }


def trace_events(
    events: Sequence[Event], cluster: Cluster, *, what: str = "predicted", first_process: int = 1
) -> list[dict[str, Any]]:
    """Return metadata of every process and thread, then the events. Processes are numbered from `first_process`."""
    hosts = {name: i for i, name in enumerate(dict.fromkeys(device.host for device in cluster.devices), first_process)}
    process = {device.name: hosts[device.host] for device in cluster.devices}
    found: list[dict[str, Any]] = []
    for host, number in hosts.items():
        found.append(_named("process_name", number, 0, name=f"{host}, {what}"))
    threads: dict[tuple[str, bool], int] = {}
    for lane in lanes_of(events, cluster.names):
        threads[lane] = len(threads) + 1
        name, link = lane
        where = process[name], threads[lane]
        found.append(_named("thread_name", *where, name=f"to {name}" if link else name))
        found.append(_named("thread_sort_index", *where, sort_index=threads[lane]))
    for event in events:
        sizes = {"bytes": event.nbytes, "from": event.source}
        numbers = {"stage": event.stage, "micro-batch": event.microbatch}
        found.append({
            "ph": "X", "name": _label(event), "cat": event.kind,
            "pid": process[event.device], "tid": threads[lane_of(event)],
            "ts": event.begin_seconds * MICROSECONDS,
            "dur": (event.end_seconds - event.begin_seconds) * MICROSECONDS,
            "args": {"kind": event.kind, "module": event.label}
            | {name: value for name, value in sizes.items() if value}
            | {name: number for name, number in numbers.items() if number >= 0},
        })  # fmt: skip
    return found


def _label(event: Event) -> str:
    if event.microbatch >= 0:
        return f"{event.kind} {event.microbatch}"
    return event.label or event.kind


def _named(kind: str, process: int, thread: int, **arguments: str | int) -> dict[str, Any]:
    """A metadata event."""
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": arguments}

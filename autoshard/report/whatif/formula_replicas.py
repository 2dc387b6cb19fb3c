"""Plans of replicas at other sizes; `page/formula_replicas.js` is the same, line by line. See `replica_cost`."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.report.whatif.formula import (
    copies,
    launches_of,
    op_seconds,
    polynomial,
    result,
    rows_of,
    seconds_of,
    sum_of,
)


def replicated(planned: Mapping[str, Any], values: Sequence[float], scale: float) -> dict[str, Any]:
    """Return what `predict` does; the batch is `scale` times the plan's."""
    size, count = planned["size"] * scale, len(planned["replicas"])
    devices = [[name, 0.0, memory, 0.0] for name, memory, _ in planned["names"]]
    slowest, launching, moving, fastest = 0.0, 0.0, 0.0, float("inf")
    parts = [rows / size for rows in rows_of(size, count, planned["shares"])]
    columns = [[*values, *(part * value for value in values)] for part in parts]
    for index, number in enumerate(planned["replicas"]):
        figures = planned["figures"][number]
        rates = planned["rates"][figures["rates"]]
        own = op_seconds(planned, columns[index], rates)
        busy = sum_of(figures["ops"], own) + figures["optimizer"] / planned["over"] / rates["bandwidth"]
        launching += launches_of(figures["ops"], own) * rates["launch"]
        slowest, fastest = max(slowest, busy), min(fastest, busy)
        place = planned["devices"][index]
        device = devices[place]
        device[1] = _peak(planned, figures, columns[index], parts[index]) + planned["names"][place][2]
        device[3] = busy
    for index, row in planned["transfers"]:
        moving += copies(planned["links"], [row], columns[index])
    if not planned["processes"]:
        slowest = max(slowest, launching)
    latency = slowest + _exposed(planned, columns[0], fastest) + moving
    return result(devices, latency, latency)


def resized(planned: Mapping[str, Any], hardware: Mapping[str, Any], count: int) -> dict[str, Any]:
    """The same for another number of replicas, all alike and in one machine."""
    link = [hardware["delay"], hardware["link"], 1]
    port = [hardware["delay"], hardware["link"] / max(count - 1, 1), max(count - 1, 1)]
    alone, first, adds, rest = planned["others"]
    replicas = [alone] if count == 1 else [first]
    for index in range(1, count):
        replicas.append(adds if index % 2 == 1 and index + 1 < count else rest)
    levels = 0
    while 2**levels < count:
        levels += 1
    ring = (1 if planned["sharded"] else 2) * (count - 1)
    ways = [[ring, ring / count, 0], [1, 1 / count if planned["sharded"] else 1, 1]]
    if not planned["sharded"]:
        ways.append([2 * levels, 2, 0])
    return {
        **planned,
        "names": [[f"device {index}", hardware["memory"], hardware["overhead"]] for index in range(count)],
        "devices": list(range(count)),
        "shares": [],
        "replicas": replicas,
        "over": count if planned["sharded"] else 1,
        "rates": [hardware for _ in planned["rates"]],
        "links": [link, port],
        "exchange": [[times, ["min", *ways], nbytes] for times, _, nbytes in planned["exchange"]] if count > 1 else [],
        "transfers": [[index, [0, 1, terms]] for index in range(1, count) for terms in planned["moved"]],
    }


def _exposed(planned: Mapping[str, Any], columns: Sequence[float], fastest: float) -> float:
    """Seconds of what is exchanged that don't hide behind computing."""
    if not planned["exchange"]:
        return 0.0
    seconds, first = 0.0, 0.0
    for number, (times, cost, nbytes) in enumerate(planned["exchange"]):
        one = seconds_of(planned["links"], cost, nbytes)
        seconds += times * one
        first = one if number == 0 else first
    total = polynomial(planned["flops"][0], columns)
    backward = polynomial(planned["flops"][1], columns) / total if total > 0 else 0.5
    hidden = fastest if planned["sharded"] else backward * fastest if planned["processes"] else 0.0
    return first + max(0.0, seconds - first - hidden)


def _peak(planned: Mapping[str, Any], figures: Mapping[str, Any], columns: Sequence[float], part: float) -> float:
    """Most bytes of a replica; see `replica_cost.Figures`."""
    live, cache, gradient, over = 0.0, 0.0, 0.0, planned["over"]
    for moment in figures["moments"]:
        here = polynomial(moment[0], columns)
        if planned["sharded"]:
            here += polynomial(moment[2], columns) / over
        if here > live:
            live, cache, gradient = here, polynomial(moment[1], columns), polynomial(moment[2], columns)
    used, transfer, whole = live, 0.0, figures["gradient"] / over
    if figures["stays"]:
        used = live - gradient + whole
    if figures["first"]:
        inputs, outputs = polynomial(figures["inputs"], columns), polynomial(figures["outputs"], columns)
        caches, largest = (polynomial(one, columns) for one in figures["caches"])
        transfer = (1.0 - part) * (inputs + (outputs if planned["training"] else 0.0))
        transfer += caches if planned["training"] else 0.0
        after = polynomial(figures["after"], columns) - part * (inputs + outputs) - cache
        merging = (max(0.0, after) if planned["training"] else 0.0) + inputs + 2.0 * outputs
        merging += caches + (1.0 - part) * largest
        if merging > used - cache + transfer:
            used, transfer = merging + cache, 0.0
    left = polynomial(figures["left"], columns)
    if figures["adding"] >= 0:
        used = max(used, whole + left + figures["adding"])
    if figures["step"] >= 0 and whole + left + figures["step"] / over > used + transfer:
        used, transfer = whole + left + figures["step"] / over, 0.0
    return float(used + transfer + figures["divided"] / over + figures["buffer"] + figures["always"])

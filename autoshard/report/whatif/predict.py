"""The formula of the page's sliders. `page/whatif.js` is the same, line by line; a test holds both equal."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.report.whatif.formula import (
    collectives,
    copies,
    largest,
    monomials,
    op_seconds,
    polynomial,
    result,
    sum_of,
)
from autoshard.report.whatif.formula_replicas import replicated, resized
from autoshard.report.whatif.formula_stages import staged
from autoshard.report.whatif.formula_streams import streamed

BISECTIONS = 40


def predict(
    data: Mapping[str, Any],
    batch: float,
    sequence: float,
    new_tokens: float,
    kind: str = "",
    count: int = 0,
) -> dict[str, Any]:
    """Return {"devices": [[name, peak, memory, seconds]], "latency", "bottleneck", "fits"}.

    `kind` and `count`: other devices, one of `data["hardware"]`. The plan keeps its division where as many devices are
    left and it divides more than modules, and replicas for every number; else the model is split anew.
    """
    values = monomials(data, batch, sequence, sequence + new_tokens)
    chosen = next((row for row in data["hardware"] if row["name"] == kind), data["hardware"][0])
    planned, scale = data["planned"], batch / data["sizes"][0]
    if kind or count:
        if not _keeps_division(data, count, batch):
            return _split_anew(data, values, chosen, count or data["devices"])
        if count not in (0, data["devices"]):
            planned = resized(planned, chosen, count)
        elif kind:
            planned = _elsewhere(planned, chosen)
    if planned["way"] == "stages":
        return staged(planned, values, scale)
    return replicated(planned, values, scale) if planned["way"] == "replicas" else _placed(data, planned, values)


def _keeps_division(data: Mapping[str, Any], count: int, batch: float) -> bool:
    """Whether the plan's own division is there for so many devices of some kind."""
    planned = data["planned"]
    if count in (0, data["devices"]):
        return planned["way"] != "placed" or "stream" in planned
    return planned["way"] == "replicas" and count <= planned["size"] * batch / data["sizes"][0]


def _elsewhere(planned: Mapping[str, Any], hardware: Mapping[str, Any]) -> dict[str, Any]:
    """The same division over devices of another kind, all in one machine; stores stay as far away as they are."""
    links = [
        [hardware["delay"], hardware["link"] / shared, shared] if shared > 0 else [delay, rate, shared]
        for delay, rate, shared in planned["links"]
    ]
    if planned["way"] in ("ranks", "placed"):
        devices = [{**row, **hardware, "name": row["name"]} if row["ops"] else row for row in planned["devices"]]
        return {**planned, "links": links, "devices": devices}
    names = [[name, hardware["memory"], hardware["overhead"]] for name, _, _ in planned["names"]]
    return {**planned, "links": links, "names": names, "rates": [hardware for _ in planned["rates"]]}


def _placed(data: Mapping[str, Any], planned: Mapping[str, Any], values: Sequence[float]) -> dict[str, Any]:
    """Modules where the plan has them, or their parameters cut over ranks; some may be streamed."""
    links, devices, every = planned["links"], [], []
    kinds, values = planned if "table" in planned else data, [*values, *values]
    latency, incoming = 0.0, [0.0] * len(planned["devices"])
    for target, *row in planned["transfers"]:
        seconds = copies(links, [row], values)
        incoming[target] += seconds
        latency += seconds
    bottleneck, slowest = 0.0, 0.0
    for number, device in enumerate(planned["devices"]):
        own = op_seconds(kinds, values, device)
        every.append(own)
        seconds = sum_of(device["ops"], own) + device["optimizer"] / device["bandwidth"]
        peak = largest(device["front"], values)
        peak = peak + device["always"] + device["overhead"] if peak > 0 or device["always"] > 0 else 0.0
        devices.append([device["name"], peak, device["memory"], seconds])
        latency += seconds
        bottleneck = max(bottleneck, seconds + incoming[number])
        slowest = max(slowest, streamed(device["stream"], links, values, [own])[0] if "stream" in device else seconds)
    if planned["collectives"] is not None:  # ranks work at the same time
        latency = slowest + collectives(links, planned["collectives"], values)
        bottleneck = latency
    if "stream" in planned:
        latency, busiest = streamed(planned["stream"], links, values, every)
        bottleneck = max(bottleneck, busiest)
    return result(devices, latency, bottleneck)


def _split_anew(
    data: Mapping[str, Any], values: Sequence[float], hardware: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Divide the units, in order, so that the fullest device is as empty as it can be."""
    kinds = []
    seconds = op_seconds(data, values, hardware)
    for unit in data["units"]["kinds"]:
        busy = sum_of(unit["ops"], seconds) + unit["optimizer"] / hardware["bandwidth"]
        copies, terms = unit["out"]
        kinds.append(
            (polynomial(unit["held"], values), largest(unit["front"], values), busy, copies,
             polynomial(terms, values))
        )  # fmt: skip
    order = [kinds[number] for number in data["units"]["order"]]
    low, high = 0.0, 0.0
    for held, transient, _, _, out in order:
        low = max(low, held + transient)
        high += held + transient + out
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if len(_packed(order, middle)) <= count:
            high = middle
        else:
            low = middle
    devices, latency, bottleneck = [], 0.0, 0.0
    parts = _packed(order, high)
    for number, (first, end) in enumerate(parts):
        held, transient, busy, incoming, came = 0.0, 0.0, 0.0, 0.0, 0.0
        if first > 0:
            came = order[first - 1][4]
            incoming = order[first - 1][3] * hardware["delay"] + came / hardware["link"]
        for unit in order[first:end]:
            held += unit[0]
            transient = max(transient, unit[1])
            busy += unit[2]
        peak = held + transient + came + hardware["overhead"]
        devices.append([f"device {number}", peak, hardware["memory"], busy])
        latency += busy + incoming
        bottleneck = max(bottleneck, busy + incoming)
    for number in range(len(parts), count):
        devices.append([f"device {number}", 0.0, hardware["memory"], 0.0])
    return result(devices, latency, bottleneck)


def _packed(order: Sequence[tuple[float, float, float, int, float]], limit: float) -> list[tuple[int, int]]:
    """Fill devices one after another up to a limit: (first unit, end) of each."""
    parts = []
    first, held, transient, came = 0, 0.0, 0.0, 0.0
    for i, unit in enumerate(order):
        if i > first and held + unit[0] + max(transient, unit[1]) + came > limit:
            parts.append((first, i))
            first, held, transient, came = i, 0.0, 0.0, order[i - 1][4]
        held += unit[0]
        transient = max(transient, unit[1])
    return [*parts, (first, len(order))]

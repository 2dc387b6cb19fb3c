"""The formula of the page's sliders. `page/whatif.js` is the same, line by line; a test holds both equal.

    seconds of an op    max(FLOPs / rate, bytes / bandwidth) + launch, where there is anything to do
    bytes of a device   the largest of the moments that may be the fullest, + what is always there

FLOPs and bytes are polynomials in the batch, the sequence and the length of the cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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

    `kind` and `count`: other devices, one of `data["hardware"]`; the model is then split anew. Without them it is the
    plan's own division, if there is one.
    """
    values = _values(data, batch, sequence, sequence + new_tokens)
    if not kind and not count and data["planned"]:
        return _planned(data, values)
    chosen = next((row for row in data["hardware"] if row["name"] == kind), data["hardware"][0])
    return _split_anew(data, values, chosen, count or data["devices"])


def _values(data: Mapping[str, Any], batch: float, sequence: float, total: float) -> list[float]:
    """The value of every monomial."""
    return [batch**i * sequence**j * total**k if not many or batch > 1 else 0.0 for i, j, k, many in data["monomials"]]


def _polynomial(terms: Sequence[float], values: Sequence[float]) -> float:
    """Terms are column, coefficient, column, coefficient …"""
    total = 0.0
    for i in range(0, len(terms), 2):
        total += terms[i + 1] * values[int(terms[i])]
    return total


def _largest(front: Sequence[Sequence[float]], values: Sequence[float]) -> float:
    most = 0.0
    for terms in front:
        most = max(most, _polynomial(terms, values))
    return most


def _op_seconds(data: Mapping[str, Any], values: Sequence[float], device: Mapping[str, Any]) -> list[float]:
    """Seconds of every kind of op on a device."""
    amounts = [_polynomial(terms, values) for terms in data["table"]]
    found = []
    for flops, moved, dtype in data["ops"]:
        busy = max(amounts[flops] / device["flops"][dtype], amounts[moved] / device["bandwidth"])
        found.append(busy + device["launch"] if amounts[flops] > 0 or amounts[moved] > 0 else 0.0)
    return found


def _sum(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Counts are kind of op, how many, kind of op, how many …"""
    total = 0.0
    for i in range(0, len(counts), 2):
        total += seconds[counts[i]] * counts[i + 1]
    return total


def _planned(data: Mapping[str, Any], values: Sequence[float]) -> dict[str, Any]:
    devices = []
    latency, incoming = 0.0, [0.0] * len(data["planned"]["devices"])
    for target, delay, bandwidth, count, terms in data["planned"]["transfers"]:
        seconds = count * delay + _polynomial(terms, values) / bandwidth
        incoming[target] += seconds
        latency += seconds
    bottleneck, slowest = 0.0, 0.0
    for number, device in enumerate(data["planned"]["devices"]):
        seconds = _sum(device["ops"], _op_seconds(data, values, device)) + device["optimizer"] / device["bandwidth"]
        peak = _largest(device["front"], values)
        peak = peak + device["always"] if peak > 0 or device["always"] > 0 else 0.0
        devices.append([device["name"], peak, device["memory"], seconds])
        latency += seconds
        bottleneck = max(bottleneck, seconds + incoming[number])
        slowest = max(slowest, seconds)
    if data["planned"]["collectives"] is not None:  # ranks work at the same time
        latency = slowest + _collectives(data["planned"]["collectives"], values)
        bottleneck = latency
    return _result(devices, latency, bottleneck)


def _collectives(rows: Sequence[Sequence[Any]], values: Sequence[float]) -> float:
    """Seconds of all of them: each in its cheapest way, as long as the slowest link takes."""
    total = 0.0
    for count, ways, terms in rows:
        nbytes = _polynomial(terms, values)
        best = float("inf")
        for lines in ways:
            slowest = 0.0
            for delay, per_byte in lines:
                slowest = max(slowest, delay + per_byte * nbytes)
            best = min(best, slowest)
        total += count * best
    return total


def _split_anew(
    data: Mapping[str, Any], values: Sequence[float], hardware: Mapping[str, Any], count: int
) -> dict[str, Any]:
    """Divide the units, in order, so that the fullest device is as empty as it can be."""
    kinds = []
    seconds = _op_seconds(data, values, hardware)
    for unit in data["units"]["kinds"]:
        busy = _sum(unit["ops"], seconds) + unit["optimizer"] / hardware["bandwidth"]
        copies, terms = unit["out"]
        kinds.append(
            (_polynomial(unit["held"], values), _largest(unit["front"], values), busy, copies,
             _polynomial(terms, values))
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
    return _result(devices, latency, bottleneck)


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


def _result(devices: list[list[Any]], latency: float, bottleneck: float) -> dict[str, Any]:
    fits = all(peak <= memory for _, peak, memory, _ in devices)
    return {"devices": devices, "latency": latency, "bottleneck": bottleneck, "fits": fits}

"""What all formulas of the sliders are made of; `page/formula.js` is the same, line by line.

    seconds of an op    max(FLOPs / rate, bytes / bandwidth) + launch, where there is anything to do
    bytes of a device   the largest of the moments that may be the fullest, + what is always there

FLOPs and bytes are polynomials in the batch, the sequence and the length of the cache.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.sharding import shares_of


def monomials(data: Mapping[str, Any], batch: float, sequence: float, total: float) -> list[float]:
    """The value of every monomial."""
    return [batch**i * sequence**j * total**k if not many or batch > 1 else 0.0 for i, j, k, many in data["monomials"]]


def polynomial(terms: Sequence[float], values: Sequence[float]) -> float:
    """Terms are column, coefficient, column, coefficient …"""
    total = 0.0
    for i in range(0, len(terms), 2):
        total += terms[i + 1] * values[int(terms[i])]
    return total


def largest(front: Sequence[Sequence[float]], values: Sequence[float]) -> float:
    """The most that any of some polynomials is, and at least 0."""
    most = 0.0
    for terms in front:
        most = max(most, polynomial(terms, values))
    return most


def op_seconds(data: Mapping[str, Any], values: Sequence[float], device: Mapping[str, Any]) -> list[float]:
    """Seconds of every kind of op on a device."""
    amounts = [polynomial(terms, values) for terms in data["table"]]
    found = []
    for flops, moved, dtype in data["ops"]:
        busy = max(amounts[flops] / device["flops"][dtype], amounts[moved] / device["bandwidth"])
        found.append(busy + device["launch"] if amounts[flops] > 0 or amounts[moved] > 0 else 0.0)
    return found


def sum_of(counts: Sequence[int], seconds: Sequence[float]) -> float:
    """Counts are kind of op, how many, kind of op, how many …"""
    total = 0.0
    for i in range(0, len(counts), 2):
        total += seconds[counts[i]] * counts[i + 1]
    return total


def launches_of(counts: Sequence[int], seconds: Sequence[float]) -> int:
    """How many of these ops there is anything to do for."""
    total = 0
    for i in range(0, len(counts), 2):
        total += counts[i + 1] if seconds[counts[i]] > 0 else 0
    return total


def seconds_of(links: Sequence[Sequence[float]], cost: Sequence[Any], nbytes: float) -> float:
    """Seconds of an expression of `links.Links` for so many bytes."""
    if cost and not isinstance(cost[0], str):
        times, part, link = cost
        return float(times * links[link][0] + part * nbytes / links[link][1])
    parts = [seconds_of(links, one, nbytes) for one in cost[1:]]
    if not parts:
        return 0.0
    return max(parts) if cost[0] == "max" else min(parts) if cost[0] == "min" else sum(parts)


def collectives(links: Sequence[Sequence[float]], rows: Sequence[Sequence[Any]], values: Sequence[float]) -> float:
    """Seconds of all of them, one after another: [how many, cost, bytes] each."""
    total = 0.0
    for count, cost, terms in rows:
        total += count * seconds_of(links, cost, polynomial(terms, values))
    return total


def copies(links: Sequence[Sequence[float]], rows: Sequence[Sequence[Any]], values: Sequence[float]) -> float:
    """Seconds of copies over links: [link, how many, bytes of all] each."""
    total = 0.0
    for link, count, terms in rows:
        total += count * links[link][0] + polynomial(terms, values) / links[link][1]
    return total


def rows_of(size: float, count: int, shares: Sequence[int]) -> tuple[int, ...]:
    """Rows of a batch for each of so many replicas, evenly or in these shares."""
    return shares_of(int(size), count, shares)


def result(devices: list[list[Any]], latency: float, bottleneck: float) -> dict[str, Any]:
    """Put together what `predict` returns."""
    fits = all(peak <= memory for _, peak, memory, _ in devices)
    return {"devices": devices, "latency": latency, "bottleneck": bottleneck, "fits": fits}

"""Seconds of collectives and copies as expressions over links, for `formula.seconds_of`.

[n, f, link]              n times the latency of a link, and f bytes over it for each that is given
["max", one, other, …]    also "min" and "sum"

They say what `collective_cost` computes.
"""

from collections.abc import Sequence
from math import ceil, log2
from typing import Any

from autoshard.cluster.cluster import Cluster, Pace
from autoshard.stream_cost import STORES

Expression = list[Any]


class Links:
    """The links that a page knows, as [latency, bytes per second, shared by], those that are equal once.

    A rate is what one of so many copies at a time has together; 0 for what no other device would change.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.rows: list[list[float]] = []

    def of(self, cluster: Cluster) -> "Links":
        """The same numbers for links of another cluster, as one rank sees it."""
        other = Links(cluster)
        other.rows = self.rows
        return other

    def between(self, source: str, destination: str) -> int:
        """Number of the link from a device to another."""
        link = self.cluster.link(source, destination)
        return self._number((link.latency_seconds, link.bytes_per_second), 0 if source in STORES else 1)

    def all_reduce(self, names: Sequence[str]) -> Expression:
        """Of the sum of so many bytes of each device; see `collective_cost.all_reduce_seconds`."""
        flat = self._all_reduce(names)
        machines = self.cluster.among(names).machines
        if len(machines) in (1, len(names)):
            return flat
        inside = ["max", *(self._all_reduce(machine) for machine in machines)]
        spread = ["max", *(self._broadcast(machine) for machine in machines)]
        return ["min", flat, ["sum", inside, self._all_reduce([machine[0] for machine in machines]), spread]]

    def all_gather(self, names: Sequence[str]) -> Expression:
        """Of a tensor of so many bytes, of which each device has a part; see `collective_cost.all_gather_seconds`."""
        count = len(names)
        if count < 2:
            return ["sum"]
        links = self.cluster.among(names)
        ring = self._slowest(links.ring, count - 1, (count - 1) / count)
        return ["min", ring, self._slowest(links.incoming, 1, 1 / count, count - 1)]

    def _all_reduce(self, names: Sequence[str]) -> Expression:
        count = len(names)
        if count < 2:
            return ["sum"]
        links = self.cluster.among(names)
        ring = self._slowest(links.ring, 2 * (count - 1), 2 * (count - 1) / count)
        tree = self._slowest(links.every, 2 * ceil(log2(count)), 2)
        return ["min", ring, tree, self._slowest(links.incoming, 1, 1, count - 1)]

    def _broadcast(self, names: Sequence[str]) -> Expression:
        if len(names) < 2:
            return ["sum"]
        return self._slowest(self.cluster.among(names).every, ceil(log2(len(names))), 1)

    def _slowest(self, paces: Sequence[Pace], times: float, part: float, shared: int = 1) -> Expression:
        return ["max", *([times, part, self._number(pace, shared)] for pace in paces)]

    def _number(self, pace: Pace, shared: int) -> int:
        row = [*pace, shared]
        if row not in self.rows:
            self.rows.append(row)
        return self.rows.index(row)

"""Seconds of collectives over a set of devices, from the links between them.

A copy of n bytes takes a + n / B (latency and bandwidth: the model of Hockney). For p devices, n bytes of the whole:

    all-reduce    ring        2 (p - 1) (a + n / p / B)           few bytes at a time: best for much
                  tree        2 ceil(log2 p) a + 2 n / B          halves of a binary tree, in a pipeline
                  one shot    a + (p - 1) n / B                   everybody reads everything: best for little
                  by machine  inside every machine, then one device of each, then inside again
    all-gather    ring        (p - 1) (a + n / p / B)
                  one shot    a + (p - 1) n / p / B

Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4; one shot
as in the direct all-to-all there. The links differ, so every step takes as long as the slowest link in use, a ring goes
from machine to machine in the order of the devices, and what comes in from several devices shares the receiver's port.
The cheapest counts. How it is carried out is up to torch.distributed.
"""

from collections.abc import Sequence
from itertools import permutations
from math import ceil, log2

from autoshard.cluster.cluster import Cluster, Link


def all_reduce_seconds(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """Return the seconds until each of the devices has the sum of `nbytes` bytes of all; 0 for one device."""
    flat = _all_reduce(cluster, names, nbytes)
    machines = list(_machines(cluster, names).values())
    if len(machines) in (1, len(names)):
        return flat
    inside = max(_all_reduce(cluster, machine, nbytes) for machine in machines)
    leaders = [machine[0] for machine in machines]
    spread = max(_broadcast(cluster, machine, nbytes) for machine in machines)
    return min(flat, inside + _all_reduce(cluster, leaders, nbytes) + spread)


def all_gather_seconds(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """Return the seconds until each of the devices has a tensor of `nbytes` bytes, of which each has an equal part."""
    count = len(names)
    if count < 2:
        return 0.0
    ring = (count - 1) * _slowest(_ring(cluster, names), nbytes / count)
    return min(ring, _one_shot(cluster, names, nbytes / count))


def _all_reduce(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    count = len(names)
    if count < 2:
        return 0.0
    ring = 2 * (count - 1) * _slowest(_ring(cluster, names), nbytes / count)
    links = [cluster.link(a, b) for a, b in permutations(names, 2)]
    levels = ceil(log2(count))
    tree = max(2 * levels * link.latency_seconds + 2 * nbytes / link.bytes_per_second for link in links)
    return min(ring, tree, _one_shot(cluster, names, nbytes))


def _one_shot(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """Everybody reads `nbytes` from everybody else."""

    def receive(name: str) -> float:
        links = [cluster.link(other, name) for other in names if other != name]
        return max(link.latency_seconds for link in links) + sum(nbytes / link.bytes_per_second for link in links)

    return max(map(receive, names))


def _broadcast(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """From the first device to the others, in a pipelined tree."""
    if len(names) < 2:
        return 0.0
    levels = ceil(log2(len(names)))
    links = [cluster.link(a, b) for a, b in permutations(names, 2)]
    return max(levels * link.latency_seconds + nbytes / link.bytes_per_second for link in links)


def _ring(cluster: Cluster, names: Sequence[str]) -> list[Link]:
    """The links from each device to the next, machine by machine, and back to the first."""
    order = [name for machine in _machines(cluster, names).values() for name in machine]
    return [cluster.link(a, b) for a, b in zip(order, [*order[1:], order[0]], strict=True)]


def _machines(cluster: Cluster, names: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(cluster.device(name).host, []).append(name)
    return found


def _slowest(links: Sequence[Link], nbytes: float) -> float:
    return max(link.seconds(nbytes) for link in links)

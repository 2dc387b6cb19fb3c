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
from math import ceil, log2

from autoshard.cluster.cluster import Cluster, Pace


def all_reduce_seconds(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """Return the seconds until each of the devices has the sum of `nbytes` bytes of all; 0 for one device."""
    flat = _all_reduce(cluster, names, nbytes)
    machines = cluster.among(names).machines
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
    links = cluster.among(names)
    ring = (count - 1) * _slowest(links.ring, nbytes / count)
    return min(ring, _slowest(links.incoming, nbytes / count))


def _all_reduce(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    count = len(names)
    if count < 2:
        return 0.0
    links = cluster.among(names)
    ring = 2 * (count - 1) * _slowest(links.ring, nbytes / count)
    tree = 2 * _slowest(links.every, nbytes, ceil(log2(count)))
    return min(ring, tree, _slowest(links.incoming, nbytes))


def _broadcast(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """From the first device to the others, in a pipelined tree."""
    if len(names) < 2:
        return 0.0
    return _slowest(cluster.among(names).every, nbytes, ceil(log2(len(names))))


def _slowest(links: Sequence[Pace], nbytes: float, levels: int = 1) -> float:
    """Seconds of `nbytes` over the slowest link, each of so many levels of a tree waiting for the one before."""
    return max(levels * latency + nbytes / rate for latency, rate in links)

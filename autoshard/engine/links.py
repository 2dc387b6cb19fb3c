"""Collectives over a set of devices of one process: their seconds, from the links between them; those of cuts.

A copy of n bytes takes a + n / B (latency and bandwidth: the model of Hockney). For p devices, n bytes of the whole:

    all-reduce    ring    2 (p - 1) (a + n / p / B)         best for much
                  tree    2 ceil(log2 p) a + 2 n / B        halves of a binary tree, in a pipeline: best for little
    all-gather    ring    (p - 1) (a + n / p / B)

Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4. Every
step takes as long as the slowest link in use; a ring goes from machine to machine. Plans for processes are priced by
`collectives`, level by level.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, log2

from autoshard.cluster.cluster import Cluster


def all_reduce_seconds(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """Return the seconds until each of the devices has the sum of `nbytes` bytes of all; 0 for one device."""
    count = len(names)
    if count < 2:
        return 0.0
    ring = 2 * (count - 1) * _slowest(cluster, names, nbytes / count)
    levels = ceil(log2(count))
    tree = max(2 * levels * latency + 2 * nbytes / rate for latency, rate in cluster.slowest_links(names))
    return min(ring, tree)


def all_gather_seconds(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    """Return the seconds until each of the devices has a tensor of `nbytes` bytes, of which each has an equal part."""
    if len(names) < 2:
        return 0.0
    return (len(names) - 1) * _slowest(cluster, names, nbytes / len(names))


def _slowest(cluster: Cluster, names: Sequence[str], nbytes: float) -> float:
    return max(latency + nbytes / rate for latency, rate in cluster.slowest_links(names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What ranks do together in a forward: a tensor is summed, or put together.

    `added`: so many tensors are put together to be added up, and `nbytes` is that of all; 0 for other collectives.
    """

    gathers: bool
    nbytes: int
    added: int = 0

    def seconds(self, cluster: Cluster, names: Sequence[str]) -> float:
        """Seconds of it over some devices."""
        return (all_gather_seconds if self.gathers else all_reduce_seconds)(cluster, names, self.nbytes)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensor that all ranks have then."""
        return self.nbytes // self.added if self.added else self.nbytes

    @property
    def backward(self) -> "Collective":
        """What backward does for it: sums where forward lets in, and the other way round."""
        return replace(self, gathers=False, nbytes=self.tensor_bytes, added=0) if self.added else self

"""Seconds of collectives over a group of ranks: latency once per step, and bytes over the bandwidth of each level.

For p ranks of which q are on each of h hosts, n bytes of the whole tensor. Rings go through every rank and cross each
host's boundary with q network cards in parallel (one per device):

    all-gather, reduce-scatter    n (p - 1) / p    over local_bandwidth, and over q x network_bandwidth
    all-reduce                    both of them one after the other
    all-to-all                    n / p x (p - 1) / p; what stays on the host locally, the rest over one card

Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH" (2005), section 4; rings
over several cards as in NCCL's documentation of its bus bandwidth.
"""

from dataclasses import dataclass
from math import ceil, log2

from autoshard.cluster.topology import Group, Topology
from autoshard.engine.efficiency import Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """A topology, and what collectives reach of its bandwidths."""

    topology: Topology
    reached: Efficiency

    @property
    def local(self) -> float:
        """Bytes per second of one device inside of its host, as collectives reach it."""
        return self.topology.local_bytes_per_second * self.reached.local

    @property
    def between(self) -> float:
        """Bytes per second of one device's part of the network, as collectives reach it."""
        reached = self.reached
        return min(self.topology.network_bytes_per_second * reached.network, reached.network_limit)

    def all_gather(self, group: Group, nbytes: float) -> float:
        """Seconds until each rank has a tensor of `nbytes` bytes, of which each has an equal part."""
        if group.size < 2 or not nbytes:
            return 0.0
        sent = nbytes * (group.size - 1) / group.size
        local = sent / self.local if group.per_host > 1 else 0.0
        between = sent / (self.between * group.per_host) if group.hosts > 1 else 0.0
        return self._latency(group) + max(local, between)

    reduce_scatter = all_gather

    def all_reduce(self, group: Group, nbytes: float) -> float:
        """Seconds until each rank has the sum of tensors of `nbytes` bytes: a ring for much, a tree for little."""
        if group.size < 2 or not nbytes:
            return 0.0
        ring = 2 * self.all_gather(group, nbytes)
        levels = ceil(log2(group.size))
        bytes_per_second = self.local if group.hosts == 1 else min(self.local, self.between * group.per_host)
        latency = self.topology.local_latency_seconds
        if group.hosts > 1:
            latency = max(latency, self.topology.network_latency_seconds)
        return min(ring, 2 * levels * latency + 2 * nbytes / bytes_per_second)

    def all_to_all(self, group: Group, nbytes: float) -> float:
        """Seconds until each rank has sent an equal part of its `nbytes` bytes to each other rank."""
        if group.size < 2 or not nbytes:
            return 0.0
        local = nbytes * (group.per_host - 1) / group.size / self.local
        between = nbytes * (group.size - group.per_host) / group.size / self.between
        return self._latency(group) + max(local, between)

    def send(self, nbytes: float, *, between_hosts: bool) -> float:
        """Seconds of a tensor from one rank to the next stage's."""
        topology = self.topology
        if between_hosts:
            return topology.network_latency_seconds + nbytes / self.between
        return topology.local_latency_seconds + nbytes / self.local

    def _latency(self, group: Group) -> float:
        """Of the steps of a ring: neighbours on a host, and one boundary for each host."""
        topology = self.topology
        local = (group.size - group.hosts) * topology.local_latency_seconds
        return local + (group.hosts * topology.network_latency_seconds if group.hosts > 1 else 0.0)

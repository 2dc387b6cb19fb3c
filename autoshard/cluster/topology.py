"""How the devices of a cluster are connected, level by level: a fast domain in each host, a network between.

    host 0  [0 1 2 3 4 5 6 7]──NVLink domain      host 1  [8 9 …]
             │ │ │ │ │ │ │ │  one NIC per device            │ │      network
             └─┴─┴─┴─┴─┴─┴─┴──────────────────────────────┴─┘

A group of ranks of one mesh dimension is described by its size and its stride: ranks r, r + stride, r + 2 stride, …
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.links import PEER_SECONDS, cards_of, make_links, table_row
from autoshard.errors import SpecError

THROUGH_HOST = 0.5
"""Of a card's host link, where cards copy through the host's memory while each sends and receives: on PCIe 4 x16 of 32
GB/s one direction reaches 20 to 22, both together 21 to 30 (`p2pBandwidthLatencyTest`, NVIDIA/nccl issue 814)."""
LEAST_LATENCY, LOCAL_LATENCY = 1e-6, 3e-6
SAME_MEMORY = 0.9
"""Devices are equal if the smallest has this part of the largest's memory: what is free differs a little."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Equal hosts of equal devices, and the bandwidth of each level, one direction, per device.

    Attributes:
        local_bytes_per_second: of one device to the others of its host, all of them together.
        network_bytes_per_second: of the part of the host's network that one device has.
        local_latency_seconds, network_latency_seconds: of one step of a collective on that level.
    """

    hosts: int
    devices_per_host: int
    local_bytes_per_second: float
    network_bytes_per_second: float
    local_latency_seconds: float = LOCAL_LATENCY
    network_latency_seconds: float = 5e-6

    def __post_init__(self) -> None:
        if self.hosts < 1 or self.devices_per_host < 1:
            raise SpecError("a cluster has at least one host with one device.")

    @property
    def devices(self) -> int:
        """How many devices there are in all."""
        return self.hosts * self.devices_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that communicate: how many, how many of them on one host, and how many hosts."""

    size: int
    per_host: int

    @property
    def hosts(self) -> int:
        """How many hosts the group spans."""
        return -(-self.size // self.per_host)


def group_of(topology: Topology, size: int, stride: int) -> Group:
    """The group of one mesh dimension: `size` ranks, `stride` apart in the order of the devices."""
    per_host = max(1, min(size, topology.devices_per_host // stride))
    return Group(size=size, per_host=per_host)


def computing_devices(cluster: Cluster) -> list[Device]:
    """Return the devices that ranks run on: the cards, or the CPUs where there are no cards."""
    return cards_of(cluster.devices) or [device for device in cluster.devices if device.kind != "disk"]


def unequal_reason(cluster: Cluster) -> str | None:
    """Say how the devices of a cluster differ; None if they are equal."""
    devices = computing_devices(cluster)
    kinds = list(dict.fromkeys(device.kind for device in devices))
    if len(kinds) > 1:
        return f"the devices are unequal: {' and '.join(kinds[:4])}"
    least, most = (pick(devices, key=lambda device: device.memory_bytes) for pick in (min, max))
    if least.memory_bytes < SAME_MEMORY * most.memory_bytes:
        return f"{least.name} has less memory than {most.name}"
    return None


def uneven_reason(cluster: Cluster) -> str | None:
    """Say why the devices of a cluster can't be ranks that hosts have equally many of; None if they can."""
    devices = computing_devices(cluster)
    if not devices:
        return "there is no device that computes"
    sizes = Counter(device.host for device in devices)
    if len(set(sizes.values())) > 1:
        few, many = min(sizes, key=lambda name: sizes[name]), max(sizes, key=lambda name: sizes[name])
        return f"{few} has {sizes[few]} devices and {many} has {sizes[many]}"
    changes = sum(one.host != other.host for one, other in pairwise(devices))
    if changes >= len(sizes):
        return "the devices of a host do not follow each other"
    return None


def topology_of(cluster: Cluster) -> Topology | None:
    """Return how devices are connected of which hosts have equally many; None where they have not (`uneven_reason`).

    The slowest links and the host with the slowest network count. Links that were measured or given scale what the
    hardware implies.
    """
    if uneven_reason(cluster) is not None:
        return None
    devices = computing_devices(cluster)
    hosts = [cluster.links.hosts[name] for name in dict.fromkeys(device.host for device in devices)]
    per_host = len(devices) // len(hosts)
    local, network = _known_parts(cluster, devices)
    peers = all(host.peer_links for host in hosts)
    network *= min(host.nic_bytes_per_second * min(1.0, host.nics / per_host) for host in hosts)
    return Topology(
        hosts=len(hosts),
        devices_per_host=per_host,
        local_bytes_per_second=min(_local_rate(kind, per_host, peers) for kind in {d.kind for d in devices}) * local,
        network_bytes_per_second=network,
        local_latency_seconds=_local_latency(cluster, devices),
        network_latency_seconds=max(LEAST_LATENCY, max(host.latency_seconds for host in hosts) - PEER_SECONDS),
    )


def _local_rate(kind: str, count: int, peer_links: bool) -> float:
    """Bytes per second of one device to all others of its host together."""
    row = table_row(kind)
    if peer_links and row.peer_link != "none" and (row.peer_topology != "pairs" or count <= 2):
        return min(row.peers_bytes_per_second, row.peer_bytes_per_second * max(1, count - 1))
    return row.host_bytes_per_second * THROUGH_HOST


def _local_latency(cluster: Cluster, devices: Sequence[Device]) -> float:
    """Seconds of a step of a collective in a host: between CPUs what is known of the loopback of their processes."""
    names = {device.name for device in devices if device.kind == "cpu"}
    known = (link for link in cluster.links.known.values() if {link.source, link.destination} <= names)
    return max((link.latency_seconds for link in known), default=LOCAL_LATENCY)


def _known_parts(cluster: Cluster, devices: Sequence[Device]) -> tuple[float, float]:
    """What known links reach of what the hardware implies, in a host and between hosts: the slowest."""
    usual = make_links(cluster.devices, tuple(cluster.links.hosts.values()))
    host = {device.name: device.host for device in devices}
    local: list[float] = []
    network: list[float] = []
    for link in cluster.links.known.values():
        if link.source in host and link.destination in host:
            part = link.bytes_per_second / usual.between(link.source, link.destination).bytes_per_second
            (local if host[link.source] == host[link.destination] else network).append(part)
    return min(local, default=1.0), min(network, default=1.0)

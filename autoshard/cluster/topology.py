"""How the devices of a cluster are connected, level by level: a fast domain in each host, a network between.

    host 0  [0 1 2 3 4 5 6 7]──NVLink domain      host 1  [8 9 …]
             │ │ │ │ │ │ │ │  one NIC per device            │ │      network
             └─┴─┴─┴─┴─┴─┴─┴──────────────────────────────┴─┘

A group of ranks of one mesh dimension is described by its size and its stride: ranks r, r + stride, r + 2 stride, …
"""

from dataclasses import dataclass

from autoshard.errors import SpecError


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
    local_latency_seconds: float = 2e-6
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

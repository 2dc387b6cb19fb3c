"""The link of every ordered pair of devices, from what the hardware table says about both ends.

same machine, both cards have a peer link    half of its two-way figure (mesh: of one pair's link)
same machine, no peer link                   through the host: the slower of the two host links
card and the machine's memory                the card's host link
anything and disk                            the disk, or the host link if that is slower
two machines                                 the network: assumed unless a cluster file says otherwise
two processes on the CPUs of one machine     its loopback (`between_processes`)
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from autoshard.cluster.cluster import Cluster, Device, Link
from autoshard.cluster.hardware import LINK_EFFICIENCY, hardware_table

# 200 Gbit/s, the usual network of a machine with eight cards: one adapter's rate, since one copy uses one adapter.
NETWORK_BYTES_PER_SECOND = 25e9 * LINK_EFFICIENCY
# Time of the smallest copy as torch issues it; assumed, `calibrate` measures it.
PEER_SECONDS = 10e-6
HOST_SECONDS = 15e-6
NETWORK_SECONDS = 30e-6
DISK_SECONDS = 100e-6
MEMORY_SECONDS = 2e-6

Rate = tuple[float, float]
"""bytes_per_second, latency_seconds"""
LOOPBACK: Rate = (1e9, 4e-4)
"""Between two processes, by gloo, on two EPYC cores: all-reduces of 4 B 0.3 to 0.5 ms, of 4 MiB 5 to 6."""


def make_links(
    devices: Sequence[Device], network: Rate = (NETWORK_BYTES_PER_SECOND, NETWORK_SECONDS)
) -> tuple[Link, ...]:
    """Return the link of every ordered pair, in device order."""
    slots = _slots(devices)
    links = []
    for a, device_a in enumerate(devices):
        for b, device_b in enumerate(devices):
            if a == b:
                continue
            if device_a.host != device_b.host:
                rate = network
            else:
                bridged = slots[a] // 2 == slots[b] // 2
                rate = _rate(device_a.kind, device_b.kind, bridged)
            links.append(
                Link(source=device_a.name, destination=device_b.name, bytes_per_second=rate[0], latency_seconds=rate[1])
            )
    return tuple(links)


def between_processes(cluster: Cluster) -> Cluster:
    """Return the cluster as it is where every device has a process of its own.

    CPUs of one machine then send through its loopback. What a cluster file says of them, or was measured, stays.
    """

    def is_assumed(link: Link) -> bool:
        ends = cluster.device(link.source), cluster.device(link.destination)
        rate = link.bytes_per_second, link.latency_seconds
        own = "cpu" in (link.source, link.destination)  # the memory that all of them share
        return not own and {end.kind for end in ends} == {"cpu"} and rate == _rate("cpu", "cpu", False)

    links = tuple(
        replace(link, bytes_per_second=LOOPBACK[0], latency_seconds=LOOPBACK[1]) if is_assumed(link) else link
        for link in cluster.links
    )
    return cluster if links == cluster.links else replace(cluster, links=links)


def _slots(devices: Sequence[Device]) -> list[int]:
    """Position of each device among those of its kind in its machine: a bridge joins 0-1, 2-3, ..."""
    seen: dict[tuple[str, str], int] = {}
    slots = []
    for device in devices:
        key = (device.host, device.kind)
        slots.append(seen.get(key, 0))
        seen[key] = slots[-1] + 1
    return slots


@cache
def _rate(kind_a: str, kind_b: str, bridged: bool) -> Rate:
    """Rate between two kinds in one machine; symmetric. Unknown kinds count as generic."""
    table = hardware_table()
    a, b = (table.get(kind, table["generic"]) for kind in (kind_a, kind_b))
    kinds = {a.name, b.name}
    if "disk" in kinds:
        other = b if a.name == "disk" else a
        nominal, latency = min(table["disk"].host_bytes_per_second, other.host_bytes_per_second), DISK_SECONDS
    elif kinds == {"cpu"}:
        return a.peer_bytes_per_second, MEMORY_SECONDS  # measured, not nominal
    elif "cpu" in kinds:
        nominal, latency = (b if a.name == "cpu" else a).host_bytes_per_second, HOST_SECONDS
    elif a.peer_link == b.peer_link != "none" and (a.peer_topology != "pairs" or bridged):
        nominal, latency = min(a.peer_bytes_per_second, b.peer_bytes_per_second), PEER_SECONDS
    else:
        nominal, latency = min(a.host_bytes_per_second, b.host_bytes_per_second), HOST_SECONDS
    return nominal * LINK_EFFICIENCY, latency

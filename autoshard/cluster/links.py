"""The link of every ordered pair of devices, from what the hardware table says about both ends.

same machine, both cards have a peer link    half of its two-way figure (mesh: of one pair's link)
same machine, no peer link                   through the host: the slower of the two host links
card and the machine's memory                the card's host link
anything and disk                            the disk, or the host link if that is slower
two machines                                 one network card: of a copy's two ends the slower one
two processes on the CPUs of one machine     its loopback (`Cluster.between_processes`)

A training node has one network card for each of its cards; in other machines all share one.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from autoshard.cluster.device import Device, Host, Link
from autoshard.cluster.hardware import LINK_EFFICIENCY, Hardware, hardware_table

ASSUMED_NIC_BYTES_PER_SECOND = 100e9 / 8
"""Of the one network card of a machine whose cards are not those of a training node."""
# Time of the smallest copy as torch issues it; assumed, `calibrate` measures it.
PEER_SECONDS = 10e-6
HOST_SECONDS = 15e-6
NETWORK_SECONDS = 15e-6
DISK_SECONDS = 100e-6
MEMORY_SECONDS = 2e-6

LinkRate = tuple[float, float]
"""Latency in seconds, and bytes per second."""
LOOPBACK: LinkRate = (4e-4, 1e9)
"""Between two processes, by gloo, on two EPYC cores: all-reduces of 4 B 0.3 to 0.5 ms, of 4 MiB 5 to 6."""
Pair = tuple[str, str]


class Links:
    """The link of every ordered pair of devices, worked out when it is asked for: hundreds have a million of them.

    Attributes:
        hosts: every host by its name.
        known: links that a file gives or that were measured, where the hardware implies others.
    """

    def __init__(self, devices: Sequence[Device], hosts: Mapping[str, Host], known: Mapping[Pair, Link]) -> None:
        self.hosts = dict(hosts)
        slots = _slots(devices)
        self._ends = {d.name: (d.host, d.kind, slot) for d, slot in zip(devices, slots, strict=True)}
        self.known: Mapping[Pair, Link] = {}
        self.known = {pair: link for pair, link in known.items() if link != self.between(*pair)}

    def between(self, source: str, destination: str) -> Link:
        """The link of one pair; raises `KeyError` if there is none."""
        latency, rate = self.rate(source, destination)
        return Link(source=source, destination=destination, bytes_per_second=rate, latency_seconds=latency)

    def rate(self, source: str, destination: str) -> LinkRate:
        """Latency and bytes per second of one pair; raises `KeyError` if there is none."""
        known = self.known.get((source, destination))
        if known is not None:
            return known.latency_seconds, known.bytes_per_second
        if source == destination:
            raise KeyError((source, destination))
        (host, kind, slot), (other_host, other_kind, other_slot) = self._ends[source], self._ends[destination]
        if host != other_host:
            one, other = self.hosts[host], self.hosts[other_host]
            nominal = min(one.nic_bytes_per_second, other.nic_bytes_per_second)
            return max(one.latency_seconds, other.latency_seconds), nominal * LINK_EFFICIENCY
        return _rate(kind, other_kind, slot // 2 == other_slot // 2, self.hosts[host].peer_links)

    @property
    def pairs(self) -> Iterator[Pair]:
        """Every ordered pair of devices."""
        return ((a, b) for a in self._ends for b in self._ends if a != b)

    def groups(self) -> dict[LinkRate, list[Pair]]:
        """Pairs by their links, of which those that are equal to three digits are one."""
        rounded = cache(lambda latency, rate: (float(f"{latency:.2g}"), float(f"{rate:.3g}")))
        found: dict[LinkRate, list[Pair]] = {}
        for pair in self.pairs:
            found.setdefault(rounded(*self.rate(*pair)), []).append(pair)
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Links):
            return NotImplemented
        ours, theirs = list(self._ends.items()), list(other._ends.items())
        return ours == theirs and self.hosts == other.hosts and self.known == other.known

    __hash__ = None  # type: ignore[assignment]


def make_links(
    devices: Sequence[Device], hosts: Sequence[Host] = (), known: Mapping[Pair, Link] | None = None
) -> Links:
    """Return the link of every ordered pair, in device order; hosts that are not given are as their cards imply."""
    given = {host.name: host for host in hosts}
    every = {name: given.get(name) or usual_host(name, inside) for name, inside in by_host(devices).items()}
    return Links(devices, every, known or {})


def by_host(devices: Sequence[Device]) -> dict[str, list[Device]]:
    """Return the devices of every host, hosts in the order of their first devices."""
    members: dict[str, list[Device]] = {}
    for device in devices:
        members.setdefault(device.host, []).append(device)
    return members


def usual_host(name: str, devices: Sequence[Device]) -> Host:
    """Return what the hardware table says of a machine with these devices: that of its first card counts."""
    cards = cards_of(devices)
    row = table_row(cards[0].kind if cards else "generic")
    if not row.nic_bytes_per_second:
        nics, rate = 1, ASSUMED_NIC_BYTES_PER_SECOND
    else:
        nics, rate = row.nics_per_host, row.nic_bytes_per_second
    if nics > 1:  # a machine with half of the cards has half of the network
        nics = max(1, nics * len(cards) // row.cards_per_host)
    return Host(name=name, nics=nics, nic_bytes_per_second=rate, latency_seconds=NETWORK_SECONDS)


def cards_of(devices: Sequence[Device]) -> list[Device]:
    """Return the devices that are neither a machine's memory nor its disk."""
    return [device for device in devices if device.kind not in ("cpu", "disk")]


def table_row(kind: str) -> Hardware:
    """Return the row of a kind; of one that is not in the table the generic row."""
    table = hardware_table()
    return table.get(kind, table["generic"])


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
def _rate(kind_a: str, kind_b: str, bridged: bool, peer_links: bool) -> LinkRate:
    """Rate between two kinds in one machine; symmetric. Unknown kinds count as generic."""
    table = hardware_table()
    a, b = table_row(kind_a), table_row(kind_b)
    kinds = {a.name, b.name}
    if "disk" in kinds:
        other = b if a.name == "disk" else a
        nominal, latency = min(table["disk"].host_bytes_per_second, other.host_bytes_per_second), DISK_SECONDS
    elif kinds == {"cpu"}:
        return MEMORY_SECONDS, a.peer_bytes_per_second  # measured, not nominal
    elif "cpu" in kinds:
        nominal, latency = (b if a.name == "cpu" else a).host_bytes_per_second, HOST_SECONDS
    elif peer_links and a.peer_link == b.peer_link != "none" and (a.peer_topology != "pairs" or bridged):
        nominal, latency = min(a.peer_bytes_per_second, b.peer_bytes_per_second), PEER_SECONDS
    else:
        nominal, latency = min(a.host_bytes_per_second, b.host_bytes_per_second), HOST_SECONDS
    return latency, nominal * LINK_EFFICIENCY

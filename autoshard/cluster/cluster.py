"""A cluster: devices and the links between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from autoshard.cluster.device import Device, Link
from autoshard.cluster.links import LOOPBACK, LinkRate, Links, make_links
from autoshard.plan import PlanDevice

RESERVED = 0.05
"""Part of a card's memory that no plan uses unless it is told to: fragments, other processes, a longer batch."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Cluster:
    """Devices in the order the user gave them, and the link of every ordered pair.

    Attributes:
        links: those that are given one by one are known, and the others as the hardware implies.
        spec: the text it was made from.
    """

    devices: tuple[Device, ...]
    links: Links
    spec: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Cluster: {self.spec or 'devices'}: {', '.join(self.names[:4])}{' …' if len(self.names) > 4 else ''}>"

    @cached_property
    def _devices(self) -> dict[str, Device]:
        return {device.name: device for device in self.devices}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(device.name for device in self.devices)

    def device(self, name: str) -> Device:
        return self._devices[name]

    @property
    def largest_host(self) -> "Cluster":
        """The devices of the host whose devices have the most memory, the first of equals; "disk" does not count."""
        memory: dict[str, int] = {}
        for device in self.devices:
            memory[device.host] = memory.get(device.host, 0) + (device.memory_bytes if device.name != "disk" else 0)
        host = max(memory, key=lambda one: memory[one])
        return replace(self, devices=tuple(device for device in self.devices if device.host == host))

    def link(self, source: str, destination: str) -> Link:
        return self.links.between(source, destination)

    @cached_property
    def link_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """[D, D] seconds of latency, and bytes per second, from row to column; 0 and 1 from a device to itself."""
        names = self.names
        rates = [self.links.rate(a, b) if a != b else (0.0, 1.0) for a in names for b in names]
        latency, rate = np.array(rates).reshape(len(names), len(names), 2).transpose(2, 0, 1)
        latency.setflags(write=False)
        rate.setflags(write=False)
        return latency, rate

    def slowest_links(self, names: Sequence[str]) -> tuple[LinkRate, ...]:
        """The links of a ring through some devices, machine by machine and back to the first; equal ones once."""
        key = tuple(names)
        if key not in self._slowest_links:
            hosts = dict.fromkeys(self.device(name).host for name in key)
            order = [name for host in hosts for name in key if self.device(name).host == host]
            ring = [self.links.rate(a, b) for a, b in zip(order, [*order[1:], *order[:1]], strict=True) if a != b]
            self._slowest_links[key] = tuple(dict.fromkeys(ring))
        return self._slowest_links[key]

    @cached_property
    def _slowest_links(self) -> dict[tuple[str, ...], tuple[LinkRate, ...]]:
        return {}

    def between_processes(self) -> "Cluster":
        """The cluster as it is where every device has a process of its own.

        CPUs of one machine then send through its loopback. What a cluster file says of them, or was measured, stays.
        """
        # "cpu" itself is the memory that all of them share.
        ranks = [device.name for device in self.devices if device.kind == "cpu" and device.name != "cpu"]
        pairs = [(a, b) for a in ranks for b in ranks if a != b and (a, b) not in self.links.known]
        latency, rate = LOOPBACK
        return self.with_known({
            (a, b): Link(source=a, destination=b, bytes_per_second=rate, latency_seconds=latency) for a, b in pairs
        })  # fmt: skip

    def with_known(self, known: Mapping[tuple[str, str], Link]) -> "Cluster":
        """The same cluster with some links replaced by what is known of them."""
        if not known:
            return self
        hosts = tuple(self.links.hosts.values())
        return replace(self, links=make_links(self.devices, hosts, {**self.links.known, **known}))

    def kept_free(self) -> dict[str, int]:
        """Most bytes that a plan uses of each card, unless it is told: what was given for no known card is all used."""
        cards = [device for device in self.devices if device.kind not in ("generic", "cpu", "disk")]
        return {card.name: int(card.memory_bytes * (1 - RESERVED)) for card in cards}

    def with_memory(self, limits: Mapping[str, int]) -> "Cluster":
        """The same cluster with some devices' `memory_bytes` replaced, and nothing else."""
        devices = tuple(replace(d, memory_bytes=limits.get(d.name, d.memory_bytes)) for d in self.devices)
        return replace(self, devices=devices)


def plan_device(device: Device) -> PlanDevice:
    """A device as a plan writes it down."""
    return PlanDevice(
        name=device.name, memory_bytes=device.memory_bytes, kind=device.kind, host=device.host, network=device.network
    )

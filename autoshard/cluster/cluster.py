"""Devices and the links between them, as plain data that can be written on a machine that has none of them."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.plan import PlanDevice

RESERVED = 0.05
"""Part of a card's memory that no plan uses unless it is told to: fragments, other processes, a longer batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One device of a plan.

    Attributes:
        name: what torch calls it, e.g. "cuda:0", "cpu", "cpu:1" (simulated), or "disk".
        kind: row of the hardware table, e.g. "H100-SXM"; "generic" if only the memory is known.
        memory_bytes: what autoshard may use of it (free, not total, when detected).
        flops_per_second: by dtype name; "default" is used for a dtype not listed.
        bytes_per_second: of its own memory.
        launch_seconds: least time of one op.
        overhead_bytes: taken before the first tensor: context, workspaces. 0 on CPU and simulated devices.
        block_bytes: the allocator's rounding, 512 on CUDA, 1 where allocations are exact.
        host: machine it is in.
        network: how that differs from a usual one, in the words of a device spec ("4x100Gb/s, no nvlink").
        measured: figures come from a calibration, not from the table.
    """

    name: str
    kind: str = "generic"
    memory_bytes: int
    flops_per_second: Mapping[str, float] = field(default_factory=dict)
    bytes_per_second: float = 1e12
    launch_seconds: float = 5e-6
    overhead_bytes: int = 0
    block_bytes: int = 1
    host: str = "host0"
    network: str = ""
    measured: bool = False

    def flops(self, dtype: str) -> float:
        """Achievable FLOP/s for one dtype name such as "bfloat16"."""
        return self.flops_per_second.get(dtype) or self.flops_per_second.get("default") or 1e13

    @property
    def speed(self) -> tuple[object, ...]:
        """What devices have in common that take equally long for any op."""
        return tuple(sorted(self.flops_per_second.items())), self.bytes_per_second, self.launch_seconds

    @property
    def budget_bytes(self) -> int:
        """Bytes left for tensors."""
        return self.memory_bytes - self.overhead_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One direction between two devices. A copy of n bytes takes latency_seconds + n / bytes_per_second."""

    source: str
    destination: str
    bytes_per_second: float
    latency_seconds: float

    def seconds(self, nbytes: float) -> float:
        return self.latency_seconds + nbytes / self.bytes_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A machine, or the machines of one NVLink domain, and its network.

    Attributes:
        nics: network cards for the model's traffic: as many as devices, or shared by them.
        nic_bytes_per_second: of one of them, one direction, as it is sold.
        latency_seconds: of the smallest copy to another host.
        peer_links: its cards use their own links (NVLink and others); else they copy through the host.
    """

    name: str
    nics: int
    nic_bytes_per_second: float
    latency_seconds: float
    peer_links: bool = True


Pace = tuple[float, float]
"""Latency in seconds, and bytes per second."""


class Links(Sequence[Link]):
    """The link of every ordered pair of devices: known for some, implied by the hardware for the others.

    Attributes:
        hosts: every host by its name.
        known: links that a file gives or that were measured.
    """

    hosts: Mapping[str, Host]
    known: Mapping[tuple[str, str], Link]

    @abstractmethod
    def between(self, source: str, destination: str) -> Link:
        """The link of one pair; raises `KeyError` if there is none."""

    @abstractmethod
    def pace(self, source: str, destination: str) -> Pace:
        """Latency and bytes per second of one pair."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Cluster:
    """Devices in the order the user gave them, and every ordered pair's link. `spec` is the text it was made from.

    `links` is made when asked for: hundreds of devices have a million of them.
    """

    devices: tuple[Device, ...]
    links: Sequence[Link]
    spec: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"<Cluster: {self.spec or 'devices'}: {', '.join(self.names[:4])}{' …' if len(self.names) > 4 else ''}>"

    @cached_property
    def _links(self) -> dict[tuple[str, str], Link]:
        return {(link.source, link.destination): link for link in self.links}

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
        if isinstance(self.links, Links):
            return self.links.between(source, destination)
        return self._links[source, destination]

    @cached_property
    def link_tables(self) -> tuple[np.ndarray, np.ndarray]:
        """[D, D] seconds of latency, and bytes per second, from row to column; 0 and 1 from a device to itself."""
        names = self.names
        paces = [self._pace(a, b) if a != b else (0.0, 1.0) for a in names for b in names]
        latency, rate = np.array(paces).reshape(len(names), len(names), 2).transpose(2, 0, 1)
        latency.setflags(write=False)
        rate.setflags(write=False)
        return latency, rate

    def among(self, names: Sequence[str]) -> tuple[Pace, ...]:
        """The links of a ring through some devices, machine by machine and back to the first; equal ones once."""
        key = tuple(names)
        if key not in self._among:
            hosts = dict.fromkeys(self.device(name).host for name in key)
            order = [name for host in hosts for name in key if self.device(name).host == host]
            ring = [self._pace(a, b) for a, b in zip(order, [*order[1:], *order[:1]], strict=True) if a != b]
            self._among[key] = tuple(dict.fromkeys(ring))
        return self._among[key]

    @cached_property
    def _among(self) -> dict[tuple[str, ...], tuple[Pace, ...]]:
        return {}

    def _pace(self, source: str, destination: str) -> Pace:
        if isinstance(self.links, Links):
            return self.links.pace(source, destination)
        link = self._links[source, destination]
        return link.latency_seconds, link.bytes_per_second

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; `from_dict` gives an equal cluster back."""
        from autoshard.cluster.files import cluster_to_dict

        return cluster_to_dict(self)

    @classmethod
    def from_dict(cls, data: Any) -> "Cluster":
        """Read what `to_dict` wrote, or a shorter form written by hand. Raises `SpecError`."""
        from autoshard.cluster.files import cluster_from_dict

        return cluster_from_dict(data)

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

"""Clusters as JSON: devices and hosts written in full, read leniently, so that a file can also be written by hand.

    {"devices": [{"name": "cuda:0", "kind": "H100-SXM"},
                 {"name": "cuda:1", "kind": "H100-SXM", "host": "other", "memory": "60GiB"}],
     "hosts": [{"name": "other", "nics": 1, "nic_bytes_per_second": 12.5e9, "peer_links": false}],
     "network": {"bytes_per_second": 4e10, "latency_seconds": 2e-5},
     "links": [["cuda:0", "cuda:1", 3.6e11, 1e-5]]}

What a device or a host leaves out comes from the hardware table, and so do pairs without a link. "network" is what a
copy between two hosts gets, for hosts that are not listed. Links are written only where they are known otherwise.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Host, Link
from autoshard.cluster.hardware import LINK_EFFICIENCY, find_hardware, hardware_table, make_device
from autoshard.cluster.links import make_links, usual_host
from autoshard.cluster.network import with_networks
from autoshard.common.files import write_whole
from autoshard.common.sizes import parse_bytes
from autoshard.common.strict import Misread, expect, read_as
from autoshard.errors import SpecError

FORMAT, VERSION = "autoshard-cluster", 1
MAX_DEVICES = 1024
LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class DeviceEntry:
    """What a file may say of a device; `memory` as people write it. See `Device`."""

    name: str
    kind: str = "generic"
    memory: str | int | None = None
    memory_bytes: int | None = None
    host: str = "host0"
    flops_per_second: Mapping[str, float] | None = None
    bytes_per_second: float | None = None
    launch_seconds: float | None = None
    overhead_bytes: int | None = None
    block_bytes: int | None = None
    measured: bool | None = None


@dataclass(frozen=True, kw_only=True)
class HostEntry:
    """What a file may say of a host. See `Host`."""

    name: str
    nics: int | None = None
    nic_bytes_per_second: float | None = None
    latency_seconds: float | None = None
    peer_links: bool | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkEntry:
    """What a copy between two hosts gets."""

    bytes_per_second: float | None = None
    latency_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ClusterEntry:
    """A cluster file; a link is source, destination, bytes per second, seconds."""

    devices: tuple[DeviceEntry, ...]
    format: str = FORMAT
    version: int = VERSION
    spec: str = ""
    hosts: tuple[HostEntry, ...] = ()
    links: tuple[tuple[str | float, ...], ...] = ()
    network: NetworkEntry = field(default_factory=NetworkEntry)
    notes: tuple[str, ...] = ()


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return plain data from which `cluster_from_dict` makes an equal cluster."""
    names = {one.name for one in fields(Device)} - {"network"}  # which is said of hosts
    return {
        "format": FORMAT,
        "version": VERSION,
        "spec": cluster.spec,
        "devices": [{name: value for name, value in asdict(d).items() if name in names} for d in cluster.devices],
        "hosts": [asdict(host) for host in cluster.links.hosts.values()],
        "links": [
            [one.source, one.destination, one.bytes_per_second, one.latency_seconds]
            for one in cluster.links.known.values()
        ],
        "notes": list(cluster.notes),
    }


def cluster_from_dict(data: Any) -> Cluster:
    """Read a cluster; raises `SpecError` that names the entry which makes no sense."""
    try:
        if isinstance(data, Mapping) and isinstance(version := data.get("version", VERSION), int) and version > VERSION:
            raise SpecError(f"this autoshard reads version {VERSION}, and it has {version}. Update autoshard.")
        entry: ClusterEntry = read_as(ClusterEntry, data, "the cluster")
        return _cluster(entry)
    except Misread as error:
        raise SpecError(f"{error}.") from None


def write_cluster(cluster: Cluster, path: "str | os.PathLike[str]") -> None:
    """Write a cluster file. Raises `SpecError` if it can't be written."""
    write_whole(path, json.dumps(cluster_to_dict(cluster), indent=1) + "\n")


def read_cluster(path: str) -> Cluster:
    """Read a cluster file. Raises `SpecError` if it can't be read."""
    try:
        with open(path, encoding="utf-8") as file:
            data = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"the cluster file {path[:200]!r} can't be read: {error}.") from None
    try:
        cluster = cluster_from_dict(data)
    except SpecError as error:
        raise SpecError(f"in the cluster file {path[:200]!r}: {error}") from None
    return cluster if cluster.spec else replace(cluster, spec=path)


def _cluster(entry: ClusterEntry) -> Cluster:
    count = len(entry.devices)
    expect(0 < count <= MAX_DEVICES, "devices", f"a list of 1 to {MAX_DEVICES}", f"{count} devices")
    names = [device.name for device in entry.devices]
    expect(len(set(names)) == count, "devices", "listed once each", max(names, key=names.count))
    devices = [_device(one) for one in entry.devices]
    hosts = _hosts(entry, devices)
    devices = with_networks(devices, hosts)
    links = make_links(devices, hosts, dict(_link(row, names) for row in entry.links))
    return Cluster(devices=tuple(devices), links=links, spec=entry.spec, notes=entry.notes)


def _device(entry: DeviceEntry) -> Device:
    where = f"of device {entry.name[:40]!r}"
    row = hardware_table().get(entry.kind) or find_hardware(entry.kind)
    size = entry.memory_bytes if entry.memory_bytes is not None else entry.memory
    size = size if size is not None else row.memory_bytes or None
    expect(size is not None and bool(entry.name), f"memory {where}", 'a size such as "24GiB"', size)
    memory_bytes = parse_bytes(size or 0)
    made = make_device(row, name=entry.name, memory_bytes=memory_bytes, host=entry.host, plain_size=not row.is_card)
    said = {name: getattr(entry, name) for name in ("bytes_per_second", "launch_seconds", "overhead_bytes",
                                                    "block_bytes", "flops_per_second", "measured")}  # fmt: skip
    said = {name: value for name, value in said.items() if value is not None}
    for name, value in said.items():
        for figure in value.values() if isinstance(value, Mapping) else [value]:
            _check_figure(f"{name} {where}", figure, name == "block_bytes")
    return replace(made, **said)


def _hosts(entry: ClusterEntry, devices: list[Device]) -> list[Host]:
    """Every host: as the table has it, with what "network" says of all and "hosts" of some."""
    network, found = entry.network, []
    names = list(dict.fromkeys(device.host for device in devices))
    said = {host.name: host for host in entry.hosts}
    for name in said:
        expect(name in names, "hosts", f"hosts of devices ({', '.join(names[:8])[:200]})", name)
    for name in names:
        host = usual_host(name, [device for device in devices if device.host == name])
        if network.bytes_per_second is not None:
            host = replace(host, nic_bytes_per_second=network.bytes_per_second / LINK_EFFICIENCY)
        if network.latency_seconds is not None:
            host = replace(host, latency_seconds=network.latency_seconds)
        known = asdict(said[name]) if name in said else {}
        host = replace(host, **{key: value for key, value in known.items() if value is not None})
        _check_figure(f"nics of host {name[:40]!r}", host.nics, True)
        _check_figure(f"network rate of host {name[:40]!r}", host.nic_bytes_per_second, True)
        _check_figure(f"network latency of host {name[:40]!r}", host.latency_seconds)
        found.append(host)
    return found


def _link(row: tuple[str | float, ...], names: list[str]) -> tuple[tuple[str, str], Link]:
    wanted = "[source, destination, bytes_per_second, latency_seconds] of two devices"
    good = len(row) == 4 and row[0] in names and row[1] in names and row[0] != row[1]
    expect(good and not isinstance(row[2], str) and not isinstance(row[3], str), "a link", wanted, list(row))
    source, destination, rate, latency = row
    _check_figure(f"rate of the link {source} -> {destination}", rate, True)
    _check_figure(f"latency of the link {source} -> {destination}", latency)
    link = Link(source=source, destination=destination, bytes_per_second=rate, latency_seconds=latency)  # type: ignore[arg-type]
    return (link.source, link.destination), link


def _check_figure(name: str, value: Any, positive: bool = False) -> None:
    good = value > 0 if positive else value >= 0
    expect(good and value <= LARGEST, name, "a number above 0" if positive else "a number from 0", value)

"""Clusters as JSON: devices and hosts written in full, read leniently, so that a file can also be written by hand.

    {"devices": [{"name": "cuda:0", "kind": "H100-SXM"},
                 {"name": "cuda:1", "kind": "H100-SXM", "host": "other", "memory": "60GiB"}],
     "hosts": [{"name": "other", "nics": 1, "nic_bytes_per_second": 12.5e9, "peer_links": false}],
     "links": [["cuda:0", "cuda:1", 3.6e11, 1e-5]]}

What a device or a host leaves out comes from the hardware table, and so do pairs without a link. Links are written only
where they are known otherwise.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Host, Link
from autoshard.cluster.hardware import find_hardware, hardware_table, make_device
from autoshard.cluster.links import by_host, make_links, usual_host
from autoshard.cluster.network import with_networks
from autoshard.common.files import write_whole
from autoshard.common.sizes import parse_bytes
from autoshard.common.strict import Misread, expect, read_as, read_fields
from autoshard.errors import SpecError

FORMAT, VERSION = "autoshard-cluster", 1
MAX_DEVICES = 1024
LARGEST = 1e30


@dataclass(frozen=True, kw_only=True)
class ClusterFile:
    """What a file may say; a link is source, destination, bytes per second, seconds.

    Devices and hosts may leave out any field of `Device` and `Host`. `memory`, as people write it, is read by itself.
    """

    devices: tuple[Mapping[str, Any], ...]
    format: str = FORMAT
    version: int = VERSION
    spec: str = ""
    hosts: tuple[Mapping[str, Any], ...] = ()
    links: tuple[tuple[str | float, ...], ...] = ()
    notes: tuple[str, ...] = ()


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return plain data from which `cluster_from_dict` makes an equal cluster."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "spec": cluster.spec,
        "devices": [{name: value for name, value in asdict(d).items() if name != "network"} for d in cluster.devices],
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
        return _cluster(read_as(ClusterFile, data, "the cluster"))
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


def _cluster(entry: ClusterFile) -> Cluster:
    count = len(entry.devices)
    expect(entry.version >= 1, "version", f"a number from 1 to {VERSION}", entry.version)
    expect(0 < count <= MAX_DEVICES, "devices", f"a list of 1 to {MAX_DEVICES}", f"{count} devices")
    devices = [_device(one, f"device {number} of the cluster") for number, one in enumerate(entry.devices)]
    names = [device.name for device in devices]
    expect(len(set(names)) == count, "devices", "listed once, not twice", max(names, key=names.count))
    hosts = _hosts(entry, devices)
    devices = with_networks(devices, hosts)
    links = make_links(devices, hosts, dict(_link(row, names) for row in entry.links))
    return Cluster(devices=tuple(devices), links=links, spec=entry.spec, notes=entry.notes)


def _device(entry: Mapping[str, Any], where: str) -> Device:
    said = read_fields(Device, {key: value for key, value in entry.items() if key != "memory"}, where, some=True)
    expect(bool(said.get("name")), f"the name of {where}", 'a text such as "cuda:0"', said.get("name"))
    where = f"device {said['name'][:40]!r}"
    expect("network" not in said, where, "without a network, which hosts have", said.get("network"))
    kind = said.pop("kind", "generic")
    row = hardware_table().get(kind) or find_hardware(kind)
    size = said.pop("memory_bytes", entry.get("memory", row.memory_bytes or None))
    good = isinstance(size, (int, str)) and not isinstance(size, bool)
    expect(good, f"memory of {where}", 'a size such as "24GiB"', size)
    made = make_device(
        row, name=said.pop("name"), memory_bytes=parse_bytes(size), host=said.pop("host", "host0"),
        plain_size=not row.is_card,
    )  # fmt: skip
    for name, value in said.items():
        for figure in value.values() if isinstance(value, Mapping) else [value]:
            _check_figure(f"{name} of {where}", figure, name == "block_bytes")
    return replace(made, **said)


def _hosts(entry: ClusterFile, devices: list[Device]) -> list[Host]:
    """Every host: as the table has it, with what the file says of it."""
    said = {}
    for number, row in enumerate(entry.hosts):
        read = read_fields(Host, row, f"host {number} of the cluster", some=True)
        said[read.get("name", "")] = read
    members = by_host(devices)
    for name, read in said.items():
        expect(name in members, "hosts", f"hosts of devices ({', '.join([*members][:8])[:200]})", name)
        for figure in read.keys() - {"name", "peer_links"}:
            _check_figure(f"{figure} of host {name[:40]!r}", read[figure], figure != "latency_seconds")
    return [replace(usual_host(name, inside), **said.get(name, {})) for name, inside in members.items()]


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

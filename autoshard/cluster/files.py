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
from dataclasses import asdict, fields, replace
from typing import Any

from autoshard.cluster.cluster import Cluster, Device, Host, Link, Links
from autoshard.cluster.hardware import LINK_EFFICIENCY, find_hardware, hardware_table, make_device
from autoshard.cluster.links import make_links, usual_host
from autoshard.cluster.network import with_networks
from autoshard.common.files import write_whole
from autoshard.common.sizes import parse_bytes
from autoshard.errors import SpecError

VERSION = 1
MAX_DEVICES = 1024
_DEVICE_KEYS = tuple(field.name for field in fields(Device) if field.name != "network")  # that is said of hosts
_HOST_KEYS = {field.name for field in fields(Host)}
_NUMBERS = {"bytes_per_second": 0.0, "launch_seconds": 0.0, "overhead_bytes": 0, "block_bytes": 1}
"""Figures of a device that a file may give, with the least value of each."""


def cluster_to_dict(cluster: Cluster) -> dict[str, Any]:
    """Return plain data from which `cluster_from_dict` makes an equal cluster."""
    links = cluster.links
    hosts = [asdict(host) for host in links.hosts.values()] if isinstance(links, Links) else []
    known = links.known.values() if isinstance(links, Links) else links
    return {
        "format": "autoshard-cluster",
        "version": VERSION,
        "spec": cluster.spec,
        "devices": [
            {**{key: getattr(d, key) for key in _DEVICE_KEYS}, "flops_per_second": dict(d.flops_per_second)}
            for d in cluster.devices
        ],
        "hosts": hosts,
        "links": [[k.source, k.destination, k.bytes_per_second, k.latency_seconds] for k in known],
        "notes": list(cluster.notes),
    }


def cluster_from_dict(data: Any) -> Cluster:
    """Read a cluster; raises `SpecError` that names the entry which makes no sense."""
    if not isinstance(data, dict) or not isinstance(data.get("devices"), list) or not data["devices"]:
        raise SpecError('not a cluster: it must be an object with a non-empty list "devices".')
    unknown = set(data) - {"format", "version", "spec", "devices", "hosts", "links", "network", "notes"}
    if unknown:
        raise SpecError(f"unknown entry {sorted(map(str, unknown))[0]!r} in the cluster.")
    version = data.get("version", VERSION)
    if not isinstance(version, int) or version > VERSION or version < 1:
        raise SpecError(
            f"the cluster file has version {version!r}; this autoshard reads up to {VERSION}. Update autoshard."
        )
    if len(data["devices"]) > MAX_DEVICES:
        raise SpecError(f"{len(data['devices'])} devices in the cluster; {MAX_DEVICES} are the most one plan may use.")
    devices = [_device(entry, position) for position, entry in enumerate(data["devices"])]
    names = [device.name for device in devices]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SpecError(f"device {twice!r} is in the cluster twice. List every device once.")
    notes = data.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        raise SpecError('"notes" of a cluster must be a list of texts.')
    hosts = _hosts(data, devices)
    devices = with_networks(devices, hosts)
    links = make_links(devices, hosts, _links(data, devices))
    return Cluster(devices=tuple(devices), links=links, spec=str(data.get("spec", "")), notes=tuple(notes))


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


def _device(entry: Any, position: int) -> Device:
    where = f"device {position} of the cluster"
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or not entry["name"]:
        raise SpecError(f'{where} must be an object with a "name" such as "cuda:0".')
    where = f"device {entry['name'][:40]!r} of the cluster"
    unknown = set(entry) - {*_DEVICE_KEYS} - {"memory"}
    if unknown:
        raise SpecError(
            f"{where} has an unknown entry {sorted(map(str, unknown))[0]!r}. "
            f"Known: memory, {', '.join(sorted(_DEVICE_KEYS))}."
        )
    kind, host = entry.get("kind", "generic"), entry.get("host", "host0")
    if not isinstance(kind, str) or not isinstance(host, str):
        raise SpecError(f'"kind" and "host" of {where} must be texts.')
    row = hardware_table().get(kind) or find_hardware(kind)
    size = entry.get("memory_bytes", entry.get("memory", row.memory_bytes or None))
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise SpecError(f'{where} needs its memory, as in "memory": "24GiB".')
    memory_bytes = parse_bytes(size)
    device = make_device(row, name=entry["name"], memory_bytes=memory_bytes, host=host, plain_size=not row.is_card)
    changes: dict[str, Any] = {
        key: _number(entry[key], least, f"{key} of {where}") for key, least in _NUMBERS.items() if key in entry
    }
    if "measured" in entry:
        changes["measured"] = bool(entry["measured"])
    if "flops_per_second" in entry:
        rates = entry["flops_per_second"]
        if not isinstance(rates, dict):
            raise SpecError(f'"flops_per_second" of {where} must be an object such as {{"bfloat16": 4e14}}.')
        changes["flops_per_second"] = {
            str(dtype): _number(rate, 0.0, f"{dtype} rate of {where}") for dtype, rate in rates.items()
        }
    return replace(device, **changes)


def _hosts(data: dict[str, Any], devices: list[Device]) -> list[Host]:
    """Every host: as the table has it, with what "network" says of all and "hosts" of some."""
    network, entries = data.get("network", {}), data.get("hosts", [])
    if not isinstance(network, dict):
        raise SpecError('"network" of a cluster must be an object with "bytes_per_second" and "latency_seconds".')
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise SpecError('"hosts" of a cluster must be a list of objects such as {"name": "host0", "nics": 8}.')
    said = {str(entry.get("name")): entry for entry in entries}
    names = list(dict.fromkeys(device.host for device in devices))
    for name, entry in said.items():
        if name not in names:
            raise SpecError(f"host {name[:40]!r} has no device in the cluster. Hosts: {', '.join(names[:8])[:200]}.")
        if unknown := set(entry) - _HOST_KEYS:
            raise SpecError(f"host {name[:40]!r} has an unknown entry {sorted(map(str, unknown))[0][:40]!r}.")
    hosts = []
    for name in names:
        host, entry = usual_host(name, [device for device in devices if device.host == name]), said.get(name, {})
        rate, where = host.nic_bytes_per_second, f"of host {name[:40]!r}"
        if "bytes_per_second" in network:
            rate = _positive(network["bytes_per_second"], "network rate") / LINK_EFFICIENCY
        latency = _number(network.get("latency_seconds", host.latency_seconds), 0.0, "network latency")
        peers = entry.get("peer_links", True)
        if not isinstance(peers, bool):
            raise SpecError(f'"peer_links" {where} must be true or false.')
        hosts.append(
            Host(
                name=name,
                nics=_number(entry.get("nics", host.nics), 1, f"nics {where}"),
                nic_bytes_per_second=_positive(entry.get("nic_bytes_per_second", rate), f"network card {where}"),
                latency_seconds=_number(entry.get("latency_seconds", latency), 0.0, f"latency {where}"),
                peer_links=peers,
            )
        )
    return hosts


def _links(data: dict[str, Any], devices: list[Device]) -> dict[tuple[str, str], Link]:
    entries = data.get("links", [])
    if not isinstance(entries, list):
        raise SpecError(
            '"links" of a cluster must be a list of [source, destination, bytes_per_second, latency_seconds].'
        )
    given = {}
    names = {device.name for device in devices}
    for entry in entries:
        if (
            not isinstance(entry, list)
            or len(entry) != 4
            or not all(isinstance(end, str) and end in names for end in entry[:2])
            or entry[0] == entry[1]
        ):
            raise SpecError(
                f"{str(entry)[:80]} is not a link: write [source, destination, bytes_per_second, latency_seconds]."
            )
        what = f"link {entry[0]} -> {entry[1]}"
        given[entry[0], entry[1]] = Link(
            source=entry[0],
            destination=entry[1],
            bytes_per_second=_positive(entry[2], f"rate of {what}"),
            latency_seconds=_number(entry[3], 0.0, f"latency of {what}"),
        )
    return given


def _number(value: Any, least: float, what: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= 1e30:
        raise SpecError(f"the {what} is {str(value)[:40]!r}; it must be a number of at least {least:g}.")
    return int(value) if isinstance(least, int) else value


def _positive(value: Any, what: str) -> float:
    number = _number(value, 0.0, what)
    if number <= 0:
        raise SpecError(f"the {what} is {number}; it must be above 0.")
    return number

"""Devices and the hardware table as tables for a terminal of 80 columns or more."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Host
from autoshard.cluster.hardware import hardware_table
from autoshard.cluster.links import cards_of, table_row
from autoshard.cluster.network import speed_text
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.report.layout import (
    INDENT,
    Column,
    Table,
    format_number,
    numbers,
    print_section,
    print_sentences,
    print_table,
)
from autoshard.report.words import runs

FEW = 8
"""Devices, and hosts, that are printed one by one."""


def print_devices(console: Console, cluster: Cluster) -> None:
    """Print devices with their rates, the links between them, and what the figures rest on."""
    table = device_table(cluster)
    print_table(console, table.columns, table.rows)
    if len({device.host for device in cluster.devices}) > 1:
        _print_hosts(console, cluster)
    if len(cluster.devices) > 1:
        print_section(console, "Links")
        print_table(console, [replace(column, title="") for column in LINKS], link_rows(cluster), INDENT)
    print_sentences(console, "Notes", cluster.notes)


def device_table(cluster: Cluster, *, sources: bool = False) -> Table:
    """Return devices with their rates, those that are alike in one row; `sources`: with where the rates are from."""
    hosts = len({device.host for device in cluster.devices}) > 1
    columns = [
        Column(title="Device", style="bold"),
        Column(title="Hardware", flexible=True),
        *numbers("Memory", "bf16 TFLOP/s", "fp32", "Memory GB/s", *(["Launch"] if sources else [])),
        *([Column(title="Machine")] if hosts else []),
        Column(title="Source" if sources else "", style="bright_black"),
    ]
    rows = []
    for alike in _folded(cluster.devices, 1 if sources else FEW):
        device, last = alike[0], alike[-1]
        host = device.host if device.host == last.host else f"{device.host} to {last.host}"
        rows.append([
            device.name if len(alike) == 1 else f"{device.name} to {last.name}",
            device.kind,
            format_bytes(device.memory_bytes),
            format_number(device.flops("bfloat16") / 1e12),
            format_number(device.flops("float32") / 1e12),
            format_number(device.bytes_per_second / 1e9),
            *([format_seconds(device.launch_seconds)] if sources else []),
            *([host] if hosts else []),
            "measured" if device.measured else _source(device) if sources else "",
        ])  # fmt: skip
    return Table(label="Devices and their rates", columns=columns, rows=rows)


def _source(device: Device) -> str:
    """Where the rates of a device were read."""
    row = table_row(device.kind)
    unverified = ", ".join(row.unverified).replace("_", " ")
    return f"{row.source} (not verified: {unverified})" if unverified else row.source


def _folded(devices: Sequence[Device], few: int) -> list[list[Device]]:
    """Devices that follow each other and are alike, where there are more than `few`: of a host, or of many hosts."""
    many_hosts = len({device.host for device in devices}) > FEW

    def follows(last: Device, device: Device) -> bool:
        host = last.host if many_hosts else device.host
        return host == last.host and replace(last, name=device.name, host=host) == replace(device, host=host)

    return runs(devices, follows) if len(devices) > few else [[device] for device in devices]


def print_hardware(console: Console) -> None:
    """Print the hardware table with what is not verified marked."""
    columns = [
        Column(title="Name", style="bold"),
        *numbers("GiB", "bf16", "fp16", "fp32", "GB/s"),
        Column(title="Between cards, GB/s", flexible=True),
    ]
    rows = []
    for row in hardware_table().values():
        if not row.is_card:
            continue
        rates = [row.flops_per_second.get(dtype, 0) / 1e12 for dtype in ("bfloat16", "float16", "float32")]
        mark = "*" if "all" in row.unverified else ""
        link = f"{row.peer_bytes_per_second / 1e9:g} {row.peer_link}" if row.peer_topology else "through the host"
        cells = [*map(format_number, rates), format_number(row.bytes_per_second / 1e9)]
        rows.append([row.name + mark, format_number(row.memory_bytes / 2**30), *cells, link])
    print_table(console, columns, rows)
    remark = "GiB usable; peaks, dense, in TFLOP/s; links one way. * not verified."
    console.print(Text(INDENT + remark, style="bright_black"))


def _print_hosts(console: Console, cluster: Cluster) -> None:
    """The network of hosts, those that are alike in one line."""
    count = Counter(device.host for device in cards_of(cluster.devices))
    alike: dict[Host, list[str]] = {}
    for name, host in cluster.links.hosts.items():
        alike.setdefault(replace(host, name=str(count[name])), []).append(name)
    print_section(console, "Hosts")
    rows = []
    for host, names in alike.items():
        named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}" if len(names) > 2 else ", ".join(names)
        peers = "" if host.peer_links else ", no links between cards"
        rows.append([named, f"{host.name} cards each", f"network {speed_text(host)}{peers}"])
    print_table(console, [Column(), Column(right=True), Column(flexible=True)], rows, INDENT)


LINKS = (*numbers("Link", "Latency"), Column(title="Between", style="bright_black", flexible=True))


def link_rows(cluster: Cluster) -> list[list[str]]:
    """[rate, latency, pairs] of links that are alike."""
    rows = []
    for (latency, rate), pairs in sorted(cluster.links.groups().items(), key=lambda row: row[0][::-1], reverse=True):
        shown = ", ".join(f"{source} -> {destination}" for source, destination in pairs[:2])
        more = f" and {len(pairs) - 2} more" if len(pairs) > 2 else ""
        rows.append([f"{format_number(rate / 1e9)} GB/s", format_seconds(latency), shown + more])
    return rows

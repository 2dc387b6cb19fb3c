"""What a device spec says of hosts besides their devices: "2 hosts of 8xA100-40GB, 1600Gb/s", "4xRTX4090, no nvlink".

1600Gb/s, 1600Gb/s per host    what the network cards of a host have together, one direction
400Gb/s per GPU                one network card for each device
4x100Gb/s                      four network cards, shared by the devices
no nvlink                      cards have no links of their own: they copy through the host
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.cluster.device import Device, Host
from autoshard.cluster.hardware import Hardware
from autoshard.cluster.links import by_host, cards_of, table_row, usual_host
from autoshard.common.sizes import shown
from autoshard.errors import SpecError

_SPEED = re.compile(
    r"(?:([0-9]{1,4})\s*[xX×*]\s*)?([0-9]+(?:\.[0-9]+)?)\s*([GT])(b|bit|B)(?:/s|ps)"
    r"(?:\s*(?:per|/)\s*(host|node|machine|gpu|card|device))?",
    re.IGNORECASE,
)
_NEARLY_SPEED = re.compile(r"b(it)?(/s|ps)\b|/s\s*$|\bper\s+(host|node|machine|gpu|card|device)\b", re.IGNORECASE)
_BITS = re.compile(r"(?:[0-9]+\s*[x×*]\s*)?[0-9.]+\s*[GT]b(?:it)?")
_NO_PEERS = re.compile(r"no[\s_-]*(nv-?link|peer(?:[\s_-]*links?)?)", re.IGNORECASE)
MOST_BYTES_PER_SECOND = 1e15
"""Of the network of a host: beyond it there is a typing error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWords:
    """What a spec says of every host; None: nothing.

    Attributes:
        nics: network cards of a host; 0: as many as it has devices.
        bytes_per_second: of all of them, or of one card if `each`.
    """

    nics: int | None = None
    bytes_per_second: float | None = None
    each: bool = False
    peer_links: bool = True


def split_words(spec: Any) -> tuple[Any, HostWords]:
    """Return a spec without what it says of hosts, and that. Raises `SpecError` for a speed that is none."""
    if not isinstance(spec, (str, list, tuple)):
        return spec, HostWords()
    kept, words = [], HostWords()
    for item in [spec] if isinstance(spec, str) else spec:
        if isinstance(item, str):
            parts, words = _split(item.split(","), words)
            kept += [",".join(parts)] if parts else []
        else:
            kept.append(item)
    if isinstance(spec, str) and not kept:
        raise SpecError(f"{shown(spec)} names no device. Write for example '2 hosts of 8xA100-40GB, 1600Gb/s'.")
    return kept[0] if isinstance(spec, str) else kept, words


def _split(parts: Sequence[str], words: HostWords = HostWords()) -> tuple[list[str], HostWords]:
    kept: list[str] = []
    for part in parts:
        text = part.strip()
        if _NO_PEERS.fullmatch(text):
            words = replace(words, peer_links=False)
        elif _BITS.fullmatch(text):
            raise SpecError(f"{shown(text)} are bits. Write {text[:20]}/s for a network, or the memory as in 24GB.")
        elif "=" not in text and _NEARLY_SPEED.search(text):
            if words.bytes_per_second is not None:
                raise SpecError(f"the network is given twice: {shown(text)} is the second. Give one for all hosts.")
            words = _with_speed(words, text)
        else:
            kept.append(part)
    return kept, words


def _with_speed(words: HostWords, text: str) -> HostWords:
    match = _SPEED.fullmatch(text)
    # Gb/s are bits and GB/s bytes, and nobody writes gb/s with care: bits, as networks are sold.
    speed = 0.0
    if match is not None:
        speed = float(match[2]) * (1e12 if match[3] in "Tt" else 1e9) / (1 if match[4] == "B" else 8)
    count = int(match[1]) if match is not None and match[1] else None
    total = speed * (count or 1)
    if match is None or not 0 < total <= MOST_BYTES_PER_SECOND:
        raise SpecError(
            f"{shown(text)} is not the speed of a network. Write for example 1600Gb/s for all network cards of a host, "
            "8x400Gb/s for each of eight, or 400Gb/s per GPU."
        )
    per_card = match[5] is not None and match[5].lower() in ("gpu", "card", "device")
    if per_card and count is None:
        return replace(words, nics=0, bytes_per_second=speed, each=True)
    return replace(words, nics=count, bytes_per_second=speed, each=count is not None)


def make_hosts(devices: Sequence[Device], words: HostWords) -> list[Host]:
    """Return the hosts of the devices: as the hardware table has them, changed by what was said."""
    hosts = []
    for name, inside in by_host(devices).items():
        host = usual_host(name, inside)
        if words.bytes_per_second is not None:
            nics = (len(cards_of(inside)) or 1) if words.nics == 0 else words.nics or host.nics
            each = words.bytes_per_second / (1 if words.each else nics)
            host = replace(host, nics=nics, nic_bytes_per_second=each)
        hosts.append(replace(host, peer_links=words.peer_links))
    return hosts


def with_networks(devices: Sequence[Device], hosts: Sequence[Host]) -> list[Device]:
    """Return the devices, each with how its host differs from a usual one, as a device spec says it."""
    members, texts = by_host(devices), {}
    for host in hosts:
        usual, said = usual_host(host.name, members[host.name]), []
        if (host.nics, host.nic_bytes_per_second) != (usual.nics, usual.nic_bytes_per_second):
            said.append(f"{host.nics}x{host.nic_bytes_per_second * 8 / 1e9:.12g}Gb/s")
        texts[host.name] = ", ".join([*said, *([] if host.peer_links else ["no nvlink"])])
    return [replace(device, network=texts[device.host]) for device in devices]


def hosts_of(devices: Sequence[Device]) -> list[Host]:
    """Return the hosts that devices say they are in. Raises `SpecError` if a `network` makes no sense."""
    hosts = []
    for inside in by_host(devices).values():
        text = inside[0].network
        left, words = _split(text.split(",")) if text else ([], HostWords())
        if left:
            raise SpecError(f"{shown(text)} is not the network of a host. Write for example '8x400Gb/s, no nvlink'.")
        hosts += make_hosts(inside, words)
    return hosts


def network_note(devices: Sequence[Device], hosts: Sequence[Host], words: HostWords) -> list[str]:
    """What is assumed of the network between hosts, in a sentence."""
    if len(hosts) < 2 or words.bytes_per_second is not None:
        return []
    cards = cards_of(devices)
    row = table_row(cards[0].kind) if cards else None
    text = speed_text(hosts[0])
    why = f"as in training nodes of {row.name}" if row is not None and row.nic_bytes_per_second else "for all its cards"
    return [f"The network between hosts is assumed: {text} per host, {why}. Say otherwise as in ', 1600Gb/s'."]


def speed_text(host: Host) -> str:
    """Return "8 x 400 Gb/s"."""
    speed = f"{host.nic_bytes_per_second * 8 / 1e9:.4g} Gb/s"
    return speed if host.nics == 1 else f"{host.nics} x {speed}"


def even_hosts(count: int, row: Hardware) -> list[int]:
    """Devices on each of as few hosts as their kind needs, as even as possible."""
    if not row.cards_per_host or count <= row.cards_per_host:
        return [count]
    hosts = -(-count // row.cards_per_host)
    return [count // hosts + (index < count % hosts) for index in range(hosts)]


def even_note(asked: str, sizes: Sequence[int]) -> str:
    """How `even_hosts` divided devices, in a sentence."""
    hosts_text, count = f"{len(sizes)} hosts of {sizes[0]}", sum(sizes)
    if sizes[0] != sizes[-1]:
        hosts_text = f"{len(sizes)} hosts of {sizes[-1]} or {sizes[0]}, as even as possible"
    return f"{count}x{asked} is taken as {hosts_text}; for a single one write '1 host of {count}x{asked}'."

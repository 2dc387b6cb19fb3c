"""Device specs: every way a person may say which devices there are, turned into one `Cluster`.

"auto"                             the accelerators of this machine, else its CPU
4                                  its first four accelerators
["cuda:0", "cuda:1"], [0, 1]       these, with the memory that is free on them now
{"cuda:0": "20GiB", "cpu": "60GiB", "disk": "200GiB"}         these, with at most so much memory each
"8xH100-80GB"                      imagined cards, figures from the hardware table
"2x24GiB,1x12GiB"                  imagined cards of which only the memory is known
"16xH100-80GB"                     more than a machine has: as many machines as it takes, each with as many cards
"2 hosts of 8xA100-40GB"           the same in two machines; "+" joins unequal cards: "2 hosts of 24GiB+2x12GiB"
"2 hosts of 8xA100-40GB, 1600Gb/s", "4xRTX4090, no nvlink"     with their network, without links between cards
"cuda:0=20GiB,cpu=60GiB"           the dict form on a command line
"cluster.json"                     a file written by `Cluster.to_dict`, or by hand
"""

import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.detect import accelerator_names, accelerator_type, detect_device, detected_notes
from autoshard.cluster.device import Device
from autoshard.cluster.files import read_cluster
from autoshard.cluster.hardware import Hardware, bfloat16_notes, find_hardware, hardware_table, make_device
from autoshard.cluster.links import make_links
from autoshard.cluster.network import (
    HostWords,
    even_hosts,
    even_note,
    hosts_of,
    make_hosts,
    network_note,
    split_words,
    with_networks,
)
from autoshard.common.sizes import format_bytes, parse_bytes, shown
from autoshard.errors import SpecError
from autoshard.plan import PlanDevice
from autoshard.plan.choices import DeviceName, Size, did_you_mean

MAX_DEVICES = 1024
MACHINE = 8
"""Cards that one machine has at most."""
FORMS = (
    "Write for example auto, 4, cuda:0,cuda:1, 8xH100-80GB, 2x24GiB,1x12GiB, '2 hosts of 8xA100-40GB, 1600Gb/s', "
    "cuda:0=20GiB,cpu=60GiB, or the path of a cluster file ending in .json."
)
DEVICE_TYPES = ("cpu", "cuda", "mps", "xpu", "hpu", "npu", "mlu", "musa", "disk")

_NEARLY = re.compile(r"\s*([A-Za-z]+)[-_: ]*([0-9]{0,4})\s*")
"""What may have been meant as the name of a device."""

Devices = DeviceName | Sequence[DeviceName] | Mapping[Any, Size] | os.PathLike[str] | Cluster
"""What `parse_devices` takes: the forms of the module docstring, and a `Cluster`."""

active_cluster: ContextVar[Cluster | None] = ContextVar("active_cluster", default=None)
"""Set while devices are simulated: "auto", counts and bare names then mean the simulated ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """One device asked for: its name (None: numbered later), its hardware, its memory (None: detect), its machine."""

    name: str | None = None
    row: Hardware | None = None
    memory_bytes: int | None = None
    host: str = "host0"
    asked: str = ""
    note: str = ""


def parse_devices(spec: Any, *, simulated: bool = False) -> Cluster:
    """Return the cluster a spec means; see the module docstring for the forms. Raises `SpecError`, nothing else.

    `simulated` renames the devices cpu:0, cpu:1, … and makes their memory exact: no overhead, no rounding.
    """
    if isinstance(spec, Cluster):
        cluster = spec
    elif isinstance(spec, (str, os.PathLike)) and _is_file(spec):
        cluster = read_cluster(os.fspath(spec))
    else:
        devices, words = split_words(spec)
        wanted = list(_limited(_wanted(devices)))
        if not wanted:
            raise SpecError(f"no devices in {shown(spec)}. {FORMS}")
        cluster = _build(wanted, words, _spec_text(spec))
    if not cluster.devices:
        raise SpecError(f"the cluster has no devices. {FORMS}")
    return _simulated(cluster) if simulated else cluster


def cluster_of(devices: Sequence[PlanDevice]) -> Cluster:
    """Rebuild the cluster a plan was made for, with rates and links as the hardware table has them."""
    table = hardware_table()
    built = []
    for item in devices:
        row = table.get(item.kind, table["generic"])
        plain = item.memory_bytes != row.memory_bytes
        device = make_device(row, name=item.name, memory_bytes=item.memory_bytes, host=item.host, plain_size=plain)
        device = replace(device, network=item.network)
        # "cpu:1" is a simulated device or the plain CPU: exact either way.
        built.append(replace(device, overhead_bytes=0, block_bytes=1) if item.name.startswith("cpu") else device)
    return Cluster(devices=tuple(built), links=make_links(built, hosts_of(built)), spec="the devices of the plan")


def canonical_name(name: Any) -> str:
    """Return what torch calls a device: 0 -> "cuda:0", "cuda" -> "cuda:0", torch.device("cpu") -> "cpu"."""
    if isinstance(name, torch.device):
        name = str(name)
    if isinstance(name, int) and not isinstance(name, bool):
        if not 0 <= name < MAX_DEVICES:
            raise SpecError(f"{shown(name)} is not a device index. Indices start at 0.")
        kind = accelerator_type() or "cuda"
        return kind if kind == "mps" else f"{kind}:{name}"
    match = re.fullmatch(r"\s*([a-z]+)(?::([0-9]{1,4}))?\s*", name) if isinstance(name, str) else None
    if match is None or match[1] not in DEVICE_TYPES or (match[1] == "disk" and match[2]):
        raise SpecError(f"{shown(name)} is not a device name.{_nearest_name(name) or f' {FORMS}'}")
    kind, index = match[1], match[2]
    if index is None:
        return kind if kind in ("cpu", "mps", "disk") else f"{kind}:0"
    return kind if kind == "mps" and int(index) == 0 else f"{kind}:{int(index)}"


def _nearest_name(name: Any) -> str:
    """Return " Did you mean cuda:0?" for "cuda0", "gpu:0" or "cdua:0"; nothing where no name is near."""
    parts = _NEARLY.fullmatch(str(name))
    if parts is None:
        return ""
    kind, index = parts[1].lower(), int(parts[2] or 0)
    kind = (accelerator_type() or "cuda") if kind == "gpu" else kind
    known = [one if one in ("cpu", "mps", "disk") and not index else f"{one}:{index}" for one in DEVICE_TYPES]
    return did_you_mean(kind if kind in known else f"{kind}:{index}", known)


def limited_to(cluster: Cluster, max_memory: Mapping[Any, Any] | None) -> Cluster:
    """The cluster with the memory that may be used."""
    sizes = {_known(name, cluster, "max_memory"): parse_bytes(size) for name, size in (max_memory or {}).items()}
    return cluster.with_memory({name: min(n, cluster.device(name).memory_bytes) for name, n in sizes.items()})


def named_pins(cluster: Cluster, pins: Mapping[str, Any] | None) -> dict[str, str]:
    """Pins with the names of the cluster's devices."""
    return {path: _known(name, cluster, f"the pin of {path!r}") for path, name in (pins or {}).items()}


def _known(device: Any, cluster: Cluster, where: str) -> str:
    """The name of a device of the cluster, in any form that people write."""
    name = canonical_name(device)
    if name not in cluster.names:
        raise SpecError(f"{where} names device {name!r}, which is not among the devices: {', '.join(cluster.names)}.")
    return name


def _wanted(spec: Any) -> Iterator[_Wanted]:
    if isinstance(spec, bool):
        raise SpecError(f"{spec} is not a device spec. {FORMS}")
    if isinstance(spec, int):
        yield from _count(spec)
    elif isinstance(spec, str):
        yield from _text(spec)
    elif isinstance(spec, torch.device):
        yield _Wanted(name=canonical_name(spec))
    elif isinstance(spec, Mapping):
        for name, size in spec.items():
            yield _Wanted(name=canonical_name(name), memory_bytes=_size(size, f"memory of {shown(name)}"))
    elif isinstance(spec, (list, tuple)):
        for item in spec:
            if isinstance(item, str):
                yield from _text(item)
            else:
                yield _Wanted(name=canonical_name(item))
    else:
        raise SpecError(f"a {type(spec).__name__} is not a device spec. {FORMS}")


def _count(number: int) -> Iterator[_Wanted]:
    if number < 1:
        raise SpecError(f"the number of devices must be at least 1, got {shown(number)}.")
    active = active_cluster.get()
    here = list(active.names) if active is not None else accelerator_names()
    if number > len(here):
        raise SpecError(
            f"{shown(number)} devices were asked for, but torch sees {', '.join(here) or 'no accelerator'} here. "
            f"To plan for another machine say what it has, as in {min(number, 8)}xH100-80GB or {min(number, 8)}x24GiB."
        )
    for name in here[:number]:
        yield _Wanted(name=name)


def _text(text: str) -> Iterator[_Wanted]:
    if text.strip() == "auto":
        active = active_cluster.get()
        for name in active.names if active is not None else accelerator_names() or ["cpu"]:
            yield _Wanted(name=name)
        return
    if re.fullmatch(r"\s*[0-9]{1,9}\s*", text) and not _is_hardware(text):
        yield from _count(int(text))
        return
    first_host = 0
    for group in text.split(","):
        if not group.strip():
            raise SpecError(f"a part of the device spec {shown(text)} is empty. {FORMS}")
        match = re.fullmatch(
            r"\s*([0-9]+)\s*(?:x\s*)?(?:hosts?|nodes?|machines?)\s+of\s+(.+)", group, re.IGNORECASE | re.DOTALL
        )
        if match is None:
            inside = list(_host(group, "host0"))
            sizes = _sizes(inside)
            if len(sizes) < 2:
                yield from inside
                continue
            note = even_note(inside[0].asked, sizes)
            for host, size in enumerate(sizes, first_host):
                yield from [replace(inside[0], host=f"host{host}", note=note)] * size
            first_host += len(sizes)
            continue
        hosts = _number(match[1], "hosts")
        for host in range(first_host, first_host + hosts):
            yield from _host(match[2], f"host{host}")
        first_host += hosts


def _sizes(inside: list[_Wanted]) -> list[int]:
    """Cards on each machine, where one was not said to have them all: equal ones are divided, others stay together."""
    first = inside[0]
    if first.name is not None or any(item != first for item in inside):
        return [len(inside)]
    return even_hosts(len(inside), first.row or hardware_table()["generic"])


def _host(text: str, host: str) -> Iterator[_Wanted]:
    """Parse "8xA100-40GB", or several joined by "+", all in one machine."""
    for item in text.split("+"):
        yield from _item(item.strip(), host)


def _item(text: str, host: str) -> Iterator[_Wanted]:
    """Parse cuda:0=20GiB | 24GiB | H100-80GB | 8xH100-80GB | 16 H200 | cuda:0."""
    name, equals, size = text.partition("=")
    if equals:
        yield _Wanted(name=canonical_name(name), memory_bytes=_size(size, f"memory of {name.strip()!r}"), host=host)
        return
    if re.fullmatch(r"\s*[a-z]+(:[0-9]+)?\s*", text) and text.strip().partition(":")[0] in DEVICE_TYPES:
        yield _Wanted(name=canonical_name(text), host=host)
        return
    nearly = _NEARLY.fullmatch(text)
    if (nearly is not None and nearly[1].lower() in (*DEVICE_TYPES, "gpu")) or re.fullmatch(r"[a-z]+:[0-9]+", text):
        canonical_name(text)  # raises: says which name was meant
    count = 1
    repeated = re.fullmatch(r"([0-9]+)\s*[xX×*]\s*(.+)", text, re.DOTALL)
    if repeated is None and not _is_size(text) and not _is_hardware(text):
        repeated = re.fullmatch(r"([0-9]+)\s+(.+)", text, re.DOTALL)
    if repeated is not None:
        count, text = _number(repeated[1], "devices"), repeated[2].strip()
    if re.fullmatch(r"[0-9.]+\s*[kmgt]?b(it)?p?s", text, re.IGNORECASE):
        raise SpecError(f"{shown(text)} is neither a size nor the speed of a network. Write for example 1600Gb/s.")
    if re.match(r"[0-9.]", text) and not _is_hardware(text):
        wanted = _Wanted(memory_bytes=_size(text, "a device's memory"), host=host, asked=text)
    else:
        row = find_hardware(text)
        wanted = _Wanted(row=row, memory_bytes=row.memory_bytes, host=host, asked=text)
    for _ in range(count):
        yield wanted


def _limited(wanted: Iterator[_Wanted]) -> Iterator[_Wanted]:
    """Stop before a typing error makes a million devices."""
    for count, item in enumerate(wanted):
        if count == MAX_DEVICES:
            raise SpecError(f"more than {MAX_DEVICES} devices. That is the most one plan may use.")
        yield item


def _build(wanted: list[_Wanted], words: HostWords, text: str) -> Cluster:
    named, notes = _named(wanted), list[str]()
    for name, count in Counter(item.name for item in named).items():
        if count > 1:
            raise SpecError(f"device {name!r} is listed twice in {shown(text)}. List every device once.")
    active = active_cluster.get()
    shares = sum(1 for item in named if item.memory_bytes is None and str(item.name).startswith("cpu"))
    devices = []
    for item in named:
        device = _device(item, active)
        if item.memory_bytes is None and device.kind == "cpu" and active is None:
            # cpu:0, cpu:1, … are one memory: each gets its part of it.
            device = replace(device, memory_bytes=device.memory_bytes // shares)
        devices.append(device)
        if active is None and (item.memory_bytes is None or device.kind == "cpu"):  # its rates were not given
            notes += detected_notes(device.name)
    hosts = make_hosts(devices, words)
    devices = with_networks(devices, hosts)
    notes += _assumptions(wanted, devices) + network_note(devices, hosts, words)
    both = [] if active is None else [device.name for device in devices if device.name in active.names]
    known = {(a, b): active.link(a, b) for a in both for b in both if a != b} if active is not None else {}
    links = make_links(devices, hosts, known)
    return Cluster(devices=tuple(devices), links=links, spec=text, notes=tuple(dict.fromkeys(notes)))


def _named(wanted: list[_Wanted]) -> list[_Wanted]:
    """Give every device its name: cuda:0, cuda:1, … in order over all machines; an Apple machine has one, mps."""
    named: list[_Wanted] = []
    cards = 0
    for item in wanted:
        apple = item.row is not None and item.row.vendor == "apple"
        name = item.name or ("mps" if apple else f"cuda:{cards}")
        cards += item.name is None and not apple
        if apple and "mps" in [one.name for one in named]:
            raise SpecError("an Apple machine has one GPU, and torch runs no model over several of them. Name one.")
        named.append(replace(item, name=name))
    return named


def _device(item: _Wanted, active: Cluster | None) -> Device:
    assert item.name is not None
    if active is not None and item.name in active.names:
        device = active.device(item.name)
        return replace(device, memory_bytes=item.memory_bytes or device.memory_bytes)
    if item.memory_bytes is None:
        device = detect_device(item.name)
        if device.memory_bytes <= 0:
            raise SpecError(f"device {item.name!r} has no free memory. Stop what uses it, or leave it out.")
        return replace(device, host=item.host)
    if item.row is not None:
        return make_device(item.row, name=item.name, memory_bytes=item.memory_bytes, host=item.host)
    kind = item.name.partition(":")[0]
    row = hardware_table()[kind if kind in ("cpu", "disk") else "generic"]
    if item.name in accelerator_names():
        here = detect_device(item.name)
        return replace(
            here, memory_bytes=item.memory_bytes, overhead_bytes=min(here.overhead_bytes, item.memory_bytes // 16)
        )
    return make_device(row, name=item.name, memory_bytes=item.memory_bytes, host=item.host, plain_size=True)


def _assumptions(wanted: list[_Wanted], devices: list[Device]) -> list[str]:
    """What the figures rest on that the user did not say, in sentences."""
    notes = []
    for item in {(item.asked, item.note): item for item in wanted}.values():
        row = item.row
        if item.note:
            notes.append(item.note)
        if row is not None and row.cards_per_host > MACHINE:
            notes.append(
                f"Up to {row.cards_per_host} {row.name} share one NVLink domain. It counts as one host here, "
                "though several machines are in it."
            )
        if row is not None and re.sub(r"\W", "", item.asked).lower() != re.sub(r"\W", "", row.name).lower():
            notes.append(f"{item.asked} is taken as {row.name} with {format_bytes(row.memory_bytes)} usable.")
        notes += bfloat16_notes(row) if row is not None else []
        if row is not None and "all" in row.unverified:
            notes.append(f"The figures of {row.name} could not be verified in a source.")
    if any(device.kind == "generic" for device in devices):
        generic = hardware_table()["generic"]
        rate, bandwidth = generic.flops_per_second["bfloat16"] / 1e12, generic.bytes_per_second / 1e9
        peaks = f"{rate:g} bf16 TFLOP/s, {bandwidth:g} GB/s, {generic.host_link}"
        notes.append(f"Where only the memory of a device is known, peaks are assumed: {peaks}.")
        cards = Counter(device.host for device in devices if device.kind == "generic")
        if len(cards) == 1 and (count := cards.total()) > MACHINE:
            notes.append(f"All {count} devices are taken to be in one host; say otherwise as in '2 hosts of 8x24GiB'.")
    return notes


def _simulated(cluster: Cluster) -> Cluster:
    """The same cluster as cpu:0, cpu:1, … with exact memory: no overhead and no rounding."""
    renamed = {name: f"cpu:{index}" for index, name in enumerate(cluster.names)}
    devices = tuple(replace(d, name=renamed[d.name], overhead_bytes=0, block_bytes=1) for d in cluster.devices)
    moved = [replace(one, source=renamed[one.source], destination=renamed[one.destination])
             for one in cluster.links.known.values()]  # fmt: skip
    known = {(one.source, one.destination): one for one in moved}
    return replace(cluster, devices=devices, links=make_links(devices, tuple(cluster.links.hosts.values()), known))


def _is_file(spec: "str | os.PathLike[str]") -> bool:
    """A path object, or a text that can only be a path."""
    return not isinstance(spec, str) or spec.strip().endswith(".json") or (os.sep in spec and os.path.isfile(spec))


def _is_size(text: str) -> bool:
    return re.fullmatch(r"\s*[0-9]+(\.[0-9]+)?\s*[kKmMgGtT]?[iI]?[bB]\s*", text) is not None


def _is_hardware(text: str) -> bool:
    try:
        find_hardware(text)
    except SpecError:
        return False
    return True


def _number(digits: str, what: str) -> int:
    count = int(digits) if len(digits) < 7 else MAX_DEVICES + 1
    if count == 0:
        raise SpecError(f"0 {what} were asked for. Leave that part out, or give at least 1.")
    if count > MAX_DEVICES:
        raise SpecError(f"{digits[:12]} {what} were asked for; {MAX_DEVICES} devices are the most one plan may use.")
    return count


def _size(size: Any, what: str) -> int:
    if isinstance(size, float) and math.isfinite(size):
        size = int(size)
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise SpecError(f"{what} is {shown(size)}, not a size. Write for example 24GiB or 80GB.")
    try:
        return parse_bytes(size)
    except SpecError as error:
        raise SpecError(f"{what}: {error}") from None


def _spec_text(spec: Any) -> str:
    """The spec in one line, in a form that can be given again."""
    if isinstance(spec, Mapping):
        sizes = {canonical_name(name): size for name, size in spec.items()}
        return ",".join(f"{name}={size if isinstance(size, str) else f'{size}B'}" for name, size in sizes.items())
    if isinstance(spec, (list, tuple)):
        return ",".join(str(item) if isinstance(item, str) else canonical_name(item) for item in spec)
    return str(spec).strip()

"""The hardware table: published figures of each card, where they were read, and what of them a model really gets."""

import csv
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from types import MappingProxyType

from autoshard.cluster.device import Device
from autoshard.errors import SpecError

# Achievable share of a published peak. Compute: an H200 reached 769 to 798 of 989 bf16 TFLOP/s on its best matrix size
# (0.78 to 0.81) and real layers are smaller. Memory: 4.3 of 4.8 TB/s on the same card (0.90). Links: copies and
# collectives are commonly reported at 65 to 85 % of the nominal rate. `calibrate` replaces all three by measurements.
COMPUTE_EFFICIENCY = 0.75
MEMORY_EFFICIENCY = 0.9
LINK_EFFICIENCY = 0.8

# Context, loaded kernels and the matrix library's workspace of one process on one card. Reports go from 500 MB (lazy
# loading, CUDA 12) to 800 MB (older drivers); the workspace is 8 MiB, 32 MiB on the newest cards.
CONTEXT_BYTES = 768 * 2**20
WORKSPACE_BYTES = 32 * 2**20
OVERHEAD_BYTES = CONTEXT_BYTES + WORKSPACE_BYTES
# torch's caching allocator rounds every request up to this (kMinBlockSize).
CUDA_BLOCK_BYTES = 512
# Host time of one op, run op by op: as fitted on published runs (engine/efficiency.csv), on a CPU as well.
LAUNCH_SECONDS = 3.3e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One row of the table: published peaks, dense (no sparsity), in bytes and FLOP per second.

    Attributes:
        memory_bytes: what a process can get: as torch reports it where known, else the nominal gigabytes; 0: unknown.
        peer_bytes_per_second: one direction between two cards of one machine; 0: only through the host.
        peer_topology: who has a peer link: "switch" and "mesh": every pair; "pairs": cards 0-1, 2-3, ...
        host_bytes_per_second: one direction between the card and the machine's memory.
        peers_bytes_per_second: one direction between a card and all other cards of its machine together.
        cards_per_host: of a usual machine, or of one NVLink domain; 0: not divided.
        nics_per_host: network cards for the model's traffic; nic_bytes_per_second: of one; 0: not known.
        torch_name: regular expression for the name torch reports.
        unverified: fields whose figure was not read in a source ("all": every one).
    """

    name: str
    vendor: str
    arch: str
    nominal_gb: float
    memory_bytes: int
    bytes_per_second: float
    flops_per_second: dict[str, float]
    peer_link: str
    peer_bytes_per_second: float
    peer_topology: str
    host_link: str
    host_bytes_per_second: float
    peers_bytes_per_second: float
    cards_per_host: int
    nics_per_host: int
    nic_bytes_per_second: float
    torch_name: str
    aliases: tuple[str, ...]
    source: str
    host_source: str
    unverified: tuple[str, ...]

    @property
    def is_card(self) -> bool:
        """A thing that can be asked for by name in a device spec, unlike the generic rows."""
        return self.memory_bytes > 0


@cache
def hardware_table() -> dict[str, Hardware]:
    """Read the table that comes with the package: name -> row."""
    text = resources.files("autoshard.cluster").joinpath("hardware.csv").read_text(encoding="utf-8")
    return {row["name"]: _row(row) for row in csv.DictReader(text.splitlines())}


def find_hardware(text: str) -> Hardware:
    """Return the row meant by "H100-80GB", "a100 40gb", "RTX 4090"…; raise `SpecError` with the closest names.

    A memory size in the name must be the card's own: "H100-40GB" is refused, nobody should plan for what is not made.
    """
    row = _names().get(_normal(text))
    if row is not None:
        return row
    wanted = re.sub(r"^(nvidia|amd|geforce)+", "", _normal(text))
    shown = {_normal(name): name for name in known_names()}
    # The longest beginning that some name contains ("h100" of "h10040gb"), else the most similar spellings.
    beginnings = (wanted[:length] for length in range(len(wanted), 1, -1))
    close = next(filter(None, ([name for key, name in shown.items() if part in key] for part in beginnings)), [])
    if len(close) > 4:  # of many, those that are spelled most alike
        close.sort(key=lambda name: -difflib.SequenceMatcher(None, wanted, _normal(name)).ratio())
    if not close:
        close = [shown[key] for key in difflib.get_close_matches(wanted, list(shown), n=3, cutoff=0.5)]
    hint = f"Closest: {', '.join(close[:4])}." if close else "`autoshard devices --known` lists what is known."
    raise SpecError(
        f"unknown hardware {text[:60]!r}. {hint} For a card that is not listed give its memory, as in 8x48GiB; "
        "of cpu and disk, as in cpu=60GiB."
    )


def match_torch_name(name: str, memory_bytes: int = 0) -> Hardware | None:
    """Return the row of a device name as torch reports it ("NVIDIA H100 80GB HBM3"); None if it is not in the table.

    `memory_bytes`: of the device, by which cards of one name are told apart (an RTX 3080 of 10 and of 12 GB); 0: not
    known, which gives the smallest.
    """
    rows = [row for row in hardware_table().values() if row.torch_name and re.search(row.torch_name, name)]
    # "NVIDIA GB200" matches B200 and GB200: the longest pattern is the most specific.
    return min(rows, key=lambda row: (-len(row.torch_name), abs(row.memory_bytes - memory_bytes)), default=None)


def bfloat16_notes(row: Hardware) -> list[str]:
    """Say if a card has no units for bfloat16, and how fast float16 is there; [] for others."""
    float16, bfloat16, float32 = (row.flops_per_second[name] for name in ("float16", "bfloat16", "float32"))
    if row.vendor != "nvidia" or bfloat16 > float32:
        return []
    faster = f"float16 is {float16 / float32:.0f} times as fast" if float16 > float32 else "so is float16"
    return [f"{row.name} has no bfloat16 units: bfloat16 is counted at its float32 rate; {faster}."]


def known_names() -> list[str]:
    """Names to suggest, in table order."""
    return [row.name for row in hardware_table().values() if row.is_card]


def make_device(row: Hardware, *, name: str, memory_bytes: int, host: str, plain_size: bool = False) -> Device:
    """Build a device with achievable rates from a row.

    `plain_size`: the memory was given by hand. The overhead is then at most a sixteenth of it, so that small imagined
    devices stay usable and more memory never means a smaller budget.
    """
    on_cpu = row.arch in ("cpu", "disk")
    overhead = 0 if on_cpu or row.vendor == "apple" else OVERHEAD_BYTES
    if plain_size:
        overhead = min(overhead, memory_bytes // 16)
    return Device(
        name=name,
        kind=row.name,
        memory_bytes=memory_bytes,
        flops_per_second={dtype: rate * COMPUTE_EFFICIENCY for dtype, rate in row.flops_per_second.items()},
        bytes_per_second=row.bytes_per_second * MEMORY_EFFICIENCY,
        launch_seconds=LAUNCH_SECONDS,
        overhead_bytes=overhead,
        block_bytes=1 if on_cpu or row.vendor == "apple" else CUDA_BLOCK_BYTES,
        host=host,
    )


FLOAT64_PART: Mapping[str, float] = MappingProxyType({
    "sm60": 1 / 2, "sm61": 1 / 32, "sm70": 1 / 2, "sm75": 1 / 32, "sm86": 1 / 64, "sm89": 1 / 64, "sm100": 1 / 2,
    "sm120": 1 / 64, "gfx950": 1 / 2, "gfx1100": 1 / 32, "cpu": 1 / 2, "B300": 1 / 60, "GB300": 1 / 60, "H20": 1 / 44,
})  # fmt: skip
"""Rate of float64 as a part of that of float32, by architecture, or by card where that differs; 1 for others.

Tensor cores bring it to that of float32 on A100 and H100 (datasheets: 19.5, 67). Others: results per clock in the CUDA
programming guide, "Throughput of Native Arithmetic Instructions"; 78 of 160 on the two of a GB200; 1.25 of 75 on B300
(https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html); 1 of 44 on H20; AMD: torch's device table."""


_TEXTS = ("name", "vendor", "arch", "peer_link", "peer_topology", "host_link", "torch_name", "source", "host_source")


def _row(row: dict[str, str]) -> Hardware:
    def number(column: str) -> float:
        return float(row[column] or 0)

    fp32 = number("fp32_tflops")
    # Without units for a 16-bit format its work runs at the float32 rate.
    rates = {
        "bfloat16": number("bf16_tflops") or fp32,
        "float16": number("fp16_tflops") or fp32,
        "float32": fp32,
        "float64": fp32 * FLOAT64_PART.get(row["name"], FLOAT64_PART.get(row["arch"], 1.0)),
        "default": fp32,
    }
    usable = number("usable_gib")
    return Hardware(
        **{name: row[name] for name in _TEXTS},
        nominal_gb=number("memory_gb"),
        memory_bytes=int(usable * 2**30) if usable else int(number("memory_gb") * 1e9),
        bytes_per_second=number("memory_gb_per_s") * 1e9,
        flops_per_second={dtype: rate * 1e12 for dtype, rate in rates.items() if rate},
        peer_bytes_per_second=number("peer_gb_per_s") * 1e9 / 2,
        host_bytes_per_second=number("host_gb_per_s") * 1e9 / 2,
        peers_bytes_per_second=(number("peers_gb_per_s") or number("peer_gb_per_s")) * 1e9 / 2,
        cards_per_host=int(number("cards_per_host")),
        nics_per_host=int(number("nics_per_host")),
        nic_bytes_per_second=number("nic_gbit_per_s") * 1e9 / 8,
        aliases=tuple(filter(None, row["aliases"].split("|"))),
        unverified=tuple(filter(None, row["unverified"].split("|"))),
    )


def _normal(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def _names() -> dict[str, Hardware]:
    """Every accepted spelling, normalised. A row's own name wins over another row's alias, and the first of these."""
    rows = [row for row in hardware_table().values() if row.is_card]
    names = {
        _normal(spelling): row
        for row in reversed(rows)
        for alias in (row.name, *row.aliases)
        for spelling in _spellings(alias, row.nominal_gb)
    }
    return names | {_normal(row.name): row for row in rows}


def _spellings(name: str, nominal_gb: float) -> Iterator[str]:
    """H100-SXM, 80 -> H100-SXM, H100-SXM-80GB, H100-SXM-80GiB, H100-SXM-80, each also after the vendor's name."""
    bare = re.sub(rf"-{nominal_gb:g}$", "", name)
    for prefix in ("", "nvidia", "amd", "nvidia geforce", "geforce"):
        yield prefix + name
        for suffix in ("", "GB", "GiB", "G"):
            yield f"{prefix}{bare}{nominal_gb:g}{suffix}"

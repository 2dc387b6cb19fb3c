"""Measure what the hardware table can only claim: at most two seconds per device, nothing kept between calls.

matrix products    three sizes per dtype, the best rate counts: large layers reach it, small ones are bound by the rest
copies             a device to itself (read + write) and to every other device, a small and a large one; not between
                   CPUs of one machine, which are simulated, or processes with its loopback between them
op floor           the time of an op too small to do anything
disk               what it gives that is not in memory; a link from it is as fast as the slower of it and the other's
"""

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.detect import accelerator_names
from autoshard.cluster.device import Device, Link
from autoshard.cluster.hardware import LINK_EFFICIENCY, hardware_table
from autoshard.common.progress import tell

DEVICE_SECONDS = 1.4
"""Spent on one device's own rates; its links get the rest of the two seconds."""
LINKS_SECONDS = 0.5
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GEMM_SIZES = {"cpu": (256, 512, 1024), "accelerator": (2048, 4096, 8192)}
COPY_BYTES = {"cpu": 2**27, "accelerator": 2**28}
SMALL_BYTES = 4096
BLOCK_BYTES = 4 << 20
LEAST_BLOCKS, MOST_BLOCKS = 4, 32
WRITE_SECONDS = 0.8
READERS = 4
HOST_PER_OP = 6.6
"""Host time of an op of a model over that of a bare op; modules and views take the rest. GPUs: 33 us (fitted on
published runs) over 5. A small decoder on a CPU: 51 us over 7.5."""


def calibrate(cluster: Cluster) -> Cluster:
    """Return the cluster with measured rates for the devices of this machine; other devices keep the table's figures.

    Memory sizes are not touched. Devices of one kind are measured one by one: two cards of a kind may differ.
    """
    here = set(accelerator_names())
    # cpu, cpu:0, cpu:1, … are one processor.
    real = {d.name: "cpu" if d.name.startswith("cpu") else d.name for d in cluster.devices}
    real = {name: target for name, target in real.items() if target == "cpu" or target in here}
    measured: dict[str, dict[str, Any]] = {}
    for number, device in enumerate(cluster.devices):
        tell("devices", number, len(cluster.devices))
        target = real.get(device.name)
        if target is not None and target not in measured:
            measured[target] = measure_device(device, torch.device(target))
    devices = [replace(device, **measured.get(real.get(device.name, ""), {})) for device in cluster.devices]
    known = _measure_links(cluster, real)
    disk = measure_disk(".") if "disk" in cluster.names else None
    if disk is not None:
        real["disk"] = "disk"
        devices = [replace(d, bytes_per_second=disk[0], measured=True) if d.name == "disk" else d for d in devices]
        for other in cluster.names:
            for pair in (("disk", other), (other, "disk")) if other != "disk" else ():
                known[pair] = _of_disk(known.get(pair) or cluster.link(*pair), cluster, disk)
    missing = [name for name in cluster.names if name not in real]
    notes = tuple(note for note in cluster.notes if "calibrate" not in note)
    if missing:
        notes += (f"Not measured, because not on this machine: {', '.join(missing)}.",)
    return replace(cluster, devices=tuple(devices), notes=notes).with_known(known)


def measure_device(device: Device, target: torch.device) -> dict[str, Any]:
    """Return the fields of a `Device` that are measured, within `DEVICE_SECONDS`."""
    size = "cpu" if target.type == "cpu" else "accelerator"
    # A card that is nearly full is measured with what fits: three matrices in an eighth of it.
    room = device.memory_bytes // 8 if size == "accelerator" else 2**40
    sizes = tuple(n for n in GEMM_SIZES[size] if 3 * 4 * n * n <= room) or (256,)
    nbytes = min(COPY_BYTES[size], room // 2)
    flops = {}
    for dtype in DTYPES:
        rate = _gemm_rate(target, dtype, sizes, DEVICE_SECONDS / (len(DTYPES) + 1))
        flops[str(dtype).removeprefix("torch.")] = rate
    flops["default"] = flops["float32"]
    source = torch.ones(nbytes // 4, device=target)
    into = torch.empty_like(source)
    copy_seconds = _seconds(lambda: into.copy_(source), target, 0.2)
    tiny = torch.ones(8, device=target)
    return {
        "flops_per_second": flops,
        "bytes_per_second": 2 * nbytes / copy_seconds,
        "launch_seconds": HOST_PER_OP * _seconds(lambda: tiny.add_(1), target, 0.02, repeat=200),
        "measured": True,
    }


def _gemm_rate(target: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], budget_seconds: float) -> float:
    """Best FLOP/s over the sizes; a size that would exceed the budget at the rate seen so far is left out."""
    best = 0.0
    started = time.perf_counter()
    for size in sizes:
        flops = 2.0 * size**3
        left = budget_seconds - (time.perf_counter() - started)
        if best and 2 * flops / best > left:
            break
        a = torch.ones(size, size, device=target, dtype=dtype)
        best = max(best, flops / _seconds(lambda a=a: a @ a, target, left / 4))  # type: ignore[misc]
    return best


def _measure_links(cluster: Cluster, real: Mapping[str, str]) -> dict[tuple[str, str], Link]:
    """Measure each link between two real devices once."""
    pairs = {(one, other) for one in real.values() for other in real.values() if one != other}
    budget = LINKS_SECONDS * len(set(real.values())) / max(len(pairs), 1)
    rates = {pair: _link_rate(torch.device(pair[0]), torch.device(pair[1]), budget) for pair in sorted(pairs)}
    known = {}
    for one, source in real.items():
        for other, destination in real.items():
            if source != destination:
                rate, latency = rates[source, destination]
                known[one, other] = Link(source=one, destination=other, bytes_per_second=rate, latency_seconds=latency)
    return known


def _of_disk(link: Link, cluster: Cluster, disk: tuple[float, float]) -> Link:
    """Return a link of the disk with its measured rate and latency."""
    other = cluster.device(link.destination if link.source == "disk" else link.source)
    table = hardware_table()
    host_rate = table.get(other.kind, table["generic"]).host_bytes_per_second * LINK_EFFICIENCY
    rate = disk[0] if other.kind == "cpu" else min(disk[0], host_rate)
    return replace(link, bytes_per_second=rate, latency_seconds=disk[1])


def _link_rate(source: torch.device, destination: torch.device, budget_seconds: float) -> tuple[float, float]:
    """Bytes per second and latency of a copy as the runtime issues it."""
    nbytes = COPY_BYTES["cpu"]
    small = torch.ones(SMALL_BYTES, dtype=torch.uint8, device=source)
    large = torch.ones(nbytes, dtype=torch.uint8, device=source)

    latency = _seconds(lambda: small.to(destination), destination, budget_seconds / 4, repeat=5)
    seconds = _seconds(lambda: large.to(destination), destination, budget_seconds / 2)
    return nbytes / max(seconds - latency, 1e-9), latency


def _seconds(run: Callable[[], object], target: torch.device, budget_seconds: float, repeat: int = 1) -> float:
    """Least time of `run` over as many rounds as the budget allows, after one warm-up; `repeat` runs per round."""
    run()
    _wait(target)
    best, deadline = float("inf"), time.perf_counter() + budget_seconds
    while True:
        started = time.perf_counter()
        for _ in range(repeat):
            run()
        _wait(target)
        now = time.perf_counter()
        best = min(best, (now - started) / repeat)
        if now >= deadline:
            return max(best, 1e-9)


def _wait(target: torch.device) -> None:
    if target.type != "cpu":
        torch.accelerator.synchronize(target)


def measure_disk(directory: str) -> tuple[float, float] | None:
    """Return bytes per second and the latency of a small read, in about 1.5 s; None if it can't be measured there.

    A disk may give what was just written faster than the rest, out of a cache of its own.
    """
    if not hasattr(os, "posix_fadvise"):  # Linux has it
        return None
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=directory, buffering=0) as file:
        number, blocks = file.fileno(), 0
        deadline = time.perf_counter() + WRITE_SECONDS
        while blocks < LEAST_BLOCKS or (blocks < MOST_BLOCKS and time.perf_counter() < deadline):
            if os.write(number, os.urandom(BLOCK_BYTES)) < BLOCK_BYTES:  # which no disk can make smaller
                raise OSError("the disk is full")
            os.fsync(number)  # else most of the time would be spent here after the last one
            blocks += 1

        def seconds(read: Callable[[], object]) -> float:
            """Of reading what is not in memory."""
            os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.perf_counter()
            read()
            return time.perf_counter() - started

        def read(at: int) -> int:
            return os.preadv(number, [bytearray(BLOCK_BYTES)], at * BLOCK_BYTES)

        with ThreadPoolExecutor(READERS) as readers:  # a few at a time, as weights are read
            whole = min(seconds(lambda: list(readers.map(read, range(blocks)))) for _ in range(2))
        small = min(seconds(lambda at=at: os.pread(number, SMALL_BYTES, at * BLOCK_BYTES)) for at in range(blocks))  # type: ignore[misc]
        return blocks * BLOCK_BYTES / whole, small
    return None

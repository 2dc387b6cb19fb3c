"""The devices of this machine, with the memory that is free now."""

import os
from dataclasses import replace
from pathlib import Path

import torch

from autoshard.cluster.device import Device
from autoshard.cluster.hardware import (
    CONTEXT_BYTES,
    WORKSPACE_BYTES,
    bfloat16_notes,
    hardware_table,
    make_device,
    match_torch_name,
)
from autoshard.common.host_memory import available_bytes
from autoshard.common.sizes import format_bytes
from autoshard.errors import SpecError

# Asking for the free memory creates the context, so the free figure is without it; kernels loaded later still come.
LATER_KERNELS_BYTES = CONTEXT_BYTES // 3


def accelerator_type() -> str | None:
    """Return "cuda", "mps", "xpu"… or None if this machine has no accelerator that torch can use."""
    if not torch.accelerator.is_available():
        return None
    current = torch.accelerator.current_accelerator()
    return current.type if current is not None else None


def accelerator_names() -> list[str]:
    """Return the accelerators torch sees here, in index order: ["cuda:0", "cuda:1"]; [] if there are none."""
    kind = accelerator_type()
    if kind is None:
        return []
    return ["mps"] if kind == "mps" else [f"{kind}:{index}" for index in range(torch.accelerator.device_count())]


def detect_device(name: str) -> Device:
    """Look at one device of this machine. Raises `SpecError` if it is not here; "cpu:1" means the plain CPU."""
    kind, _, index = name.partition(":")
    if kind == "cpu":
        return make_device(hardware_table()["cpu"], name=name, memory_bytes=free_host_bytes(), host="host0")
    if name == "disk":
        stat = os.statvfs(".")
        return make_device(
            hardware_table()["disk"], name=name, memory_bytes=stat.f_bavail * stat.f_frsize, host="host0"
        )
    here = accelerator_names()
    if name not in here:
        found = f"torch sees {', '.join(here)} here" if here else "torch sees no accelerator here"
        raise SpecError(
            f"device {name!r} does not exist on this machine: {found}. To plan for another machine give the memory or "
            f"the hardware, as in {{{name!r}: '24GiB'}}, '2x24GiB' or '8xH100-80GB'."
        )
    number = int(index or 0)
    row = match_torch_name(_torch_name(kind, number), _total_bytes(kind, number)) or hardware_table()["generic"]
    device = make_device(row, name=name, memory_bytes=_free_bytes(kind, number), host="host0")
    return replace(device, overhead_bytes=LATER_KERNELS_BYTES + WORKSPACE_BYTES) if device.overhead_bytes else device


def detected_notes(name: str) -> list[str]:
    """What a person should know about figures that could not be detected."""
    kind, _, index = name.partition(":")
    if kind in ("cpu", "disk"):
        return [f"Rates of {kind} devices differ widely between machines: calibrate to measure these."]
    return table_notes(_torch_name(kind, int(index or 0)), _total_bytes(kind, int(index or 0)))


def table_notes(torch_name: str, memory_bytes: int) -> list[str]:
    """Say what the rates of a device rest on if the hardware table lacks it, or has it with another size of memory."""
    row = match_torch_name(torch_name, memory_bytes)
    if row is None:
        return [f"{torch_name} is not in the hardware table: its rates are those of a generic card until calibrated."]
    if 0.8 < memory_bytes / row.memory_bytes < 1.25:
        return bfloat16_notes(row)
    here, there = format_bytes(memory_bytes), format_bytes(row.memory_bytes)
    return [
        f"{torch_name} has {here} here; its rates are those of {row.name} with {there} until calibrated.",
        *bfloat16_notes(row),
    ]


def free_host_bytes() -> int:
    """Memory this process can still get: what the system has available, within the limit of its control group."""
    available = available_bytes()
    if available is None:
        available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        limit_bytes, used_bytes = _read_number(limit), _read_number(used)
        if limit_bytes is not None and used_bytes is not None:
            available = min(available, max(limit_bytes - used_bytes, 0))
    return available


def _read_number(path: str) -> int | None:
    """The int in a file; None if the file is not there or says "max"."""
    file = Path(path)
    if not os.access(file, os.R_OK):
        return None
    text = file.read_text().strip()
    return int(text) if text.isdecimal() else None


def _torch_name(kind: str, index: int) -> str:
    if kind == "mps":
        return torch.backends.mps.get_name()
    module = torch.get_device_module(kind)
    return str(module.get_device_name(index)) if hasattr(module, "get_device_name") else kind


def _total_bytes(kind: str, index: int) -> int:
    """Memory of the whole device, used or not: by it, cards of one name are told apart."""
    if kind == "mps":
        return int(torch.mps.recommended_max_memory())
    return int(torch.get_device_module(kind).mem_get_info(index)[1])


def _free_bytes(kind: str, index: int) -> int:
    """Free on the card, plus what this process has cached and does not use: torch will use that first."""
    if kind == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.current_allocated_memory())
    module = torch.get_device_module(kind)
    free, _total = module.mem_get_info(index)
    return int(free) + int(module.memory_reserved(index)) - int(module.memory_allocated(index))

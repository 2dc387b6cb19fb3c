"""Look at this machine with the eyes of somebody whose run has just failed: what is there, what is wrong, what to do.

Every check returns findings and raises nothing: what can't be looked at is a finding too.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from autoshard.cluster.detect import accelerator_names, detect_device, free_host_bytes
from autoshard.common.sizes import format_bytes
from autoshard.errors import AutoshardError, first_line
from autoshard.runtime.devices import check_copies, goes_through_host

Status = Literal["good", "note", "bad"]
LEAST_TORCH = (2, 11)
LEAST_SHARED_BYTES = 1 << 30
_TALK_SECONDS = 60.0
_MARKS = {"good": ("ok", "green"), "note": ("note", "yellow"), "bad": ("fix", "bold red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found. "note" may matter, "bad" will; then `fix` says what would help."""

    check: str
    status: Status
    found: str
    fix: str = ""


def examine() -> Iterator[Finding]:
    """Run the checks one after another and yield what each found; at most about 10 s in all."""
    for check in _CHECKS:
        yield from check()


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line per check, what to do below it, and a sentence at the end."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.status]
        table.add_row(Text(mark, style=style), finding.check, Text(finding.found))
        if finding.fix:
            table.add_row("", "", Text(finding.fix, style="yellow"))
    console.print(table)
    bad = sum(finding.status == "bad" for finding in findings)
    words = "Nothing is wrong here." if not bad else f"{bad} thing{'s' if bad > 1 else ''} to fix."
    console.print(Text(f"\n{words}", style="bold"))


def _finding(check: str, found: str, fix: str = "", *, status: Status = "bad") -> Finding:
    """A finding that is good where there is nothing to fix."""
    return Finding(check=check, status=status if fix else "good", found=found, fix=fix)


def _versions() -> Iterator[Finding]:
    yield _finding("python", sys.version.split()[0], "Use 3.11 or later." if sys.version_info < (3, 11) else "")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    least = f"autoshard is tested with {'.'.join(map(str, LEAST_TORCH))} and later: pip install -U torch"
    yield _finding("torch", f"{torch.__version__}, {built}", least if version < LEAST_TORCH else "")
    for name, use in (
        ("accelerate", ""), ("safetensors", ""), ("transformers", "Hugging Face models"), ("torchao", 'dtype="int8"'),
    ):  # fmt: skip
        if importlib.util.find_spec(name) is not None:
            yield _finding(name, importlib.metadata.version(name))
        else:
            said = f"not installed; for {use}: pip install {name}" if use else "not installed"
            yield _finding(name, said, "" if use else f"pip install {name}")


def _devices() -> Iterator[Finding]:
    names = accelerator_names()
    if not names:
        found = "torch sees no accelerator; models run on the CPU, and plans for other machines can be made"
        unused = shutil.which("nvidia-smi") is not None and not torch.version.cuda
        fix = "There is an NVIDIA driver here: install a CUDA build of torch." if unused else ""
        yield _finding("devices", found, fix)
        return
    for name in names:
        try:
            device = detect_device(name)
        except (AutoshardError, RuntimeError) as error:
            fix = "Restart what holds it, or leave it out with CUDA_VISIBLE_DEVICES."
            yield _finding(name, f"can't be used: {first_line(error)}", fix)
            continue
        total = _total_bytes(name)
        found = f"{device.kind}, {format_bytes(device.memory_bytes)} free"
        if total and device.memory_bytes < 0.8 * total:
            fix = "Other processes hold it (nvidia-smi shows them); plans count on what is free."
            yield _finding(name, f"{found} of {format_bytes(total)}", fix, status="note")
        else:
            yield _finding(name, found)
    yield from _copies([torch.device(name) for name in names])


def _total_bytes(name: str) -> int:
    module = torch.get_device_module(name.partition(":")[0])
    return int(module.mem_get_info(name)[1]) if hasattr(module, "mem_get_info") else 0


def _copies(devices: Sequence[torch.device]) -> Iterator[Finding]:
    if len(devices) < 2:
        return
    try:
        check_copies(devices)
    except (AutoshardError, RuntimeError) as error:
        yield _finding("copies", first_line(error), "Run one device at a time to find it.")
        return
    wrong = [f"{a} to {b}" for a in devices for b in devices if a != b and goes_through_host(a, b)]
    if wrong:
        fix = "Direct copies change the data (often IOMMU or ACS settings of the host); they go through the host."
        yield _finding("copies", f"wrong between {', '.join(wrong[:3])}", fix, status="note")
    else:
        yield _finding("copies", f"right between all {len(devices)} devices, both ways")


def _host() -> Iterator[Finding]:
    yield _finding("memory", f"{format_bytes(free_host_bytes())} free for this process")
    shared = Path("/dev/shm")
    if shared.is_dir():
        size = shutil.disk_usage(shared).total
        fix = "Data loaders and NCCL want more: in a container start it with --shm-size=8g or --ipc=host."
        yield _finding("shared memory", f"{format_bytes(size)} in {shared}", fix if size < LEAST_SHARED_BYTES else "")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    fix = f"Threads wait for each other: export OMP_NUM_THREADS={cores}" if torch.get_num_threads() > cores else ""
    yield _finding("threads", f"{cores} cores, torch uses {torch.get_num_threads()}", fix, status="note")


_TALK = """
import sys, torch, torch.distributed as dist
backend, rank, file = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if backend == "nccl":
    torch.cuda.set_device(rank)
dist.init_process_group(backend, rank=rank, world_size=2, init_method=f"file://{file}")
x = torch.full((1000,), rank + 1.0, device="cuda" if backend == "nccl" else "cpu")
dist.all_reduce(x)
assert x.eq(3).all(), x
dist.destroy_process_group()
"""


def _processes() -> Iterator[Finding]:
    if not dist.is_available():
        fix = "Install a build of torch with torch.distributed to run one process per device."
        yield _finding("processes", "torch.distributed is not in this build", fix)
        return
    yield _talk("gloo")
    if sum(name.startswith("cuda") for name in accelerator_names()) > 1:
        missing = _finding("nccl", "not in this build of torch", "Install one that has it.")
        yield _talk("nccl") if dist.is_nccl_available() else missing


def _talk(backend: str) -> Finding:
    """Let two processes add up a tensor."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", _TALK, backend, str(rank), str(Path(folder) / "meet")],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            ) for rank in range(2)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=_TALK_SECONDS)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
                rank.communicate()
            fix = "Something stops processes of one machine from talking: a firewall, or the wrong *_SOCKET_IFNAME."
            return _finding(backend, f"no answer within {_TALK_SECONDS:.0f} s", fix)
    if any(rank.returncode for rank in ranks):
        why = next((text.strip().splitlines()[-1] for text in said if text.strip()), "a process ended without a word")
        fix = f"Set {backend.upper()}_DEBUG=INFO" if backend == "nccl" else "Set GLOO_SOCKET_IFNAME to lo."
        return _finding(backend, f"two processes can't talk: {why}", fix)
    seconds = time.monotonic() - started
    return _finding(backend, f"two processes added up a tensor ({seconds:.1f} s with start)")


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (_versions, _devices, _host, _processes)

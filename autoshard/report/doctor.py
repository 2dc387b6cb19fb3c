"""Look at this machine with the eyes of somebody whose run has just failed: what is there, what is wrong, what to do.

Every check returns findings and raises nothing: what can't be looked at is a finding too.
"""

import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from autoshard.cluster.detect import accelerator_names, detect_device, free_host_bytes
from autoshard.common.sizes import format_bytes
from autoshard.errors import AutoshardError, first_line
from autoshard.runtime.devices import check_copies, goes_through_host

Status = Literal["good", "note", "bad"]
LEAST_TORCH = (2, 11)
LEAST_SHARED_BYTES = 1 << 30
LEAST_OPEN_FILES = 1024
SLOW_DISK_BYTES_PER_SECOND = 200e6
_PROBE_BYTES = 64 << 20
_TALK_SECONDS = 60.0


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


def _versions() -> Iterator[Finding]:
    python = sys.version.split()[0]
    old = sys.version_info < (3, 11)
    yield Finding(
        check="python", status="bad" if old else "good", found=python, fix="Use 3.11 or later." if old else ""
    )
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    if version < LEAST_TORCH:
        fix = f"autoshard is tested with {'.'.join(map(str, LEAST_TORCH))} and later: pip install -U torch"
        yield Finding(check="torch", status="bad", found=f"{torch.__version__}, {built}", fix=fix)
    else:
        yield Finding(check="torch", status="good", found=f"{torch.__version__}, {built}")
    for name, use in (
        ("accelerate", ""), ("safetensors", ""), ("transformers", "Hugging Face models"), ("torchao", 'dtype="int8"'),
    ):  # fmt: skip
        if importlib.util.find_spec(name) is not None:
            yield Finding(check=name, status="good", found=importlib.metadata.version(name))
        elif use:
            yield Finding(check=name, status="good", found=f"not installed; for {use}: pip install {name}")
        else:
            yield Finding(check=name, status="bad", found="not installed", fix=f"pip install {name}")


def _devices() -> Iterator[Finding]:
    names = accelerator_names()
    if not names:
        card = shutil.which("nvidia-smi") is not None
        found = "torch sees no accelerator; models run on the CPU, and plans for other machines can be made"
        fix = (
            "There is an NVIDIA driver here: install a CUDA build of torch." if card and not torch.version.cuda else ""
        )
        yield Finding(check="devices", status="bad" if fix else "good", found=found, fix=fix)
        return
    for name in names:
        try:
            device = detect_device(name)
        except (AutoshardError, RuntimeError) as error:
            fix = "Restart what holds it, or leave it out with CUDA_VISIBLE_DEVICES."
            yield Finding(check=name, status="bad", found=f"can't be used: {first_line(error)}", fix=fix)
            continue
        total = _total_bytes(name)
        taken = total - device.memory_bytes if total else 0
        found = f"{device.kind}, {format_bytes(device.memory_bytes)} free"
        if taken > 0.2 * max(total, 1):
            fix = "Other processes hold it (nvidia-smi shows them); plans count on what is free."
            yield Finding(check=name, status="note", found=f"{found} of {format_bytes(total)}", fix=fix)
        else:
            yield Finding(check=name, status="good", found=found)
    yield from _copies(names)


def _total_bytes(name: str) -> int:
    module = torch.get_device_module(name.partition(":")[0])
    return int(module.mem_get_info(name)[1]) if hasattr(module, "mem_get_info") else 0


def _copies(names: list[str]) -> Iterator[Finding]:
    if len(names) < 2:
        return
    devices = [torch.device(name) for name in names]
    try:
        check_copies(devices)
    except (AutoshardError, RuntimeError) as error:
        yield Finding(check="copies", status="bad", found=first_line(error), fix="Run one device at a time to find it.")
        return
    wrong = [f"{a} to {b}" for a in devices for b in devices if a != b and goes_through_host(a, b)]
    if wrong:
        fix = "Direct copies change the data (often IOMMU or ACS settings of the host); they go through the host."
        yield Finding(check="copies", status="note", found=f"wrong between {', '.join(wrong[:3])}", fix=fix)
    else:
        yield Finding(check="copies", status="good", found=f"right between all {len(names)} devices, both ways")


def _memory() -> Iterator[Finding]:
    yield Finding(check="memory", status="good", found=f"{format_bytes(free_host_bytes())} free for this process")
    shared = Path("/dev/shm")
    if not shared.is_dir():
        return
    size = shutil.disk_usage(shared).total
    found = f"{format_bytes(size)} in {shared}"
    if size < LEAST_SHARED_BYTES:
        fix = "Data loaders and NCCL want more: in a container start it with --shm-size=8g or --ipc=host."
        yield Finding(check="shared memory", status="bad", found=found, fix=fix)
    else:
        yield Finding(check="shared memory", status="good", found=found)


def _limits() -> Iterator[Finding]:
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if 0 <= files < LEAST_OPEN_FILES:
        fix = f"Models in many files want more: ulimit -n {LEAST_OPEN_FILES}"
        yield Finding(check="open files", status="note", found=f"at most {files}", fix=fix)
    threads = os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    found = f"{cores} cores, OMP_NUM_THREADS {threads or 'not set'}, torch uses {torch.get_num_threads()}"
    if torch.get_num_threads() > cores:
        fix = f"Threads wait for each other: export OMP_NUM_THREADS={cores}"
        yield Finding(check="threads", status="note", found=found, fix=fix)
    else:
        yield Finding(check="threads", status="good", found=found)
    shown = [name for name in sorted(os.environ) if name.startswith(_SETTINGS)]
    if shown:
        found = ", ".join(f"{name}={os.environ[name]}" for name in shown)
        yield Finding(check="environment", status="note", found=found)


_SETTINGS = ("CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "HF_")


def _network() -> Iterator[Finding]:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        fix = (
            f"Processes find each other by it: add a line '127.0.0.1 {name}' to /etc/hosts, or set GLOO_SOCKET_IFNAME."
        )
        yield Finding(check="host name", status="bad", found=f"{name} has no address: {first_line(error)}", fix=fix)
    else:
        yield Finding(check="host name", status="good", found=name)


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
    import torch.distributed as dist

    if not dist.is_available():
        fix = "Install a build of torch with torch.distributed to run one process per device."
        yield Finding(check="processes", status="bad", found="torch.distributed is not in this build", fix=fix)
        return
    yield _talk("gloo")
    cards = [name for name in accelerator_names() if name.startswith("cuda")]
    if len(cards) > 1:
        if dist.is_nccl_available():
            yield _talk("nccl")
        else:
            yield Finding(
                check="nccl", status="bad", found="not in this build of torch", fix="Install one that has it."
            )


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
            return Finding(check=backend, status="bad", found=f"no answer within {_TALK_SECONDS:.0f} s", fix=fix)
    if any(rank.returncode for rank in ranks):
        why = next((text.strip().splitlines()[-1] for text in said if text.strip()), "a process ended without a word")
        fix = f"Set {backend.upper()}_DEBUG=INFO" if backend == "nccl" else "Set GLOO_SOCKET_IFNAME to lo."
        return Finding(check=backend, status="bad", found=f"two processes can't talk: {why}", fix=fix)
    seconds = time.monotonic() - started
    return Finding(check=backend, status="good", found=f"two processes added up a tensor ({seconds:.1f} s with start)")


def _disk() -> Iterator[Finding]:
    """Write and read a file in the current folder, past the page cache where the system allows."""
    try:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".autoshard-doctor-") as file:
            file.write(os.urandom(1 << 20) * (_PROBE_BYTES >> 20))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            started = time.monotonic()
            with open(file.name, "rb", buffering=0) as again:
                while again.read(8 << 20):
                    pass
            rate = _PROBE_BYTES / max(time.monotonic() - started, 1e-9)
    except OSError as error:
        fix = "Change to a folder that can be written and has room."
        yield Finding(check="disk", status="note", found=f"can't write here: {error.strerror}", fix=fix)
        return
    free = format_bytes(shutil.disk_usage(".").free)
    found = f"reads {rate / 1e9:.1f} GB/s here, {free} free"
    if rate < SLOW_DISK_BYTES_PER_SECOND:
        fix = "Large models load slowly from here: put them on a local disk."
        yield Finding(check="disk", status="note", found=found, fix=fix)
    else:
        yield Finding(check="disk", status="good", found=found)


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _versions, _devices, _memory, _limits, _network, _processes, _disk,
)  # fmt: skip

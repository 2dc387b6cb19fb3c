"""How long `autoshard plan` takes for Llama-3.1-405B on 16 H100, and what `import autoshard` adds to `import torch`.

    python benchmarks/plan_405b.py [rounds]

Whole processes, from start to exit, one after the other: seconds by the clock and of the processor, and the most memory
(the least of the rounds; what else runs on the machine only adds to it). Nothing is allocated for the model. The first
round also compiles the package's files, as the first run after an install in place does.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

CONFIG = Path(__file__).parent.parent / "examples" / "llama-3.1-405b" / "config.json"
PROCESSES = {
    "import torch": ["-c", "import torch"],
    "import autoshard": ["-c", "import torch, autoshard"],
    "plan 405B on 16": [
        *("-c", "from autoshard_command import run; run()"),  # as the installed command begins
        *("plan", str(CONFIG), "--devices", "16xH100-80GB", "--seq", "2048"),
    ],
}


def run(arguments: list[str]) -> tuple[float, float, int]:
    """(seconds by the clock, of the processor, bytes at the peak) of one process."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{arguments} failed with status {status}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles the package again
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in PROCESSES}
    for _ in range(rounds):
        for name, arguments in PROCESSES.items():
            found[name].append(run(arguments))
    print(f"{'':18}{'clock s':>9}{'processor s':>13}{'MiB':>6}")
    for name, runs in found.items():
        clock, processor, memory = (min(column) for column in zip(*runs, strict=True))
        print(f"{name:18}{clock:9.2f}{processor:13.2f}{memory / 2**20:6.0f}")


if __name__ == "__main__":
    main()

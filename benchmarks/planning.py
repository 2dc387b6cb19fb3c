"""How long planning takes: whole commands, from start to the printed plan, with one thread.

    python benchmarks/planning.py [words of a case]

Seconds by the clock and of the processor, and the most memory: the least of some rounds, since what else runs on the
machine only adds to it. Nothing is allocated for the models, of which the configurations are written to a temporary
folder. The bars are those of the processor.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import print_header, print_row

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "llama-3.1-405b" / "config.json"
ROUNDS = 3
SMALLER = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
}
HOME = " ".join(f"--max-memory {size}" for size in ("cuda:0=24GiB", "cuda:1=24GiB", "cpu=64GiB", "disk=1TiB"))
STEP = "--train --seq 8192 --batch"
CASES = {
    "import autoshard": ("", ""),
    "the example, 3 devices": (f"plan {ROOT}/examples/model.py --devices 2x4GiB,1x2GiB", "4"),
    "405B, a step on 512 H100": (f"plan 405B --devices 512xH100-80GB {STEP} 512", "12"),
    "70B, a step on 64 H100": (f"plan 70B --devices 64xH100-80GB {STEP} 64", "8"),
    "405B, answers on 16 H100": ("plan 405B --devices 16xH100-80GB --new-tokens 256", "7"),
    "405B on 4 H100: refused": ("plan 405B --devices 4xH100-80GB", "7"),
    "70B at home: GPUs, CPU, disk": (f"plan 70B {HOME} --new-tokens 64", ""),
    "8B, unequal GPUs": ("plan 8B --devices 1xT4,1xA10,1xRTX4090 --launch one-process", ""),
    "8B, pipeline in one process": ("plan 8B --devices 4xA10 --batch 16 -s pipeline", ""),
    "405B on 16: its page": ("report 405B --devices 16xH100-80GB --new-tokens 256 -o page.html", ""),
}
"""Arguments of autoshard, in the folder of the configurations, and seconds of the processor that are allowed."""


def run(name: str, folder: str) -> tuple[float, float, int]:
    """(seconds by the clock, of the processor, bytes at the peak) of one process."""
    arguments = CASES[name][0].split()
    code = "from autoshard_command import run; run()" if arguments else "import torch, autoshard"
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if bool(status) != ("refused" in name):
        raise SystemExit(f"{name} ended with status {status}: {said}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main(pattern: str = "") -> None:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles the package again
    config = json.loads(CONFIG.read_text())
    print_header("case", "clock s", "processor s", "bar", "MiB")
    with tempfile.TemporaryDirectory() as folder:
        for model, sizes in {"405B": {}, **SMALLER}.items():
            (Path(folder) / model).mkdir()
            (Path(folder) / model / "config.json").write_text(json.dumps({**config, **sizes}))
        for name in (name for name in CASES if pattern in name):
            clock, processor, memory = map(min, zip(*(run(name, folder) for _ in range(ROUNDS)), strict=True))
            print_row(name, f"{clock:.1f}", f"{processor:.1f}", CASES[name][1], f"{memory / 2**20:.0f}")


if __name__ == "__main__":
    main(*sys.argv[1:])

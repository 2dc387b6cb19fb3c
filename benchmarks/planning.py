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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "examples" / "llama-3.1-405b" / "config.json"
ROUNDS = 3
SMALLER = {
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80},
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32},
}
HOME = tuple(
    word for size in ("cuda:0=24GiB", "cuda:1=24GiB", "cpu=64GiB", "disk=1TiB") for word in ("--max-memory", size)
)
STEP = ("--train", "--seq", "8192", "--batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Arguments of autoshard; MODEL stands for the folder of a configuration. `bar`: seconds of the processor."""

    name: str
    model: str
    arguments: tuple[str, ...]
    bar: float = 0.0


CASES = (
    Case(name="import autoshard", model="", arguments=()),
    Case(name="the example, 3 devices", model="", bar=4.0,
         arguments=("plan", str(ROOT / "examples" / "model.py"), "--devices", "2x4GiB,1x2GiB")),
    Case(name="405B, a step on 512 H100", model="405B", bar=12.0,
         arguments=("plan", "MODEL", "--devices", "512xH100-80GB", *STEP, "512")),
    Case(name="70B, a step on 64 H100", model="70B", bar=8.0,
         arguments=("plan", "MODEL", "--devices", "64xH100-80GB", *STEP, "64")),
    Case(name="405B, answers on 16 H100", model="405B", bar=7.0,
         arguments=("plan", "MODEL", "--devices", "16xH100-80GB", "--new-tokens", "256")),
    Case(name="405B on 4 H100: refused", model="405B", bar=7.0,
         arguments=("plan", "MODEL", "--devices", "4xH100-80GB")),
    Case(name="70B at home: GPUs, CPU, disk", model="70B",
         arguments=("plan", "MODEL", *HOME, "--new-tokens", "64")),
    Case(name="8B, unequal GPUs", model="8B",
         arguments=("plan", "MODEL", "--devices", "1xT4,1xA10,1xRTX4090", "--launch", "one-process")),
    Case(name="8B, pipeline in one process", model="8B",
         arguments=("plan", "MODEL", "--devices", "4xA10", "--batch", "16", "-s", "pipeline")),
    Case(name="405B on 16: its page", model="405B",
         arguments=("report", "MODEL", "--devices", "16xH100-80GB", "--new-tokens", "256", "-o", "PAGE")),
)  # fmt: skip


def run(case: Case, folder: Path) -> tuple[float, float, int]:
    """(seconds by the clock, of the processor, bytes at the peak) of one process."""
    places = {"MODEL": str(folder / case.model), "PAGE": str(folder / "page.html")}
    arguments = [places.get(one, one) for one in case.arguments]
    code = "from autoshard_command import run; run()" if arguments else "import torch, autoshard"
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    said = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if bool(status) != ("refused" in case.name):
        raise SystemExit(f"{case.name} ended with status {status}: {said}")
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def main(pattern: str = "") -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else every process compiles the package again
    config = json.loads(CONFIG.read_text())
    print("| case | clock s | processor s | bar | MiB |\n|---|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        for model, sizes in {"405B": {}, **SMALLER}.items():
            (Path(name) / model).mkdir()
            (Path(name) / model / "config.json").write_text(json.dumps({**config, **sizes}))
        for case in CASES:
            if pattern not in case.name:
                continue
            rounds = [run(case, Path(name)) for _ in range(ROUNDS)]
            clock, processor, memory = (min(column) for column in zip(*rounds, strict=True))
            bar = f"{case.bar:.0f}" if case.bar else ""
            print(f"| {case.name} | {clock:.1f} | {processor:.1f} | {bar} | {memory / 2**20:.0f} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

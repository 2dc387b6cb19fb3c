"""Loading a bf16 decoder with int8 weights to CPU memory, against Transformers with torchao, and the bytes it takes.

    python benchmarks/quantised.py                       2 GB, warm, 3 rounds
    python benchmarks/quantised.py --gigabytes 1 --rounds 5

Every run is a process of its own; the two take turns. "peak" is the most memory of the process beyond what it had
before the load; "model" is what its tensors hold, which the plan must say as well. Both models are checked to be equal
by a hash of all their bytes. Files go to --folder.
"""

import argparse
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from loading_ways import make_checkpoint, sized


def load_ours(folder: Path) -> torch.nn.Module:
    """Load with autoshard."""
    import autoshard

    return autoshard.load(folder, "cpu", dtype="int8", progress=False)


def load_theirs(folder: Path) -> torch.nn.Module:
    """Load with Transformers and torchao."""
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import AutoModelForCausalLM, TorchAoConfig

    config = TorchAoConfig(Int8WeightOnlyConfig(set_inductor_config=False))
    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto", quantization_config=config)


WAYS = {"autoshard": load_ours, "transformers": load_theirs}


def one(way: str, folder: Path) -> dict:
    """Load once in this process and say what it took."""
    from autoshard.packed import stored_bytes, stored_tensors

    torch.set_num_threads(1)
    WAYS[way](folder.parent / "tiny")  # imports are not loading
    before = _memory("VmRSS")
    begin = time.perf_counter()
    model = WAYS[way](folder)
    seconds = time.perf_counter() - begin
    peak = _memory("VmHWM") - before
    digest = hashlib.sha256()
    for parameter in model.parameters():
        for part in stored_tensors(parameter):
            digest.update(part.detach().reshape(-1).view(torch.uint8).numpy())
    nbytes = sum(map(stored_bytes, model.parameters()))
    return {"seconds": seconds, "peak": peak, "model": nbytes, "hash": digest.hexdigest()}


def _memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) << 10


def planned_bytes(folder: Path) -> int:
    """Return the bytes of parameters that a plan counts, before anything is read."""
    from autoshard import profile
    from autoshard.integrations.loading import open_weights

    return profile(open_weights(folder, dtype="int8").model).parameter_bytes


def main() -> None:
    """Measure all ways in turn and print one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], Path(options.one[1]))))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "model"
        make_checkpoint(folder, sized(options.gigabytes))
        make_checkpoint(folder.parent / "tiny", sized(0) | {"vocab_size": 100, "hidden_size": 128})
        planned = planned_bytes(folder)
        found: dict[str, list[dict]] = {way: [] for way in WAYS}
        for _ in range(options.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "--one", way, str(folder)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found[way].append(json.loads(done.stdout.strip().splitlines()[-1]))
    runs = [run for rows in found.values() for run in rows]
    assert len({run["hash"] for run in runs}) == 1, "the two models differ"
    assert {run["model"] for run in runs} == {planned}, "the plan counts other bytes than the model holds"
    print(f"{'':14}{'seconds':>10}{'peak GB':>10}{'model GB':>10}     planned {planned / 1e9:.3f} GB; all equal")
    for way, rows in found.items():
        seconds, peak = (statistics.median(run[key] for run in rows) for key in ("seconds", "peak"))
        print(f"{way:14}{seconds:>10.2f}{peak / 1e9:>10.2f}{rows[0]['model'] / 1e9:>10.2f}")


if __name__ == "__main__":
    main()

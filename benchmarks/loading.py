"""Loading a decoder of random bfloat16 weights to CPU memory, against from_pretrained.

    python benchmarks/loading.py [--gigabytes 2] [--rounds 3] [--cold] [--folder DIR]

Every run is a process of its own, so that memory is fresh; the ways take turns. "warm": the files are in the page cache
before; "--cold": they are dropped from it. Where no dtype changes both libraries only map the files; "copied" is
`mapped=False`. "+ use": seconds until every weight was used once, by a forward of 16 tokens. "processor": seconds of
all cores until loaded, which say more on a busy machine. "beyond": the peak of resident memory beyond what was kept.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "dtype": "bfloat16",
    "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
LAYER_BYTES = 2 * 44_044_288


def make_checkpoint(folder: Path, layers: int) -> None:
    """Write a decoder whose large matrices repeat the same few numbers: nothing here depends on them."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": layers}))
    with torch.device("meta"):
        state = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).state_dict()
    drawn = torch.randn(1 << 22).mul_(0.02).bfloat16()
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for number, (name, tensor) in enumerate(state.items()):
        values = drawn.repeat(-(-tensor.numel() // len(drawn)))[: tensor.numel()].view(tensor.shape)
        shards.setdefault(f"model-{2 * number // len(state) + 1:05}-of-00002.safetensors", {})[name] = values
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    where = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


def load(folder: Path, **options: object) -> object:
    import autoshard

    return autoshard.load(folder, "cpu", progress=False, **options)  # type: ignore[arg-type]


def from_pretrained(folder: Path, dtype: object = "auto") -> object:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


WAYS: dict[str, Callable[[Path], object]] = {
    "autoshard.load": load,
    "from_pretrained": from_pretrained,
    "autoshard.load, copied": lambda folder: load(folder, mapped=False),
    "autoshard.load, float32": lambda folder: load(folder, dtype="float32"),
    "from_pretrained, float32": lambda folder: from_pretrained(folder, torch.float32),
}


def memory(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024


def run_here(way: str, folder: Path) -> dict[str, float]:
    """Run once; imports, and what libraries do at a first load only, come before."""
    with tempfile.TemporaryDirectory() as small:
        make_checkpoint(Path(small), 1)
        WAYS[way](Path(small))
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before, anonymous, begin, processor = memory("VmRSS"), memory("RssAnon"), time.perf_counter(), time.process_time()
    result = WAYS[way](folder)
    found = {"seconds": time.perf_counter() - begin, "processor": time.process_time() - processor}
    found["beyond"] = memory("VmHWM") - before - (memory("RssAnon") - anonymous)
    if isinstance(result, torch.nn.Module):
        with torch.inference_mode():
            result(input_ids=torch.arange(16)[None])
    return found | {"used": time.perf_counter() - begin}


def set_cache(folder: Path, cold: bool) -> None:
    """Drop all files of a folder from the page cache, or read them into it."""
    for file in folder.iterdir():
        with open(file, "rb", buffering=0) as opened:
            if cold:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while opened.read(16 << 20):
                    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "autoshard-loading")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.folder / f"{options.gigabytes:g}"
    if options.one:
        print(json.dumps(run_here(options.one, folder)))
        return
    if not folder.exists():
        make_checkpoint(folder, max(1, round((options.gigabytes * 1e9 - 262e6) / LAYER_BYTES)))
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:  # what the process before gave back is quicker to get
            set_cache(folder, options.cold)
            command = [sys.executable, __file__, "--one", way, "--folder", str(options.folder)]
            command += ["--gigabytes", str(options.gigabytes)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            runs[way].append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'cold' if options.cold else 'warm'}: medians      seconds [least to most]    + use  processor  beyond")
    for way, found in runs.items():
        times = [run["seconds"] for run in found]
        used, processor, beyond = (
            statistics.median(run[key] for run in found) for key in ("used", "processor", "beyond")
        )
        print(f"{way:26} {statistics.median(times):7.2f} [{min(times):.2f} to {max(times):.2f}] {used:10.2f} "
              f"{processor:9.2f} {beyond / 2**20:6.0f} MiB")  # fmt: skip


if __name__ == "__main__":
    main()

"""What a pass costs when the layers are on disk: against everything in memory, plain reads, and Accelerate.

    python benchmarks/offload.py [--rounds N] [--layers N] [--tokens N] [--directory DIR] [--quick]

A bf16 decoder (22 layers, 1.1 billion parameters) with random weights is saved once as safetensors. Then, in one
process and alternating, passes of some tokens over

    in memory         the ordinary model: what computing takes
    read              the bytes of the files into a few small buffers, by four plain reads at a time
    autoshard disk    all layers on disk, embedding and head in memory
    accelerate disk   load_checkpoint_and_dispatch with the layers on "disk" (not with --quick)

"warm": the files are in the page cache; "cold": it is emptied before each pass. One thread computes. Printed are
medians with quartiles and their ratio to max(computing, reading) of the same run, the bound.
"""

import argparse
import dataclasses
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import accelerate
import torch
import transformers
from loading import make_checkpoint, set_cache

import autoshard
from autoshard.plan import Plan

CHUNK_BYTES, READERS = 4 << 20, 4
OTHERS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def offloaded(directory: Path, layers: list[str]) -> torch.nn.Module:
    """All layers on disk, computing on the CPU."""
    plan = Plan.from_device_map(dict.fromkeys([*OTHERS, *layers], "cpu"))
    plan = dataclasses.replace(plan, offloaded=dict.fromkeys(layers, "disk"))
    return autoshard.load(directory, plan=plan, progress=False)


def accelerated(directory: Path, layers: list[str], scratch: str) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(directory)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device_map = dict.fromkeys(OTHERS, "cpu") | dict.fromkeys(layers, "disk")
    return accelerate.load_checkpoint_and_dispatch(
        model, str(directory), device_map=device_map, offload_folder=scratch, dtype=torch.bfloat16
    ).eval()


def read_all(directory: Path) -> Callable[[], None]:
    """Return a function that reads all files, a part at a time for each of a few threads, and keeps nothing.

    A buffer of its own would be fresh memory for each, which costs more than reading.
    """
    files = [(os.open(path, os.O_RDONLY), path.stat().st_size) for path in directory.glob("*.safetensors")]
    parts = [(file, start) for file, size in files for start in range(0, size, CHUNK_BYTES)]
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(READERS)]

    def read_one(part: tuple[int, int]) -> None:
        buffer = buffers.pop()
        os.preadv(part[0], [buffer], part[1])
        buffers.append(buffer)

    threads = ThreadPoolExecutor(READERS)
    return lambda: list(threads.map(read_one, parts)) and None


def report(times: dict[str, list[float]]) -> None:
    middle = {name: statistics.median(found) for name, found in times.items()}
    for name, found in times.items():
        bound = max(middle["in memory"], middle["read, cold" if name.endswith("cold") else "read, warm"])
        low, _, high = statistics.quantiles(found, n=4)
        print(f"{name:22s} {middle[name]:7.3f} s  ({low:.3f} to {high:.3f})  {middle[name] / bound:5.2f} x bound")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "autoshard-offload")
    parser.add_argument("--quick", action="store_true", help="without Accelerate")
    options = parser.parse_args()
    torch.set_num_threads(1)
    directory = options.directory / str(options.layers)
    if not directory.exists():
        make_checkpoint(directory, options.layers)
    set_cache(directory, cold=True)  # who has just written a file has it in memory in small pages
    ids = torch.arange(options.tokens)[None]

    @torch.no_grad()
    def run(model: torch.nn.Module) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    layers = [f"model.layers.{index}" for index in range(options.layers)]
    # in memory of its own: a file that is mapped anywhere stays in the page cache
    plain = autoshard.load(directory, "cpu", mapped=False, progress=False)
    models = {"autoshard disk": offloaded(directory, layers)}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        if not options.quick:
            models["accelerate disk"] = accelerated(directory, layers, scratch)
        for name, model in models.items():
            assert torch.equal(run(plain), run(model)), f"{name}: other logits"
        read = read_all(directory)
        cases: dict[str, Callable[[], object]] = {"in memory": lambda: run(plain)}
        for page_cache in ("warm", "cold"):
            cases[f"read, {page_cache}"] = read
            cases |= {f"{name}, {page_cache}": lambda model=model: run(model) for name, model in models.items()}
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(options.rounds):
            for name, call in cases.items():
                if name.endswith("cold"):
                    set_cache(directory, cold=True)
                    set_cache(Path(scratch), cold=True)
                elif name.endswith("warm"):
                    read()
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    report(times)


if __name__ == "__main__":
    main()

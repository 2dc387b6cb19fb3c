"""What a pass costs when the layers are on disk: against everything in memory, plain reads, and Accelerate.

    python benchmarks/offload.py [--rounds N] [--layers N] [--tokens N] [--folder DIR] [--quick]

A bf16 decoder (22 layers, 1.1 billion parameters) with random weights is saved once as safetensors. Then, in one
process and in turns, passes of some tokens over

    in memory         the ordinary model: what computing takes
    read              the bytes of the files into a few small buffers, by four plain reads at a time
    autoshard disk    all layers on disk, embedding and head in memory
    accelerate disk   load_checkpoint_and_dispatch with the layers on "disk" (not with --quick)

"warm": the files are in the page cache; "cold": it is emptied before each pass. One thread computes. Printed are
medians with quartiles and their ratio to max(computing, reading) of the same run, the bound.
"""

import dataclasses
import mmap
import os
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import accelerate
import torch
import transformers
from common import FOLDER, print_header, print_row, run_command, saved_decoder, set_cache, spread, take_turns

import autoshard
from autoshard.plan import Plan

CHUNK_BYTES, READERS = 4 << 20, 4
OTHERS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def accelerated(directory: Path, layers: list[str], scratch: str) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(directory)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    device_map = dict.fromkeys(OTHERS, "cpu") | dict.fromkeys(layers, "disk")
    return accelerate.load_checkpoint_and_dispatch(
        model, str(directory), device_map=device_map, offload_folder=scratch, dtype=torch.bfloat16
    ).eval()


def read_all(directory: Path) -> Callable[[], object]:
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
    return lambda: list(threads.map(read_one, parts))


@torch.no_grad()
def main(rounds: int = 9, layers: int = 22, tokens: int = 16, quick: bool = False, folder: Path = FOLDER) -> None:
    torch.set_num_threads(1)
    directory = saved_decoder(folder, layers)
    set_cache(directory, cold=True)  # who has just written a file has it in memory in small pages
    ids = torch.arange(tokens)[None]

    def run(model: torch.nn.Module) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    names = [f"model.layers.{index}" for index in range(layers)]
    # in memory of its own: a file that is mapped anywhere stays in the page cache
    plain = autoshard.load(directory, "cpu", mapped=False, progress=False)
    plan = Plan.from_device_map(dict.fromkeys([*OTHERS, *names], "cpu"))
    plan = dataclasses.replace(plan, offloaded=dict.fromkeys(names, "disk"))
    models = {"autoshard disk": autoshard.load(directory, plan=plan, progress=False)}
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        if not quick:
            models["accelerate disk"] = accelerated(directory, names, scratch)
        for name, model in models.items():
            assert torch.equal(run(plain), run(model)), f"{name}: other logits"
        read = read_all(directory)
        cases: dict[str, Callable[[], object]] = {"in memory": lambda: run(plain)}
        for state in ("warm", "cold"):
            cases[f"read, {state}"] = read
            cases |= {f"{name}, {state}": lambda model=model: run(model) for name, model in models.items()}

        def prepare(name: str) -> None:
            if name.endswith("warm"):
                read()
            elif name.endswith("cold"):
                set_cache(directory, cold=True)
                set_cache(Path(scratch), cold=True)

        times = take_turns(cases, rounds, prepare)
    middle = {name: statistics.median(found) for name, found in times.items()}
    print_header("", "seconds per pass", "over the bound")
    for name, found in times.items():
        bound = max(middle["in memory"], middle["read, cold" if name.endswith("cold") else "read, warm"])
        print_row((name, spread(found), f"{middle[name] / bound:.2f}"))


if __name__ == "__main__":
    run_command(main, __doc__)

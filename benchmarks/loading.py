"""Loading a decoder of random bfloat16 weights to CPU memory, against from_pretrained.

    python benchmarks/loading.py [--layers 22] [--rounds 3] [--cold] [--folder DIR]

Every run is a process of its own, so that memory is fresh; the ways take turns. "warm": the files are in the page cache
before; "--cold": they are dropped from it. Where no dtype changes both libraries only map the files. "with use": until
every weight was used once, by a forward of 16 tokens. "processor": seconds of all cores until loaded, which say more on
a busy machine.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import torch
import transformers
from common import FOLDER, print_header, print_row, run_command, saved_decoder, set_cache

import autoshard

load = partial(autoshard.load, devices="cpu", progress=False)
from_pretrained = partial(transformers.AutoModelForCausalLM.from_pretrained, dtype="auto")
WAYS: dict[str, Callable[[Path], torch.nn.Module]] = {
    "autoshard.load": load,
    "from_pretrained": from_pretrained,
    "autoshard.load, float32": partial(load, dtype="float32"),
    "from_pretrained, float32": partial(from_pretrained, dtype=torch.float32),
}


def run_once(way: str, folder: Path, small: Path) -> tuple[float, float, float]:
    """Seconds, with the first forward, and of the processor; what libraries do at a first load only comes before."""
    WAYS[way](small)
    begin, processor = time.perf_counter(), time.process_time()
    model = WAYS[way](folder)
    seconds, busy = time.perf_counter() - begin, time.process_time() - processor
    with torch.inference_mode():
        model(input_ids=torch.arange(16)[None])
    return seconds, time.perf_counter() - begin, busy


def main(layers: int = 22, rounds: int = 3, cold: bool = False, folder: Path = FOLDER) -> None:
    small, large = saved_decoder(folder, 1), saved_decoder(folder, layers)
    runs: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:  # what the process before gave back is quicker to get
            set_cache(large, cold=cold)
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                runs[way].append(process.submit(run_once, way, large, small).result())
    print_header("cold" if cold else "warm", "seconds", "with use", "processor")
    for way, found in runs.items():
        columns = (sorted(column) for column in zip(*found, strict=True))
        print_row((way, *(f"{statistics.median(one):.2f} ({one[0]:.2f} to {one[-1]:.2f})" for one in columns)))


if __name__ == "__main__":
    run_command(main, __doc__)

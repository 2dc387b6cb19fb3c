"""What a pass costs when the layers are on disk: against everything in memory, plain reads, and Accelerate.

    python benchmarks/offload.py [--rounds N] [--layers N] [--width N] [--tokens N] [--threads N]
        [--directory DIR] [--quick]

A bf16 decoder (22 layers, 1.1 billion parameters) with random weights is saved once as safetensors. Then, in one
process and alternating, passes of some tokens over

    in memory        the ordinary model: what computing takes
    read, warm/cold  the bytes of the files, into a few small buffers, with nothing computed: what reading takes, by
                     four plain reads at a time; cold past the page cache, which is faster
    both at once     the model in memory computes while plain reads bring the same bytes: what is left of either when
                     they share the memory of this machine, whatever the program does; warm and cold
    autoshard        all layers on disk, embedding and head in memory; warm, and cold: the page cache is emptied, and it
                     is the first pass of a model that was just loaded
    accelerate disk  load_checkpoint_and_dispatch with the layers on "disk"; warm and cold
    accelerate cpu   the same with the layers kept in CPU memory (cpu_offload)

One thread computes unless told otherwise, as reading takes a core of its own. Printed are medians with quartiles,
their ratio to max(computing, reading) of the same run (the bound), and the seconds of the processor, all threads
together, which say more than the clock where other things run. Before that, the peak of the process's resident memory
above what it was without the model, against what the plan says: what stays, two layers, and the activations.
"""

import argparse
import dataclasses
import gc
import mmap
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

import autoshard
from autoshard.plan import Plan

CHUNK_BYTES, READERS = 4 << 20, 4
OTHERS = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")


def make_checkpoint(directory: Path, layers: int, width: int) -> None:
    """Save a random decoder, unless it is there."""
    if (directory / "config.json").exists():
        return
    config = transformers.LlamaConfig(
        vocab_size=32000, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=max(width // 512, 1), dtype="bfloat16",
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    torch.set_default_dtype(torch.float32)


def in_memory(directory: Path) -> torch.nn.Module:
    """In memory of its own: a file that is mapped anywhere stays in the page cache."""
    return autoshard.load(directory, "cpu", mapped=False, progress=False)


def layer_paths(model: torch.nn.Module) -> list[str]:
    return [f"model.layers.{name}" for name, _ in model.get_submodule("model.layers").named_children()]


def placements(model: torch.nn.Module, layers: str, rest: str) -> dict[str, str]:
    return dict.fromkeys(OTHERS, rest) | dict.fromkeys(layer_paths(model), layers)


def streamed(directory: Path) -> torch.nn.Module:
    """All layers on disk, computing on the CPU."""
    config = load_config(directory)
    layers = [f"model.layers.{index}" for index in range(config.num_hidden_layers)]
    plan = Plan.from_device_map(dict.fromkeys(OTHERS, "cpu") | dict.fromkeys(layers, "cpu"))
    plan = dataclasses.replace(plan, streamed=dict.fromkeys(layers, "disk"))
    return autoshard.load(directory, plan=plan, progress=False)


def accelerated(directory: Path, scratch: str) -> torch.nn.Module:
    import accelerate

    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(load_config(directory), dtype=torch.bfloat16)
    return accelerate.load_checkpoint_and_dispatch(
        model, str(directory), device_map=placements(model, "disk", "cpu"), offload_folder=scratch,
        dtype=torch.bfloat16,
    ).eval()  # fmt: skip


def accelerated_cpu(directory: Path, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Kept in CPU memory, in the same tensors as the model in memory."""
    import accelerate

    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(load_config(directory), dtype=torch.bfloat16)
    return accelerate.cpu_offload(model.eval(), execution_device=torch.device("cpu"), state_dict=weights)


def load_config(directory: Path) -> transformers.PretrainedConfig:
    return transformers.AutoConfig.from_pretrained(directory)


def read_layers(directory: Path, flags: int = 0) -> Callable[[], None]:
    """Return a function that reads all files, a part at a time for each of a few threads, and keeps nothing.

    A buffer of its own would be fresh memory for each, which costs more than reading.
    """
    files = [(os.open(path, os.O_RDONLY | flags), path.stat().st_size) for path in directory.glob("*.safetensors")]
    parts = [(file, start) for file, size in files for start in range(0, size, CHUNK_BYTES)]
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(READERS)]

    def read_one(part: tuple[int, int]) -> None:
        buffer = buffers.pop()
        os.preadv(part[0], [buffer], part[1])
        buffers.append(buffer)

    threads = ThreadPoolExecutor(READERS)
    return lambda: list(threads.map(read_one, parts)) and None


def at_once(*calls: Callable[[], object]) -> None:
    """Run each in a thread of its own, the first one in this one."""
    threads = [threading.Thread(target=call) for call in calls[1:]]
    for thread in threads:
        thread.start()
    calls[0]()
    for thread in threads:
        thread.join()


def forget(*directories: Path | str) -> None:
    """Empty the page cache of all files in directories."""
    for directory in directories:
        for path in Path(directory).iterdir():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """By the clock, and of the processor."""
    start, busy = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - start, time.process_time() - busy


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak_bytes(call: Callable[[], object]) -> int:
    """The most resident memory while something runs, looked at every millisecond."""
    peak, running = resident_bytes(), True

    def look() -> None:
        nonlocal peak
        while running:
            peak = max(peak, resident_bytes())
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        call()
    finally:
        running = False
        thread.join()
    return peak


def memory(directory: Path, run: Callable[[torch.nn.Module], object]) -> None:
    """Print the resident memory of streamed passes against what is planned. Best before anything else has run."""
    tiny = run(streamed(directory))  # libraries take memory of their own in the first pass
    del tiny
    gc.collect()
    start = resident_bytes()
    model = streamed(directory)
    stays = sum(p.nbytes for n, p in model.named_parameters() if ".layers." not in n)
    layer = max(sum(p.nbytes for p in model.get_submodule(path).parameters()) for path in layer_paths(model))
    peak = peak_bytes(lambda: [run(model) for _ in range(3)]) - start
    autoshard.remove(model)
    print(
        f"memory: peak {peak / 2**20:.0f} MiB above the process without the model; what stays {stays / 2**20:.0f} + "
        f"two layers {2 * layer / 2**20:.0f} = {(stays + 2 * layer) / 2**20:.0f} MiB, "
        f"{(peak - stays - 2 * layer) / 2**20:+.0f} MiB for activations and rounding; "
        f"all parameters {sum(p.nbytes for p in model.parameters()) / 2**20:.0f} MiB"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1, help="that compute")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "autoshard-offload")
    parser.add_argument("--quick", action="store_true", help="without Accelerate")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    directory = options.directory / f"{options.layers}x{options.width}"
    directory.mkdir(parents=True, exist_ok=True)
    make_checkpoint(directory, options.layers, options.width)
    forget(directory)  # who has just written a file has it in memory in small pages
    ids = torch.arange(options.tokens)[None]

    @torch.no_grad()
    def run(model: torch.nn.Module) -> torch.Tensor:
        return model(input_ids=ids, use_cache=False).logits

    memory(directory, run)
    plain, ours = in_memory(directory), streamed(directory)
    assert torch.equal(run(plain), run(ours)), "other logits"
    read, read_cold = read_layers(directory), read_layers(directory, os.O_DIRECT)
    fresh: list[torch.nn.Module] = []
    cases: dict[str, Callable[[], object]] = {
        "in memory": lambda: run(plain), "read, warm": read, "read, cold": read_cold,
        "both at once, warm": lambda: at_once(lambda: run(plain), read),
        "both at once, cold": lambda: at_once(lambda: run(plain), read_cold),
        "autoshard disk, warm": lambda: run(ours), "autoshard disk, cold": lambda: run(fresh[0]),
    }  # fmt: skip
    scratch = tempfile.TemporaryDirectory(dir=options.directory)
    if not options.quick:
        theirs, kept = accelerated(directory, scratch.name), accelerated_cpu(directory, plain.state_dict())
        assert torch.equal(run(plain), run(theirs)), "other logits"
        cases |= {
            "accelerate disk, warm": lambda: run(theirs),
            "accelerate disk, cold": lambda: run(theirs),
            "accelerate cpu": lambda: run(kept),
        }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    for _ in range(options.rounds):
        for name, call in cases.items():
            if name.endswith("cold"):
                fresh[:] = [streamed(directory)]
                forget(directory, scratch.name)
            elif name.endswith("warm"):
                read()
                call()
            times[name].append(seconds(call))
    report(times)
    scratch.cleanup()


def report(times: dict[str, list[tuple[float, float]]]) -> None:
    middle = {name: statistics.median(clock for clock, _ in found) for name, found in times.items()}
    for name, found in times.items():
        bound = max(middle["in memory"], middle["read, cold" if name.endswith("cold") else "read, warm"])
        low, _, high = statistics.quantiles([clock for clock, _ in found], n=4)
        busy = statistics.median(processor for _, processor in found)
        print(
            f"{name:22s} {middle[name]:7.3f} s  ({low:.3f} to {high:.3f})  {middle[name] / bound:5.2f} x bound, "
            f"processor {busy:.3f} s"
        )


if __name__ == "__main__":
    main()

"""Latency of a cut decoder on two processes against Transformers' own tensor parallelism, in the same run, in turns.

    python benchmarks/tensor_parallel.py [--dtype float32] [--seconds 40] [--hidden 1024 2048 4096]

Two gloo ranks of one thread each, on this machine's CPU, each bound to a processor of its own, as launchers of ranks
do: else the scheduler puts both on one now and then. Each rank holds the same random decoder three times: cut by
autoshard's plan, cut by `from_pretrained(tp_plan="auto")`, and whole. They take turns:

    prefill    a forward of 128, or 512, tokens    decode    one token with a cache of 64, mean of 16 steps
    alone      the whole model on rank 0 only      together  the whole model on both ranks at once, each its own copy

"together" is what the machine can do for two ranks that need nothing of each other: half of it is the time of ideal
halves. Prints medians with quartiles over rounds, and the medians of the ratios within a round.
"""

import argparse
import functools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers

import autoshard

PROMPTS, CACHED, STEPS = (128, 512), 64, 16
LAYERS = {1024: 4, 2048: 2, 4096: 1}
LEAST_ROUNDS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""What rounding makes of the logits, as a part of the largest."""
NAMES = ("alone", "together", "tp_plan", "autoshard")
Times = dict[str, dict[str, list[float]]]
"""What is run -> on which model -> seconds, one per round."""


def prefill(model: torch.nn.Module, tokens: int) -> float:
    ids = torch.arange(tokens).reshape(1, tokens)
    start = time.perf_counter()
    model(input_ids=ids, use_cache=False)
    return time.perf_counter() - start


def decode(model: torch.nn.Module) -> float:
    ids = torch.arange(CACHED).reshape(1, CACHED)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    start = time.perf_counter()
    for step in range(STEPS):
        model(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
    return (time.perf_counter() - start) / STEPS


RUNS: dict[str, Callable[[torch.nn.Module], float]] = {
    **{f"prefill of {tokens}": functools.partial(prefill, tokens=tokens) for tokens in PROMPTS},
    "decode": decode,
}


def measure(models: dict[str, torch.nn.Module], seconds: float) -> Times:
    """Run rounds on this rank until the time of rank 0 is up; the first one warms up."""
    times: Times = {kind: {name: [] for name in NAMES} for kind in RUNS}
    end = time.monotonic() + seconds
    index, going = 0, torch.ones(1)
    with torch.no_grad():
        while going:
            turn = index % len(NAMES)
            for name in NAMES[turn:] + NAMES[:turn]:
                for kind, run in RUNS.items():
                    dist.barrier()
                    if name == "alone" and dist.get_rank():
                        continue
                    found = run(models.get(name, models["whole"]))
                    if index:
                        times[kind][name].append(found)
            index += 1
            going[0] = index <= LEAST_ROUNDS or time.monotonic() < end
            dist.broadcast(going, 0)
    return times


def build(folder: str, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=dtype)
    whole, ours = load().eval(), load().eval()
    inputs = {"input_ids": torch.arange(PROMPTS[0]).reshape(1, PROMPTS[0]), "use_cache": False}
    autoshard.apply(ours, {"cpu:0": "8GiB", "cpu:1": "8GiB"}, inputs=inputs, strategy="column-parallel")
    theirs = load(tp_plan="auto").eval()
    with torch.no_grad():
        wanted = whole(**inputs).logits
        for name, model in (("autoshard", ours), ("tp_plan", theirs)):
            off = (model(**inputs).logits - wanted).abs().max() / wanted.abs().max()
            assert off < TOLERANCE[dtype], f"{name} is off by {off:.1e}"
    return {"whole": whole, "autoshard": ours, "tp_plan": theirs}


def rank_main(rank: int, folder: str, dtype: torch.dtype, seconds: float) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # with the threads of gloo, which are not made yet
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    times = measure(build(folder, dtype), seconds)
    if not rank:
        report(times)
    dist.destroy_process_group()


def report(times: Times) -> None:
    print("| | alone | together | tp_plan | autoshard | autoshard / tp_plan | of ideal |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for kind, found in times.items():
        quartiles = [statistics.quantiles(found[name], n=4) for name in NAMES]
        cells = " | ".join(f"{m * 1e3:.1f} ms ({a * 1e3:.1f} to {b * 1e3:.1f})" for a, m, b in quartiles)
        # pairs of the same round: a slow moment of the machine hits both
        against = statistics.median(a / b for a, b in zip(found["autoshard"], found["tp_plan"], strict=True))
        ideal = statistics.median(b / 2 / a for a, b in zip(found["autoshard"], found["together"], strict=True))
        print(f"| {kind} | {cells} | {against:.3f} | {ideal:.0%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=40, help="per hidden size")
    parser.add_argument("--hidden", type=int, nargs="*", default=list(LAYERS))
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    for hidden_size in options.hidden:
        layers = LAYERS.get(hidden_size, 1)
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=hidden_size, intermediate_size=hidden_size * 11 // 4,
            num_hidden_layers=layers, num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 128,
        )  # fmt: skip
        print(f"hidden size {hidden_size:,}, {layers} layers, {options.dtype}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            transformers.set_seed(0)
            transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)
            torch.multiprocessing.spawn(rank_main, (folder, dtype, options.seconds), nprocs=2)


if __name__ == "__main__":
    main()

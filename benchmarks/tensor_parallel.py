"""Latency of a cut decoder on two processes against Transformers' own tensor parallelism, in the same run, in turns.

    python benchmarks/tensor_parallel.py [--dtype float32] [--rounds 15] [--hidden 1024 --hidden 2048]

Two gloo ranks of one thread each, on this machine's CPU, each bound to a processor of its own, as launchers of ranks
do: else the scheduler puts both on one now and then. Each rank holds the same random decoder three times: cut by
autoshard's plan, cut by `from_pretrained(tp_plan="auto")`, and whole. They take turns:

    prefill    a forward of 128, or 512, tokens    decode    one token with a cache of 64, mean of 16 steps
    alone      the whole model on rank 0 only      together  the whole model on both ranks at once, each its own copy

"together" is what the machine can do for two ranks that need nothing of each other: half of it is the time of ideal
halves. Prints medians with quartiles over rounds, and the medians of the ratios within a round.
"""

import os
import tempfile
import warnings
from functools import partial
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers
from common import decoder, print_header, print_row, ratio, run_command, spread, take_turns

import autoshard

PROMPTS, CACHED, STEPS = (128, 512), 64, 16
LAYERS = {1024: 4, 2048: 2, 4096: 1}
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
"""What rounding makes of the logits, as a part of the largest."""
NAMES = ("alone", "together", "tp_plan", "autoshard")


def prompt(tokens: int) -> torch.Tensor:
    return torch.arange(tokens).reshape(1, tokens)


def decode(model: Any, cache: Any) -> None:
    """Some tokens after those of the cache, which is then as it was."""
    for step in range(STEPS):
        model(input_ids=prompt(CACHED)[:, step : step + 1], past_key_values=cache, use_cache=True)
    cache.crop(-STEPS)


def build(folder: str, dtype: str) -> dict[str, Any]:
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=getattr(torch, dtype))
    whole, ours = load().eval(), load().eval()
    inputs = {"input_ids": prompt(PROMPTS[0]), "use_cache": False}
    autoshard.apply(ours, {"cpu:0": "8GiB", "cpu:1": "8GiB"}, inputs=inputs, strategy="column-parallel")
    models = {"autoshard": ours, "tp_plan": load(tp_plan="auto").eval()}
    wanted = whole(**inputs).logits
    for name, model in models.items():
        off = (model(**inputs).logits - wanted).abs().max() / wanted.abs().max()
        assert off < TOLERANCE[dtype], f"{name} is off by {off:.1e}"
    return models | {"alone": whole, "together": whole}


def measure(models: dict[str, Any], rounds: int) -> None:
    """Run on this rank, and print what rank 0 found."""
    cases = {}
    for name in NAMES:
        model = models[name]
        for tokens in PROMPTS:
            cases[f"prefill of {tokens}", name] = partial(model, input_ids=prompt(tokens), use_cache=False)
        cache = model(input_ids=prompt(CACHED), use_cache=True).past_key_values
        cases["decode", name] = partial(decode, model, cache)
    if dist.get_rank():
        cases |= {key: lambda: None for key in cases if key[1] == "alone"}
    times = take_turns(cases, rounds, lambda key: dist.barrier())
    if dist.get_rank():
        return
    print_header("", *NAMES, "autoshard / tp_plan", "of ideal")
    for kind in dict.fromkeys(kind for kind, _ in cases):
        found = {name: [one / (STEPS if kind == "decode" else 1) for one in times[kind, name]] for name in NAMES}
        ideal = ratio(found["together"], found["autoshard"]) / 2
        cells = (f"{spread(found[name], 1e-3, 1)} ms" for name in NAMES)
        print_row((kind, *cells, f"{ratio(found['autoshard'], found['tp_plan']):.2f}", f"{ideal:.0%}"))


@torch.no_grad()
def rank_main(rank: int, folder: str, dtype: str, rounds: int) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # with the threads of gloo, which are not made yet
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    measure(build(folder, dtype), rounds)
    dist.destroy_process_group()


def main(dtype: str = "float32", rounds: int = 15, hidden: list[int] = list(LAYERS)) -> None:  # noqa: B006
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    for size in hidden:
        layers = LAYERS.get(size, 1)
        print(f"hidden size {size:,}, {layers} layers, {dtype}", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            transformers.set_seed(0)
            decoder(size, layers, 4096, kv_heads=size // 128, dtype=getattr(torch, dtype)).save_pretrained(folder)
            torch.multiprocessing.spawn(rank_main, (folder, dtype, rounds), nprocs=2)


if __name__ == "__main__":
    run_command(main, __doc__)

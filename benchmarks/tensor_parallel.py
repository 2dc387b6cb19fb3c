"""Latency of a cut decoder on two processes against Transformers' own tensor parallelism, in the same run, in turns.

    python benchmarks/tensor_parallel.py [float32|bfloat16] [seconds per size] [hidden sizes]
    python benchmarks/tensor_parallel.py olmo2
    python benchmarks/tensor_parallel.py one-process
    python benchmarks/tensor_parallel.py summed

Two gloo ranks of one thread each, on this machine's CPU, each bound to a processor of its own, as launchers of ranks
do: else the scheduler puts both on one now and then. Some 4 minutes with nothing else running. Hidden sizes 1,024,
2,048 and 4,096 with 4, 2 and 1 layers. Each rank holds the same random Llama three times: cut by autoshard's plan, cut
by `from_pretrained(tp_plan="auto")`, and whole. They take turns:

    prefill    a forward of 128, or 512, tokens    decode    one token with a cache of 64, mean of 16 steps
    alone      the whole model on rank 0 only      together  the whole model on both ranks at once, each its own copy
    silent     autoshard's cut model with nothing said between ranks: wrong numbers, in the time that computing takes

"together" is the control of what the machine can do: two ranks that need nothing of each other. Half of it is the time
of ideal halves; "silent" is what would be left of this cut if its collectives took no time. Prints medians with
quartiles over rounds, and the medians of the ratios within a round; the same of the least times, which a busy machine
disturbs least; and the processor time of rank 0, which it hardly does. And what of the processor time of a prefill the
collectives take, all threads of the process counted: two ranks on two processors have none left to hide it behind.

"olmo2" does the same with two layers of an Olmo 2 of hidden size 1,024, whose queries and keys are normalised over all
heads: the written plan gathers queries, keys and values for that, ours one number per row of queries and one of keys.

"one-process" cuts a decoder of 8 small layers over two devices of this process, and says what an op costs more.
"summed" runs one layer whose inputs are cut, alone and on one gloo rank, with a bias and without: what a call costs
more is the hook, the all-reduce of a rank with itself, and the addition of the bias.
"""

import contextlib
import copy
import functools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing
import transformers

import autoshard
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.cuts import apply_cuts
from autoshard.sharding import Action, Cut, Shard

PROMPTS, CACHED, STEPS = (128, 512), 64, 16
LAYERS = {1024: 4, 2048: 2, 4096: 1}
LEAST_ROUNDS = 5
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""What rounding makes of the logits, as a part of the largest."""
Times = dict[str, list[tuple[float, float]]]
"""What was run -> (seconds, seconds of the processor), one per round."""


def prefill(model: torch.nn.Module, tokens: int) -> tuple[float, float]:
    ids = torch.arange(tokens).reshape(1, tokens)
    start, busy = time.perf_counter(), time.process_time()
    model(input_ids=ids, use_cache=False)
    return time.perf_counter() - start, time.process_time() - busy


def decode(model: torch.nn.Module) -> tuple[float, float]:
    ids = torch.arange(CACHED).reshape(1, CACHED)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    for step in range(STEPS):
        model(input_ids=ids[:, step : step + 1], past_key_values=cache, use_cache=True)
    return (time.perf_counter() - start) / STEPS, (time.process_time() - busy) / STEPS


RUNS: dict[str, Callable[[torch.nn.Module], tuple[float, float]]] = {
    **{f"prefill of {tokens}": functools.partial(prefill, tokens=tokens) for tokens in PROMPTS},
    "decode": decode,
}


def measure(models: dict[str, torch.nn.Module], seconds: float) -> dict[str, Times]:
    """Seconds on rank 0, by what is run and on which model. Rounds are run until the time is up."""
    times: dict[str, Times] = {kind: {} for kind in RUNS}
    names = ["autoshard", "tp_plan", "silent", "together", "alone"]
    end = time.monotonic() + seconds
    index, going = 0, torch.ones(1)
    with torch.no_grad():
        while going:
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                model = models["autoshard" if name == "silent" else name if name in models else "whole"]
                for kind, run in RUNS.items():
                    dist.barrier()
                    if name == "alone" and dist.get_rank():
                        if kind == "decode":
                            dist.barrier()  # the one within
                        continue
                    with silent() if name == "silent" else contextlib.nullcontext():
                        found = run(model)
                    if index:  # the first round warms up
                        times[kind].setdefault(name, []).append(found)
            index += 1
            going[0] = index <= LEAST_ROUNDS or time.monotonic() < end
            dist.broadcast(going, 0)
    return times


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Let ranks go on with what they have, as if others had the same."""
    methods = {name: getattr(ProcessRanks, name) for name in ("all_reduce", "add_gathered", "gather")}

    def all_reduce(ranks: ProcessRanks, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(ranks: ProcessRanks, tensor: torch.Tensor, dim: int, *_: Any) -> torch.Tensor:
        return torch.cat([tensor] * ranks.size, dim)

    for name in methods:
        setattr(ProcessRanks, name, gather if name == "gather" else all_reduce)
    yield
    for name, method in methods.items():
        setattr(ProcessRanks, name, method)


def of_collectives(model: torch.nn.Module) -> str:
    """What part of the processor time of a prefill is spent while a collective runs."""
    spent, call = [0.0], ProcessRanks._call

    def timed(self: ProcessRanks, *args: Any, **options: int) -> None:
        busy = time.process_time()
        call(self, *args, **options)
        spent[0] += time.process_time() - busy

    ProcessRanks._call = timed  # type: ignore[method-assign]
    shares = []
    with torch.no_grad():
        for _ in range(LEAST_ROUNDS):
            spent[0] = 0.0
            dist.barrier()
            _, busy = prefill(model, PROMPTS[0])
            shares.append(spent[0] / busy)
    ProcessRanks._call = call  # type: ignore[method-assign]
    return f"{statistics.median(shares):.0%} of the processor time of a prefill of {PROMPTS[0]} goes by in collectives"


def build(folder: str, dtype: torch.dtype) -> dict[str, torch.nn.Module]:
    load = functools.partial(transformers.AutoModelForCausalLM.from_pretrained, folder, dtype=dtype)
    whole, ours = load().eval(), load().eval()
    inputs = {"input_ids": torch.arange(PROMPTS[0]).reshape(1, PROMPTS[0]), "use_cache": False}
    plan = autoshard.plan(ours, {"cpu:0": "8GiB", "cpu:1": "8GiB"}, inputs=inputs, strategy="column-parallel")
    autoshard.apply(ours, plan)
    theirs = load(tp_plan="auto").eval()
    with torch.no_grad():
        wanted = whole(**inputs).logits
        for name, model in (("autoshard", ours), ("tp_plan", theirs)):
            off = (model(**inputs).logits - wanted).abs().max() / wanted.abs().max()
            assert off < TOLERANCE[dtype], f"{name} is off by {off:.1e}"
    if not dist.get_rank():
        print(*plan.reasons, sep="\n")
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
    models = build(folder, dtype)
    times, collectives = measure(models, seconds), of_collectives(models["autoshard"])
    if not rank:
        report(times)
        print(f"{collectives}; {len(times['decode']['alone'])} rounds")
    dist.destroy_process_group()


def report(times: dict[str, Times]) -> None:
    print("| | alone | together | tp_plan | autoshard | silent | autoshard / tp_plan | of ideal | silent of ideal |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for kind, found in times.items():
        wall = {name: [seconds for seconds, _ in rows] for name, rows in found.items()}
        busy = {name: statistics.median(seconds for _, seconds in rows) for name, rows in found.items()}
        least = {name: min(rows) for name, rows in wall.items()}
        spread = {name: statistics.quantiles(rows, n=4) for name, rows in wall.items()}
        cells = {name: f"{m * 1e3:.1f} ms ({a * 1e3:.1f} to {b * 1e3:.1f})" for name, (a, m, b) in spread.items()}
        # pairs of the same round: a slow moment of the machine hits both
        against = statistics.median(a / b for a, b in zip(wall["autoshard"], wall["tp_plan"], strict=True))
        ideal = {
            name: statistics.median(b / 2 / a for a, b in zip(wall[name], wall["together"], strict=True))
            for name in ("autoshard", "silent")
        }
        _row(kind, cells, against, ideal)
        for what, row in (("least", least), ("processor", busy)):
            cells = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in row.items()}
            ideal = {name: row["together"] / 2 / row[name] for name in ("autoshard", "silent")}
            _row(f"{kind}, {what}", cells, row["autoshard"] / row["tp_plan"], ideal)


def _row(title: str, cells: dict[str, str], against: float, ideal: dict[str, float]) -> None:
    listed = " | ".join(cells[name] for name in ("alone", "together", "tp_plan", "autoshard", "silent"))
    print(f"| {title} | {listed} | {against:.3f} | {ideal['autoshard']:.0%} | {ideal['silent']:.0%} |")


def one_process(rounds: int = 40) -> None:
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=8, num_attention_heads=4
    )
    whole = transformers.LlamaForCausalLM(config).eval()
    cut = copy.deepcopy(whole)
    inputs = {"input_ids": torch.arange(16).reshape(1, 16), "use_cache": False}
    devices = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
    autoshard.apply(cut, devices, inputs=inputs, strategy="column-parallel", objective="memory")
    seconds: dict[str, list[float]] = {"whole": [], "cut": []}
    with torch.no_grad():
        with torch.profiler.profile() as profiler:
            whole(**inputs)
        ops = sum(event.name.startswith("aten::") and event.cpu_parent is None for event in profiler.events())
        for _ in range(rounds):
            for name, model in (("whole", whole), ("cut", cut)):
                start = time.perf_counter()
                model(**inputs)
                seconds[name].append(time.perf_counter() - start)
    least = {name: min(rows) for name, rows in seconds.items()}
    extra = (least["cut"] - least["whole"]) / ops
    print(
        f"{ops} functions: whole {least['whole'] * 1e3:.1f} ms, cut over two devices {least['cut'] * 1e3:.1f} ms, "
        f"{extra * 1e6:.0f} us more per function (least of {rounds})"
    )


def summed(rounds: int = 60, calls: int = 300) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for bias in (False, True):
        action = Action(kind="reduce", module="", function="linear", occurrence=0, addend="0.2" if bias else "")
        shards = (Shard(name="weight", dim=1, axis="*64"),)
        cut, whole = torch.nn.Linear(64, 64, bias), torch.nn.Linear(64, 64, bias)
        apply_cuts(cut, [Cut(blocks=("",), size=64, shares=(64,), shards=shards, actions=(action,))], ProcessRanks.of())
        x = torch.ones(1, 64)
        least = {"whole": float("inf"), "cut": float("inf")}
        with torch.no_grad():
            for _ in range(rounds):
                for name, layer in (("whole", whole), ("cut", cut)):
                    start = time.perf_counter()
                    for _ in range(calls):
                        layer(x)
                    least[name] = min(least[name], (time.perf_counter() - start) / calls)
        print(
            f"{'with' if bias else 'without'} bias: whole {least['whole'] * 1e6:.1f} us, "
            f"cut {least['cut'] * 1e6:.1f} us (least of {rounds})"
        )
    dist.destroy_process_group()


def main(dtype: str = "float32", seconds: str = "40", *sizes: str) -> None:
    for hidden_size in [int(size) for size in sizes] or LAYERS:
        layers = LAYERS.get(hidden_size, 1)
        config = transformers.LlamaConfig(
            vocab_size=4096, hidden_size=hidden_size, intermediate_size=hidden_size * 11 // 4,
            num_hidden_layers=layers, num_attention_heads=hidden_size // 64, num_key_value_heads=hidden_size // 128,
        )  # fmt: skip
        print(f"hidden size {hidden_size:,}, {layers} layers, {dtype}", flush=True)
        compare(config, dtype, seconds)


def olmo2(seconds: str = "40") -> None:
    config = transformers.Olmo2Config(
        vocab_size=4096, hidden_size=1024, intermediate_size=2816, num_hidden_layers=2, num_attention_heads=16,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    compare(config, "float32", seconds)


def compare(config: transformers.PretrainedConfig, dtype: str, seconds: str) -> None:
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        transformers.set_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        model.to(getattr(torch, dtype)).save_pretrained(folder)
        torch.multiprocessing.spawn(rank_main, (folder, getattr(torch, dtype), float(seconds)), nprocs=2)


if __name__ == "__main__":
    if sys.argv[1:] == ["one-process"]:
        one_process()
    elif sys.argv[1:] == ["summed"]:
        summed()
    elif sys.argv[1:2] == ["olmo2"]:
        olmo2(*sys.argv[2:])
    else:
        main(*sys.argv[1:])

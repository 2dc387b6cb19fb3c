"""Time of planning with every strategy: `python benchmarks/auto_planning.py [70B|405B] [train]`.

A 70 B-parameter decoder on 8 cards, a 405 B one on 16 machines of 8. By the clock, and of the processor, after capture
(the run without weights, the composite one and the proof of the batch are timed by themselves). Needs transformers; no
weights, no GPU.
"""

import pathlib
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import autoshard
from autoshard.batching import BatchAxis, BatchInput, BatchOutput
from autoshard.cluster.parse import parse_devices
from autoshard.collector import no_collection
from autoshard.errors import AutoshardError
from autoshard.planning import Request, candidates_of
from autoshard.sizes import format_seconds
from autoshard.strategies.compare import value_of

CONFIG = pathlib.Path(__file__).parents[1] / "examples" / "llama-3.1-405b"
CASES = {"70B": ("8xH100-80GB", 16), "405B": ("16 hosts of 8xH100-80GB", 256)}


def build(name: str) -> torch.nn.Module:
    config = AutoConfig.from_pretrained(CONFIG)
    if name == "70B":
        config.hidden_size, config.intermediate_size = 8192, 28672
        config.num_attention_heads, config.num_hidden_layers = 64, 80
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def rows(size: int) -> BatchAxis:
    """What is proved of these models; the proof is not what is timed."""
    row = {"dim": 0, "axis": f"*{size}"}
    inputs = (BatchInput(path="input_ids", **row), BatchInput(path="attention_mask", **row))
    return BatchAxis(size=size, inputs=inputs, outputs=(BatchOutput(path="logits", how="cat", **row),))


def main(name: str = "70B", mode: str = "inference") -> None:
    spec, size = CASES[name]
    model, cluster = build(name), parse_devices(spec)
    mode = "training" if mode == "train" else "inference"
    workload = autoshard.Workload(batch_size=size, sequence_length=2048, mode=mode)
    begin = times()
    profile = autoshard.profile(model, workload=workload)
    print(f"{name} {mode} on {spec}: profile {since(begin)}", flush=True)
    processes = len(cluster.devices)
    request = Request(model=model, inputs=None, profile=profile, cluster=cluster, processes=processes)
    begin = times()
    _ = request.composite
    print(f"composite capture {since(begin)}", flush=True)
    begin = times()
    _ = request.groups
    print(f"axis groups {since(begin)}", flush=True)
    request.__dict__["batch"] = rows(size)
    with no_collection():  # as `auto` does
        try_all(request)


def try_all(request: Request) -> None:
    """Plan with every strategy and price the plans."""
    whole = times()
    for candidate in candidates_of(request):
        begin = times()
        try:
            plan = candidate.make()
        except AutoshardError as error:
            print(f"  {candidate.name:16} {since(begin)}  {str(error)[:90]}", flush=True)
            continue
        took = since(begin)
        seconds = value_of(request.price(plan), "latency", request.profile.workload.training)
        mesh = (
            "" if plan.mesh is None else f"{plan.mesh.data} x {plan.mesh.pipeline} x {plan.mesh.tensor} {plan.schedule}"
        )
        print(f"  {candidate.name:16} {took}  {format_seconds(seconds)} per pass  {mesh}", flush=True)
    print(f"all strategies, priced {since(whole)}", flush=True)


def times() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def since(begin: tuple[float, float]) -> str:
    clock, used = (now - then for now, then in zip(times(), begin, strict=True))
    return f"{clock:6.2f} s (processor {used:6.2f} s)"


if __name__ == "__main__":
    main(*sys.argv[1:])

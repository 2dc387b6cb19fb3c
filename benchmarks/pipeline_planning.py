"""Time of planning a pipeline: `python benchmarks/pipeline_planning.py [words of a case]`. Medians, one thread.

Models are on meta, so nothing of their size is allocated. Apart: recording the model; choosing stages, micro-batches,
schedule and recomputing (all schedules of torch, a process per device); and checking the choice op by op.
"""

import statistics
import sys
import time

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.batching import BatchAxis, BatchInput
from autoshard.cluster.parse import parse_devices
from autoshard.pipeline_cost import price, run_plan
from autoshard.profile.units import find_units
from autoshard.strategies.lines import Lines
from autoshard.strategies.pipeline import write_plan
from autoshard.strategies.pipeline_choice import choices_for, choose
from autoshard.workload import Workload

SHAPES = {"8B": (4096, 14336, 32, 32, 8), "70B": (8192, 28672, 80, 64, 8), "405B": (16384, 53248, 126, 128, 8)}
CASES = {
    "8B, 8 devices, inference": ("8B", "8xH100-80GB", False),
    "70B, 8 devices, inference": ("70B", "8xH200", False),
    "70B, 16 devices, training": ("70B", "2 hosts of 8xH200", True),
    "405B, 16 devices, inference": ("405B", "2 hosts of 8xH200", False),
}
ROWS, TOKENS, REPEATS = 64, 512, 5


def build(size: str) -> nn.Module:
    hidden, inner, layers, heads, groups = SHAPES[size]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=groups, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def main(pattern: str = "") -> None:
    for name, (size, spec, training) in CASES.items():
        if pattern not in name:
            continue
        model, cluster = build(size).train(training), parse_devices(spec)
        ids = torch.ones(ROWS, TOKENS, dtype=torch.long)
        inputs = {"input_ids": ids, "use_cache": False, **({"labels": ids} if training else {})}
        mode = "training" if training else "inference"
        begin = time.perf_counter()
        workload = Workload(batch_size=ROWS, sequence_length=TOKENS, mode=mode)
        profile = autoshard.profile(model, inputs, workload=workload)
        recorded = time.perf_counter() - begin
        batch = BatchAxis(
            size=ROWS, inputs=(BatchInput(path="input_ids", dim=0, axis=f"*{ROWS}"),), outputs=()
        )  # fmt: skip
        devices = len(cluster.devices)
        searched, checked = [], []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            units = find_units(profile)
            lines = Lines(profile, cluster, batch, units)
            choices = list(choices_for(devices, ROWS, lines, None, None, devices))
            capacity = np.array([float(device.budget_bytes) for device in cluster.devices])
            best = choose(lines, choices, capacity, "throughput")
            searched.append(time.perf_counter() - begin)
            if best is None:
                break
            begin = time.perf_counter()
            plan = write_plan(profile, cluster, batch, units, best, "throughput")
            figures = price(run_plan(plan, profile, cluster, processes=True), plan, profile, cluster, best.bound)
            checked.append(time.perf_counter() - begin)
        if best is None:
            print(f"{name:30} nothing fits; searched in {searched[0]:.2f} s", flush=True)
            continue
        pipelining = figures.pipelining
        assert pipelining is not None
        print(
            f"{name:30} recorded {recorded:5.2f} s, {len(choices):3} choices "
            f"searched {statistics.median(searched):5.2f} s, checked {statistics.median(checked):5.2f} s: "
            f"{len(plan.stages)} stages, {plan.num_microbatches} micro-batches, {plan.schedule}, "
            f"bubble {pipelining.bubble:.1%}, gap {figures.gap:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])

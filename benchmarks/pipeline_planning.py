"""Time of planning a pipeline: `python benchmarks/pipeline_planning.py [words of a case]`. Medians, one thread.

Models are on meta, so nothing of their size is allocated. Apart: recording the model, and choosing stages,
micro-batches, schedule and recomputing (all schedules of torch, a process per device).
"""

import statistics
import sys
import time

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.batching import BatchAxis, BatchInput
from autoshard.cluster.parse import parse_devices
from autoshard.errors import PlanError
from autoshard.mesh_cost import price
from autoshard.strategies.pipeline import pipeline
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
        planned = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            try:
                plan = pipeline(profile, cluster, batch, processes=len(cluster.devices))
            except PlanError as error:
                print(f"{name:30} {str(error)[:90]}", flush=True)
                break
            planned.append(time.perf_counter() - begin)
        if planned:
            pipelining = price(plan, profile, cluster).pipelining
            assert pipelining is not None
            print(
                f"{name:30} recorded {recorded:5.2f} s, planned {statistics.median(planned):5.2f} s: "
                f"{len(plan.stages)} stages, {plan.num_microbatches} micro-batches, {plan.schedule}, "
                f"bubble {pipelining.bubble:.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])

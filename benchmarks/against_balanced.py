"""The busiest device of Accelerate's balanced map against ours: `python benchmarks/against_balanced.py [TOKENS …]`.

On unequal devices, for a forward of so many tokens (default: 1, a decoded token, and 512, a prompt). Both maps are
priced by the same estimate; "without launches" leaves out the least time of an op, as a captured CUDA graph would, and
is bytes over bandwidth for one token: the model of cost in the literature, in which the goal of 1.7 is set. What is
printed is predicted; nothing is timed, so other programs change nothing. Accelerate's own `get_balanced_memory` and
`infer_auto_device_map` make its map, with the block class that Transformers names; needs accelerate and transformers,
no weights and no GPU.
"""

import logging
import math
import sys
from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.parse import parse_devices
from autoshard.strategies import make_plan

SETS = {
    "8B": ("1xT4,1xA100-80GB", "1xT4,1xA10,1xRTX4090", "1xL4,1xA100-40GB", "1xA10,1xH100-80GB", "2xT4"),
    "70B": ("1xA100-80GB,1xH200", "1xH100-80GB,1xA100-80GB", "1xA100-40GB,2xA100-80GB", "4xRTX4090,1xH100-80GB"),
}
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def build(name: str) -> torch.nn.Module:
    config = LlamaConfig(**SHAPES[name], num_key_value_heads=8, vocab_size=128_256, tie_word_embeddings=False)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def their_map(model: torch.nn.Module, cluster: Cluster) -> dict[str, object]:
    from accelerate.utils import get_balanced_memory, infer_auto_device_map

    room = {i: device.budget_bytes for i, device in enumerate(cluster.devices)}
    blocks = list(model._no_split_modules)
    memory = get_balanced_memory(model, max_memory=room, no_split_module_classes=blocks, dtype=torch.bfloat16)
    return dict(infer_auto_device_map(model, memory, no_split_module_classes=blocks, dtype=torch.bfloat16))


def without_launches(cluster: Cluster) -> Cluster:
    return replace(cluster, devices=tuple(replace(device, launch_seconds=0.0) for device in cluster.devices))


def main(*lengths: str) -> None:
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    models = {name: build(name) for name in SETS}
    for tokens in map(int, lengths or ("1", "512")):
        profiles = {
            name: autoshard.profile(model, workload=autoshard.Workload(batch_size=1, sequence_length=tokens))
            for name, model in models.items()
        }
        for launches in (True, False):
            compare(models, profiles, f"{tokens} tokens{'' if launches else ', without launches'}", launches)


def compare(models: dict[str, torch.nn.Module], profiles: dict, title: str, launches: bool) -> None:
    ratios: list[tuple[float, float]] = []
    for name, specs in SETS.items():
        profile = profiles[name]
        for spec in specs:
            cluster = parse_devices(spec)
            theirs = their_map(models[name], cluster)
            if {"cpu", "disk"} & set(map(str, theirs.values())):
                print(f"{title}: {name} {spec:28} Accelerate puts modules on the CPU or disk", flush=True)
                continue
            cluster = cluster if launches else without_launches(cluster)
            one = autoshard.estimate(theirs, profile, cluster)
            busy = autoshard.estimate(make_plan(profile, cluster, objective="throughput"), profile, cluster)
            fast = autoshard.estimate(make_plan(profile, cluster, objective="latency"), profile, cluster)
            ratio = one.bottleneck_seconds / busy.bottleneck_seconds, one.latency_seconds / fast.latency_seconds
            if len({device.kind for device in cluster.devices}) > 1:
                ratios.append(ratio)
            fits = "" if one.fits else "   (theirs does not fit by our estimate)"
            print(f"{title}: {name} {spec:28} bottleneck {ratio[0]:5.2f}   latency {ratio[1]:5.2f}{fits}", flush=True)
    means = [math.exp(sum(math.log(ratio[k]) for ratio in ratios) / len(ratios)) for k in (0, 1)]
    goal = "   (goal: 1.7)" if title == "1 tokens, without launches" else ""
    shown = f"bottleneck {means[0]:.2f}, latency {means[1]:.2f}{goal}"
    print(f"{title}: geometric mean over {len(ratios)} unequal sets: {shown}")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""What running a batch in parts costs in one process beside the same parts by hand: one thread, alternating.

    python benchmarks/microbatches.py [rounds]

A decoder of 12 small layers, 8 rows in 4 micro-batches, all stages on the plain CPU, so that nothing is copied and
nothing overlaps: what is measured is dividing, hooks and merging. By hand: `for part in ids.chunk(4)`, outputs
concatenated; in training, each part's loss weighted and differentiated by itself. Prints medians with quartiles, and
ratios by hand / autoshard (1 is equal, less is slower).
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers

import autoshard
from autoshard.plan import Mesh, Stage
from autoshard.prove.batch import find_batch_axis

LAYERS, ROWS, PARTS, LENGTH = 12, 8, 4, 64


def decoder() -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=344, num_hidden_layers=LAYERS, num_attention_heads=4
    )
    return transformers.LlamaForCausalLM(config)


def applied(inputs: dict[str, Any], schedule: str) -> torch.nn.Module:
    """The decoder in two stages, both on the CPU."""
    model = decoder()
    workload = autoshard.Workload(mode="training", batch_size=ROWS)
    plan = autoshard.plan(model, "1x64GiB", inputs=inputs, strategy="sequential", workload=workload)
    layers = [f"model.layers.{i}" for i in range(LAYERS)]
    first = ["model.embed_tokens", "model.rotary_emb", *layers[: LAYERS // 2]]
    stages = first, [*layers[LAYERS // 2 :], "model.norm", "lm_head"]
    plan = replace(
        plan,
        placements={path: "cpu" for stage in stages for path in stage},
        stages=tuple(Stage(paths=tuple(stage)) for stage in stages),
        mesh=Mesh(pipeline=2),
        batch=find_batch_axis(model, inputs, workload),
        num_microbatches=PARTS,
        schedule=schedule,
    )
    return autoshard.apply(model, plan)


def infer_by_hand(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(**part).logits for part in chunks(inputs)])


def infer(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs).logits


def train_by_hand(model: torch.nn.Module, inputs: dict[str, Any]) -> torch.Tensor:
    model.zero_grad()
    logits = []
    for part in chunks(inputs):
        output = model(**part)
        (output.loss / PARTS).backward()
        logits.append(output.logits.detach())
    return torch.cat(logits)


def chunks(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    rows = {name: value.chunk(PARTS) for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    return [{**inputs, **{name: own[index] for name, own in rows.items()}} for index in range(PARTS)]


def compare(name: str, ways: list[Callable[[], torch.Tensor]], rounds: int) -> None:
    """Run both ways in turn; the first is by hand."""
    times: list[list[float]] = [[], []]
    outputs = [way() for way in ways]
    assert torch.allclose(outputs[0], outputs[1], atol=1e-5), "the two do not compute the same"
    for _ in range(rounds):
        for way, own in zip(ways, times, strict=True):
            begin = time.perf_counter()
            way()
            own.append(time.perf_counter() - begin)
    quartiles = [statistics.quantiles(own) for own in times]
    texts = [f"{1e3 * q[1]:7.2f} ms ({1e3 * q[0]:.2f} … {1e3 * q[2]:.2f})" for q in quartiles]
    ratio = statistics.median(hand / ours for hand, ours in zip(*times, strict=True))
    print(f"{name:12} by hand {texts[0]}   autoshard {texts[1]}   ratio {ratio:.3f}")


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    ids = torch.randint(0, 256, (ROWS, LENGTH))
    inputs = {"input_ids": ids, "labels": ids.clone(), "use_cache": False}
    plain = decoder()
    model = applied(inputs, "gpipe")
    compare("inference", [lambda: infer_by_hand(plain, inputs), lambda: infer(model, inputs)], rounds)
    steps = autoshard.schedule(applied(inputs, "1f1b"))

    def step() -> torch.Tensor:
        steps.model.zero_grad()
        return steps.step(**inputs).logits

    compare("training", [lambda: train_by_hand(plain, inputs), step], rounds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)

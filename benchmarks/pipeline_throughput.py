"""Training steps of a pipeline over two processes, against stages written by hand for torch's own pipelining.

    python benchmarks/pipeline_throughput.py                       decoder and MLP, 1F1B, 24 rounds
    python benchmarks/pipeline_throughput.py --traces              how many models torch's pipeline() can trace

Both run in the same processes on the same weights, inputs, schedule class and micro-batches; steps take turns, and so
does who is first. It also matters which memory a model got: of two equal ones the one that was made first may take 3 %
longer. So there are two pairs of models; in one of them ours is made first, in the other second. Shown are the medians
of the last rank and of the ratio of neighbours: theirs / ours, above 1 is faster than by hand. Gradients of the two are
compared first.
"""

import argparse
import itertools
import os
import pathlib
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

ROOT = pathlib.Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
PARTS, ROWS = 8, 32


class Mlp(nn.Module):
    """Equal layers and a head."""

    def __init__(self, width: int = 768, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class MlpStage(nn.Module):
    """By hand: some layers, and the head where there is one."""

    def __init__(self, layers: nn.ModuleList, head: nn.Module | None) -> None:
        super().__init__()
        self.layers, self.head = layers, head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if self.head is None else self.head(x)


class DecoderStage(nn.Module):
    """By hand: what Transformers' decoder does in its forward, for some of its layers."""

    def __init__(self, model: nn.Module, layers: nn.ModuleList, first: bool) -> None:
        super().__init__()
        self.embed = model.model.embed_tokens if first else None
        self.rotary, self.layers = model.model.rotary_emb, layers
        self.norm, self.head = (None, None) if first else (model.model.norm, model.lm_head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        table = self.rotary(x, position_ids=positions)
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_ids=positions, position_embeddings=table)
        return x if self.head is None else self.head(self.norm(x))


def decoder() -> nn.Module:
    """A decoder of transformers, untied."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=256, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=4,
        intermediate_size=688, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train()


def case(name: str) -> tuple:
    """(model, stages as paths, hand-written stage of a rank, inputs, target, loss on the output)."""
    if name == "mlp":
        model = Mlp()
        half = len(model.layers) // 2
        stages = [[f"layers.{i}" for i in range(half)], [*(f"layers.{i}" for i in range(half, 2 * half)), "head"]]
        inputs, target = {"x": torch.randn(ROWS * 64, 768)}, torch.randint(0, 10, (ROWS * 64,))
        return model, stages, mlp_stage, inputs, target, nn.functional.cross_entropy
    model = decoder()
    half = len(model.model.layers) // 2
    stages = [["model.embed_tokens", "model.rotary_emb", *(f"model.layers.{i}" for i in range(half))],
              [*(f"model.layers.{i}" for i in range(half, 2 * half)), "model.norm", "lm_head"]]  # fmt: skip
    ids = torch.randint(0, 512, (ROWS, 64))
    return model, stages, decoder_stage, {"input_ids": ids}, ids, decoder_loss


def mlp_stage(model: nn.Module, rank: int) -> nn.Module:
    half = len(model.layers) // 2
    return MlpStage(model.layers[:half] if rank == 0 else model.layers[half:], model.head if rank else None)


def decoder_stage(model: nn.Module, rank: int) -> nn.Module:
    half = len(model.model.layers) // 2
    return DecoderStage(model, model.model.layers[:half] if rank == 0 else model.model.layers[half:], rank == 0)


def decoder_loss(output: object, target: torch.Tensor) -> torch.Tensor:
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def worker(rank: int, port: int, name: str, rounds: int) -> None:
    """Time both on this rank; the last one prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=2)
    pairs = [make_pair(name, rank, ours_first) for ours_first in (True, False)]
    times: dict[str, list[float]] = {"theirs": [], "ours": []}
    for number in range(rounds):
        pair = pairs[number // 2 % 2]
        for key in ("theirs", "ours") if number % 2 else ("ours", "theirs"):
            run, trained = pair[key]
            trained.zero_grad()
            dist.barrier()
            start = time.perf_counter()
            run()
            dist.barrier()
            times[key].append(time.perf_counter() - start)
    if rank == 1:
        ratios = [a / b for a, b in zip(times["theirs"], times["ours"], strict=True)]
        print(f"{name:8} by hand {statistics.median(times['theirs']) * 1e3:7.1f} ms   autoshard "
              f"{statistics.median(times['ours']) * 1e3:7.1f} ms   throughput ratio {statistics.median(ratios):.3f} "
              f"[{min(ratios):.3f}, {max(ratios):.3f}]", flush=True)  # fmt: skip
    dist.destroy_process_group()


def make_pair(name: str, rank: int, ours_first: bool) -> dict[str, tuple[Callable[[], Any], nn.Module]]:
    """Two equal models, made one after the other, and what runs a step of each; both have run once."""
    cases = {}
    for key in ("ours", "theirs") if ours_first else ("theirs", "ours"):
        torch.manual_seed(0)
        cases[key] = case(name)
    steps = {"theirs": step_by_hand(rank, *cases["theirs"]), "ours": step_of_plan(*cases["ours"])}
    for step in steps.values():
        step()
    _compare(cases["ours"][0], cases["theirs"][0])
    return {key: (step, cases[key][0]) for key, step in steps.items()}


def step_by_hand(
    rank: int, model: nn.Module, paths: list, stage_of: Callable, inputs: dict, target: torch.Tensor, loss: Callable
) -> Callable[[], Any]:
    group = dist.new_group([0, 1])
    stage = PipelineStage(stage_of(model, rank), rank, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, PARTS, loss_fn=loss)
    if rank == 0:
        return lambda: schedule.step(*inputs.values(), return_outputs=False)
    return lambda: schedule.step(target=target, return_outputs=False)


def step_of_plan(
    model: nn.Module, paths: list, stage_of: Callable, inputs: dict, target: torch.Tensor, loss: Callable
) -> Callable[[], Any]:
    import autoshard
    from tests.pipelines.plans import plan_of

    autoshard.apply(model, plan_of(model, paths, 2, inputs, parts=PARTS, schedule="1f1b"))
    schedule = autoshard.schedule(model, loss)
    return lambda: schedule.step(**inputs, target=target, return_outputs=False)


def _compare(model: nn.Module, other: nn.Module) -> None:
    """Both have made the same gradients."""
    for (name, one), (_, two) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        if one.grad is not None and two.grad is not None:
            error = float((one.grad - two.grad).abs().max() / two.grad.abs().max())
            assert error < 1e-4, f"{name} {error}"


def count_traces() -> None:
    """Try torch's pipeline() on the models of the tests."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    from tests.models.hf import HF_CASES

    traced = []
    for one in HF_CASES:
        model, inputs = one.model(), one.example()
        layers = next((path for path, module in model.named_modules()
                       if isinstance(module, nn.ModuleList) and len(module) > 1), None)  # fmt: skip
        try:
            pipeline(model, (), inputs, split_spec={f"{layers}.1": SplitPoint.BEGINNING})
            traced.append(one.name)
        except Exception as error:
            print(f"  {one.name}: {type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}")
    print(f"torch's pipeline() traces {len(traced)} of {len(HF_CASES)}: {', '.join(traced)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", default="mlp,decoder")
    parser.add_argument("--traces", action="store_true")
    options = parser.parse_args()
    if options.traces:
        count_traces()
        return
    for name, port in zip(options.only.split(","), itertools.count(29600 + os.getpid() % 300)):
        mp.spawn(worker, (port, name, options.rounds), nprocs=2)


if __name__ == "__main__":
    main()

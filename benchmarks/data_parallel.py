"""Training throughput of replicas in several processes beside plain DistributedDataParallel, same run, alternating.

    python benchmarks/data_parallel.py [--ranks 2] [--steps 6] [--rounds 8] [--launches 5] [--only decoder,vision]

Each round times so many steps of both, in turns; a rank's time is that of the slowest. It also matters which memory a
model got: of two equal ones the one that was made first may take 3 % longer. So there are two pairs of models, which
take turns; in one of them ours is made first, in the other second; and all of it is launched several times. Printed
are medians of each launch and the ratio of throughputs (ours / plain), and the median of the launches, plain with
`find_unused_parameters=False`, its fastest setting. Results count, too: losses after the same steps must agree.
"""

import argparse
import json
import os
import pathlib
import statistics
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard.batching import BatchAxis, BatchInput
from autoshard.plan import Mesh, Plan, PlanDevice
from autoshard.workload import Workload


def build(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model whose loss is in its output, and a batch for one rank."""
    torch.manual_seed(0)
    if name == "decoder":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=256, intermediate_size=704, num_hidden_layers=6, num_attention_heads=8, vocab_size=4000,
            use_cache=False,
        )  # fmt: skip
        ids = torch.randint(0, 4000, (4, 128))
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids.clone()}
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3, image_size=96, patch_size=16
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.arange(8) % 2}


def plan_for(given: dict[str, torch.Tensor], count: int) -> Plan:
    rows = len(next(iter(given.values()))) * count
    return Plan(
        strategy="data-parallel", objective="throughput", workload=Workload(mode="training"),
        devices=tuple(PlanDevice(name=f"cpu:{rank}", memory_bytes=1 << 40) for rank in range(count)),
        placements={"": "cpu:0"}, mesh=Mesh(data=count),
        batch=BatchAxis(
            size=rows, inputs=tuple(BatchInput(path=name, dim=0, axis=f"*{rows}") for name in given), outputs=()
        ),
    )  # fmt: skip


def timed(model: nn.Module, optimizer: torch.optim.Optimizer, given: dict, steps: int) -> tuple[float, float]:
    """Seconds of the slowest rank per step, and the last loss."""
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**given).loss
        loss.backward()
        optimizer.step()
    seconds = torch.tensor([(time.perf_counter() - begin) / steps])
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds), float(loss.detach())


def work(rank: int, count: int, folder: str, names: list[str], steps: int, rounds: int) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # with the threads of gloo, which are not made yet
        processors = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {processors[rank % len(processors)]})
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    ratios = {}
    for name in names:
        pairs = [make_pair(name, count, ours_first, steps=3) for ours_first in (True, False)]
        times: dict[str, list[float]] = {"plain": [], "ours": []}
        losses = {}
        for turn in range(rounds):
            pair = pairs[turn // 2 % 2]
            for which in ("plain", "ours") if turn % 2 else ("ours", "plain"):
                seconds, losses[which] = timed(*pair[which], steps)
                times[which].append(seconds)
        if rank == 0:
            medians = {which: statistics.median(values) for which, values in times.items()}
            ratios[name] = statistics.median(p / o for p, o in zip(times["plain"], times["ours"], strict=True))
            print(
                f"{name:8} plain {medians['plain'] * 1e3:7.1f} ms   ours {medians['ours'] * 1e3:7.1f} ms   "
                f"throughput ratio {ratios[name]:.3f}   "
                f"losses differ by {abs(losses['plain'] - losses['ours']):.1e}",
                flush=True,
            )
    if rank == 0:
        pathlib.Path(folder, "ratios").write_text(json.dumps(ratios))
    dist.destroy_process_group()


def make_pair(name: str, count: int, ours_first: bool, steps: int) -> dict[str, tuple]:
    """Two equal models, made one after the other, their optimizers and inputs; both have run some steps."""
    pair = {}
    for which in ("ours", "plain") if ours_first else ("plain", "ours"):
        model, given = build(name)
        if which == "ours":
            model = autoshard.apply(model, plan_for(given, count))
        else:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        pair[which] = model, torch.optim.AdamW(model.parameters(), lr=1e-4), given
        timed(*pair[which], steps)
    return pair


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--only", default="decoder,vision")
    options = parser.parse_args()
    names, launches = options.only.split(","), []
    for _ in range(options.launches):
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options.ranks, folder, names, options.steps, options.rounds)
            mp.spawn(work, args=arguments, nprocs=options.ranks)
            launches.append(json.loads(pathlib.Path(folder, "ratios").read_text()))
    for name in names:
        found = [ratios[name] for ratios in launches]
        print(f"{name:8} median of launches {statistics.median(found):.3f} [{min(found):.3f}, {max(found):.3f}]")


if __name__ == "__main__":
    main()

"""The simulator of schedules against real runs: `python benchmarks/pipeline_runs.py`. Two processes over gloo.

Each has one thread, and times its own stage (forward, backward) and a tensor sent to the other by itself; the simulator
is given these. Then torch's schedules run, and the median of a step is compared with what was simulated. Needs a
machine that does nothing else: with other work on the cores the ratios say nothing.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import Schedule1F1B as OneForwardOneBackward

from autoshard.schedules.orders import make_order
from autoshard.schedules.simulate import Times, simulate

RANKS, ROWS, REPEATS = 2, 8, 15
WIDTHS = {"equal stages": (512, 512, 512, 512), "unequal stages": (256, 768, 512, 384)}
SCHEDULES: dict[str, tuple[type, int]] = {
    "gpipe": (ScheduleGPipe, 1), "1f1b": (OneForwardOneBackward, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
}  # fmt: skip
HIDDEN = 512


def stage_module(width: int, blocks: int) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, HIDDEN)) for _ in range(blocks)]
    return nn.Sequential(*layers)


def median_seconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    times = []
    for _ in range(repeats + 3):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def stage_seconds(module: nn.Module) -> tuple[float, float]:
    """Forward and backward of one micro-batch, in a loop, both processes at the same time."""
    given = torch.randn(ROWS * 16, HIDDEN, requires_grad=True)
    gradient = torch.randn(ROWS * 16, HIDDEN)

    def both() -> tuple[float, float]:
        begin = time.perf_counter()
        output = module(given)
        middle = time.perf_counter()
        output.backward(gradient)
        return middle - begin, time.perf_counter() - middle

    dist.barrier()
    found = [both() for _ in range(REPEATS + 3)][3:]
    return statistics.median(f for f, _ in found), statistics.median(b for _, b in found)


def send_seconds(rank: int) -> float:
    """One tensor of a micro-batch from one process to the other: half of there and back."""
    tensor = torch.randn(ROWS * 16, HIDDEN)

    def there_and_back() -> None:
        (dist.send if rank == 0 else dist.recv)(tensor, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(tensor, 1 - rank)

    dist.barrier()
    return median_seconds(there_and_back) / 2


def measure(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    ratios = []
    for name, widths in WIDTHS.items():
        for schedule, (kind, per_device) in SCHEDULES.items():
            for microbatches in (2, 4, 8):
                ratios.append(one_case(rank, name, widths, schedule, kind, per_device, microbatches))
    if rank == 0:
        off = sorted(abs(ratio - 1) for ratio in ratios)
        print(f"off by {statistics.median(off):.1%} in the median, {off[-1]:.1%} at the worst", flush=True)
    dist.destroy_process_group()


def one_case(
    rank: int, name: str, widths: tuple[int, ...], schedule: str, kind: type, per_device: int, microbatches: int
) -> float:  # fmt: skip
    """Return measured / simulated seconds of a step."""
    count = RANKS * per_device
    mine = range(rank, count, RANKS)
    modules = {i: stage_module(widths[i], 4 // per_device) for i in mine}
    figures: list[tuple[int, float, float]] = []
    for turn in range(per_device):
        i = rank + turn * RANKS
        figures.append((i, *stage_seconds(modules[i])))
    gathered: list = [None] * RANKS
    dist.all_gather_object(gathered, (figures, send_seconds(rank)))
    stages = sorted(one for rows, _ in gathered for one in rows)
    send = max(seconds for _, seconds in gathered)
    times = Times(
        forward=[f for _, f, _ in stages], backward=[b for _, _, b in stages],
        sends=[send] * (count - 1), returns=[send] * (count - 1),
    )  # fmt: skip
    expected = simulate(make_order(schedule, RANKS, microbatches, stages_per_device=per_device), times).seconds
    built = [PipelineStage(modules[i], i, count, torch.device("cpu")) for i in mine]
    run = kind(built[0] if per_device == 1 else built, microbatches, loss_fn=loss_of)
    whole = torch.randn(ROWS * 16 * microbatches, HIDDEN)

    def step() -> None:
        target = {"target": whole} if (count - 1) % RANKS == rank else {}
        run.step(*([whole] if rank == 0 else []), **target)
        dist.barrier()

    dist.barrier()
    seconds = torch.tensor(median_seconds(step))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    ratio = float(seconds) / expected
    if rank == 0:
        print(
            f"{name:15} {schedule:12} {microbatches} micro-batches  simulated {expected * 1e3:7.2f} ms  "
            f"measured {float(seconds) * 1e3:7.2f} ms  ratio {ratio:.3f}",
            flush=True,
        )
    return ratio


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    sys.exit(main())

"""The simulator of schedules against real runs: `python benchmarks/pipeline_runs.py`. Two processes over gloo.

What is compared is the time from the first action of a step to its last one, on any rank: torch's schedules run it, and
the simulator is given seconds per stage from another run, with another number of micro-batches (and for 1F1B of another
schedule). In that run every forward and backward is timed where it happens:

    rank 0   ─F0─┐ F1 …                      seconds of F of stage 1: from when it could have begun (its input was made,
    rank 1       └──▸ ─F0─                   and its rank had finished what came before) until it is done

Stages are of two kinds. "waiting" stages let a fixed time pass, as the host does while an accelerator computes: each
has a device of its own, as the simulator takes it. "computing" ones multiply matrices, and their ranks take cache,
memory and, where two cores are one, arithmetic from each other; by how much (`slower`) is part of the calibration, and
seconds then depend on what the other rank does at that time. Takes about two minutes on a machine that does nothing
else; with other work on the cores the ratios of computing stages say nothing.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining import Schedule1F1B as OneForwardOneBackward

from autoshard.schedules.orders import Action, Order, make_order
from autoshard.schedules.simulate import Ran, Times, simulate

RANKS, ROWS, HIDDEN, REPEATS = 2, 128, 512, 11
WIDTHS = {"equal stages": (512, 512, 512, 512), "unequal stages": (256, 768, 512, 384)}
SECONDS_OF_WIDTH = 20e-6
"""Of a waiting stage: forward; backward takes twice that."""
SCHEDULES: dict[str, tuple[type, int]] = {
    "gpipe": (ScheduleGPipe, 1), "1f1b": (OneForwardOneBackward, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
}  # fmt: skip
CALIBRATED_ON = {"gpipe": "gpipe", "1f1b": "gpipe", "interleaved": "interleaved"}
MICROBATCHES, CALIBRATION = (2, 4, 8), 6


class Wait(torch.autograd.Function):
    """Lets time pass, forward and backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Waiting(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.scale = seconds, nn.Parameter(torch.ones(HIDDEN))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return Wait.apply(given * self.scale, self.seconds)


def stage_module(kind: str, width: int, blocks: int) -> nn.Module:
    if kind == "waiting":
        return Waiting(width * SECONDS_OF_WIDTH * blocks / 2)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(HIDDEN, width), nn.ReLU(), nn.Linear(width, HIDDEN)) for _ in range(blocks)]
    return nn.Sequential(*layers)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def run(rank: int, schedule: str, modules: dict[int, nn.Module], microbatches: int) -> list[list[Ran]]:
    """Run steps under a schedule of torch; returns what every rank did when, per step, on all ranks."""
    kind, per_device = SCHEDULES[schedule]
    count = RANKS * per_device
    stages = [PipelineStage(module, i, count, torch.device("cpu")) for i, module in modules.items()]
    ran: list[Ran] = []
    for i, stage in zip(modules, stages, strict=True):
        for name, what in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
            setattr(stage, name, timed(getattr(stage, name), rank, what, i, ran))
    runner = kind(stages[0] if per_device == 1 else stages, microbatches, loss_fn=loss_of)
    whole = torch.randn(ROWS * microbatches, HIDDEN)
    steps: list[list[Ran]] = []
    for _ in range(REPEATS + 2):
        ran.clear()
        dist.barrier()
        target = {"target": whole} if (count - 1) % RANKS == rank else {}
        runner.step(*([whole] if rank == 0 else []), **target)
        rows: list[Any] = [None] * RANKS
        dist.all_gather_object(rows, list(ran))  # the clock is that of the machine, the same in all processes
        steps.append([one for row in rows for one in row])
    return steps[2:]


def timed(function: Callable[..., Any], rank: int, kind: Any, stage: int, ran: list[Ran]) -> Callable[..., Any]:
    def call(chunk: int, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        result = function(chunk, *args, **kwargs)
        ran.append(Ran(rank, Action(kind, stage, chunk), begin, time.perf_counter()))
        return result

    return call


def makespan(ran: Iterable[Ran]) -> float:
    ran = list(ran)
    return max(one.end for one in ran) - min(one.begin for one in ran)


class Calibration(NamedTuple):
    """Seconds of each (kind, stage) by itself, and by what part they are longer while the other rank works, too."""

    alone: dict[tuple[str, int], float]
    slower: float


def calibrate(steps: list[list[Ran]], last: int) -> Calibration:
    """Find the seconds of actions, from when they could have begun; `slower` is what explains them best."""
    samples: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for ran in steps:
        ended = {one.action: one.end for one in ran}
        free: dict[int, float] = {}
        for one in sorted(ran, key=lambda one: one.begin):
            kind, stage, number = one.action
            neighbour = stage - 1 if kind == "F" else stage + 1
            needed = ended.get(Action(kind, neighbour, number), 0.0) if 0 <= neighbour <= last else 0.0
            begin = max(free.get(one.device, 0.0), needed) or one.begin
            free[one.device] = one.end
            samples.setdefault((kind, stage), []).append((one.end - begin, together(one, ran)))
    best = (float("inf"), 0.0, {})
    for slower in (step / 50 for step in range(51)):
        alone = {key: statistics.median(s / (1 + slower * part) for s, part in rows) for key, rows in samples.items()}
        off = [abs(s / (alone[key] * (1 + slower * part)) - 1) for key, rows in samples.items() for s, part in rows]
        best = min(best, (statistics.fmean(off), slower, alone), key=lambda one: one[:2])
    return Calibration(best[2], best[1])


def together(one: Ran, ran: Iterable[Ran]) -> float:
    """The part of an action's time during which another rank works."""
    shared = sum(
        max(0.0, min(one.end, other.end) - max(one.begin, other.begin)) for other in ran if other.device != one.device
    )
    return shared / max(one.end - one.begin, 1e-12)


class Sharing(Times):
    """Times that depend on what else runs: `seconds` per action, where they are known."""

    seconds: dict[Action, float]

    def of(self, action: Action) -> float:
        return self.seconds[action]


def predict(order: Order, known: Calibration, count: int) -> float:
    """Simulated seconds of a step; what ranks take from each other depends on the outcome, so it is done some times."""
    sharing = Sharing(forward=[0.0] * count, backward=[0.0] * count, sends=[0.0] * count, returns=[0.0] * count)
    actions = [action for row in order for action in row]
    parts = dict.fromkeys(actions, 1.0)
    for _ in range(8):
        seconds = {a: known.alone[a.kind, a.stage] * (1 + known.slower * parts[a]) for a in actions}
        object.__setattr__(sharing, "seconds", seconds)
        found = simulate(order, sharing)
        parts = {one.action: (parts[one.action] + together(one, found.ran)) / 2 for one in found.ran}
    return found.seconds


def measure(rank: int, folder: str, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for kind in kinds:
        ratios = [ratio for name, widths in WIDTHS.items() for ratio in compare(rank, kind, name, widths)]
        if rank == 0:
            off = sorted(abs(ratio - 1) for ratio in ratios)
            print(f"{kind} stages: off by {statistics.median(off):.1%} in the median, {off[-1]:.1%} at the worst\n")
            sys.stdout.flush()
    dist.destroy_process_group()


def compare(rank: int, kind: str, name: str, widths: tuple[int, ...]) -> list[float]:
    """Return measured / simulated seconds of a step, for every schedule and number of micro-batches."""
    known: dict[str, Calibration] = {}
    ratios = []
    for schedule, (_, per_device) in SCHEDULES.items():
        count = RANKS * per_device
        modules = {i: stage_module(kind, widths[i], 4 // per_device) for i in range(rank, count, RANKS)}
        if CALIBRATED_ON[schedule] == schedule:
            known[schedule] = calibrate(run(rank, schedule, modules, CALIBRATION), count - 1)
        calibration = known[CALIBRATED_ON[schedule]]
        for microbatches in MICROBATCHES:
            order = make_order(schedule, RANKS, microbatches, stages_per_device=per_device)
            expected = predict(order, calibration, count)
            found = statistics.median(map(makespan, run(rank, schedule, modules, microbatches)))
            ratios.append(found / expected)
            if rank == 0:
                print(
                    f"{kind:9} {name:14} {schedule:11} {microbatches} micro-batches  slower together "
                    f"{calibration.slower:.2f}  simulated {expected * 1e3:7.2f} ms  measured {found * 1e3:7.2f} ms  "
                    f"ratio {found / expected:.3f}",
                    flush=True,
                )
    return ratios


def main() -> None:
    kinds = sys.argv[1:] or ["waiting", "computing"]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, kinds), nprocs=RANKS)


if __name__ == "__main__":
    main()

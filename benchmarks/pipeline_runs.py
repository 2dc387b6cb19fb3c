"""The simulator of schedules against real runs: `python benchmarks/pipeline_runs.py`. Two processes over gloo.

What is compared is the time from the first action of a step to its last one, on any rank: torch's schedules run it, and
the simulator is given seconds from other steps, with another number of micro-batches (and for 1F1B of another
schedule). In these every forward and backward is timed where it happens, and what passes before it:

    rank 0   ─F0─ ┐ ─F1─ …            between   after the rank's action before, where all that it needs was there
    rank 1        └──▸ ─F0─           handed    after the neighbour's, where that was waited for: goes to the copy

A step is as long as its actions on the way from begin to end add up to, so means are taken, of ordinary steps.

Stages are of two kinds. "waiting" stages let a fixed time pass, as the host does while an accelerator computes: each
has a device of its own, as the simulator takes it. "computing" ones multiply matrices, and their ranks take cache,
memory and, where two cores are one, arithmetic from each other; by how much (`slower`) is part of the calibration, and
seconds then depend on what the other rank does at that time.

A machine is not as fast from one minute to the next, least of all a virtual one, so all runs of a case take turns, a
few steps at a time, those that are calibrated on, too. "again" is how far two halves of the measured steps are apart,
each by its median: nothing that is predicted from other steps can be expected to be nearer. Takes ten minutes on a
machine that does nothing else; with other work on the cores the ratios of computing stages say nothing.
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

RANKS, ROWS, HIDDEN = 2, 128, 512
TURNS, STEPS = 12, 3
"""Every run of a case takes so many turns of so many steps."""
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


class Runner:
    """Steps of some stages under a schedule of torch, every action of which is timed."""

    def __init__(self, rank: int, schedule: str, modules: dict[int, nn.Module], microbatches: int) -> None:
        kind, per_device = SCHEDULES[schedule]
        count = RANKS * per_device
        stages = [PipelineStage(module, i, count, torch.device("cpu")) for i, module in modules.items()]
        self.ran: list[Ran] = []
        for i, stage in zip(modules, stages, strict=True):
            for name, what in (("forward_one_chunk", "F"), ("backward_one_chunk", "B")):
                setattr(stage, name, timed(getattr(stage, name), rank, what, i, self.ran))
        self.schedule = kind(stages[0] if per_device == 1 else stages, microbatches, loss_fn=loss_of)
        whole = torch.randn(ROWS * microbatches, HIDDEN)
        self.given = [whole] if rank == 0 else []
        self.target = {"target": whole} if (count - 1) % RANKS == rank else {}
        self.steps: list[list[Ran]] = []
        self.turn(2)
        self.steps.clear()

    def turn(self, steps: int = STEPS) -> None:
        """Run some steps and add to `steps` what every rank did when, of the last of them on all ranks."""
        for _ in range(steps):
            self.ran.clear()
            dist.barrier()
            self.schedule.step(*self.given, **self.target)
            rows: list[Any] = [None] * RANKS
            dist.all_gather_object(rows, list(self.ran))  # the clock is that of the machine, the same in all processes
            self.steps.append([one for row in rows for one in row])
        del self.steps[-steps]  # the first one after another run finds other things in the caches

    @property
    def seconds(self) -> float:
        return statistics.median(map(makespan, self.steps))

    @property
    def again(self) -> float:
        """How far the medians of every other step are apart."""
        spans = list(map(makespan, self.steps))
        return abs(statistics.median(spans[::2]) / statistics.median(spans[1::2]) - 1)


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
    """Seconds of the actions of a (kind, stage).

    Attributes:
        alone: of the action itself, while the other rank does nothing; `slower`: by what part more while it works.
        between: from the end of the rank's action before, where all was there.
        handed: from the end of the neighbour's action, where that was waited for, beyond `between`.
    """

    alone: dict[tuple[str, int], float]
    between: dict[tuple[str, int], float]
    handed: dict[tuple[str, int], float]
    slower: float


def calibrate(steps: list[list[Ran]], last: int) -> Calibration:
    """Find the seconds of actions in ordinary steps; `slower` is what explains them best."""
    own: dict[tuple[str, int], list[tuple[float, float]]] = {}
    between: dict[tuple[str, int], list[float]] = {}
    handed: dict[tuple[str, int], list[float]] = {}
    for ran in ordinary(steps):
        ended = {one.action: one.end for one in ran}
        free: dict[int, float] = {}
        for one in sorted(ran, key=lambda one: one.begin):
            kind, stage, number = one.action
            neighbour = stage - 1 if kind == "F" else stage + 1
            needed = ended.get(Action(kind, neighbour, number), 0.0) if 0 <= neighbour <= last else 0.0
            if one.device in free:
                waited = needed > free[one.device]
                (handed if waited else between).setdefault((kind, stage), []).append(
                    one.begin - (needed if waited else free[one.device])
                )
            free[one.device] = one.end
            own.setdefault((kind, stage), []).append((one.end - one.begin, together(one, ran)))
    best = (float("inf"), 0.0, {})
    for slower in (step / 50 for step in range(51)):
        alone = {key: statistics.fmean(s / (1 + slower * part) for s, part in rows) for key, rows in own.items()}
        off = [abs(s / (alone[key] * (1 + slower * part)) - 1) for key, rows in own.items() for s, part in rows]
        best = min(best, (statistics.fmean(off), slower, alone), key=lambda one: one[:2])
    gaps = {key: statistics.fmean(between.get(key, [0.0])) for key in own}
    beyond = {key: max(0.0, statistics.fmean(handed.get(key, [0.0])) - gaps[key]) for key in own}
    return Calibration(best[2], gaps, beyond, best[1])


def ordinary(steps: list[list[Ran]]) -> list[list[Ran]]:
    """The half of the steps that took neither least nor longest: their means add up to what a median step takes."""
    ordered = sorted(steps, key=makespan)
    return ordered[len(ordered) // 4 : -(len(ordered) // 4) or None]


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
    sends = [known.handed.get(("F", stage + 1), 0.0) for stage in range(count - 1)]
    returns = [known.handed.get(("B", stage), 0.0) for stage in range(count - 1)]
    sharing = Sharing(forward=[0.0] * count, backward=[0.0] * count, sends=sends, returns=returns)
    actions = [action for row in order for action in row]
    parts = dict.fromkeys(actions, 1.0)
    for _ in range(8):
        seconds = {
            a: known.alone[a.kind, a.stage] * (1 + known.slower * parts[a]) + known.between[a.kind, a.stage]
            for a in actions
        }
        object.__setattr__(sharing, "seconds", seconds)
        found = simulate(order, sharing)
        parts = {one.action: (parts[one.action] + together(one, found.ran)) / 2 for one in found.ran}
    return found.seconds


def measure(rank: int, folder: str, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="localhost", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for kind in kinds:
        rows = [row for name, widths in WIDTHS.items() for row in compare(rank, kind, name, widths)]
        if rank == 0:
            off, again = (sorted(column) for column in zip(*rows, strict=True))
            said = [f"{statistics.median(column):.1%} in the median, {column[-1]:.1%} at the worst"
                    for column in (off, again)]  # fmt: skip
            print(f"{kind} stages: off by {said[0]}; again {said[1]}\n", flush=True)
    dist.destroy_process_group()


def compare(rank: int, kind: str, name: str, widths: tuple[int, ...]) -> list[tuple[float, float]]:
    """Return how far simulated seconds of a step are off, and measured ones from each other, for every run."""
    runners: dict[tuple[str, int], Runner] = {}
    for schedule, (_, per_device) in SCHEDULES.items():
        count = RANKS * per_device
        modules = {i: stage_module(kind, widths[i], 4 // per_device) for i in range(rank, count, RANKS)}
        numbers = (*MICROBATCHES, CALIBRATION) if CALIBRATED_ON[schedule] == schedule else MICROBATCHES
        runners |= {(schedule, number): Runner(rank, schedule, modules, number) for number in numbers}
    for _ in range(TURNS):
        for runner in runners.values():
            runner.turn()
    found = []
    for schedule, (_, per_device) in SCHEDULES.items():
        count = RANKS * per_device
        calibrated_on = runners[CALIBRATED_ON[schedule], CALIBRATION].steps
        known = calibrate(calibrated_on, RANKS * SCHEDULES[CALIBRATED_ON[schedule]][1] - 1)
        for microbatches in MICROBATCHES:
            runner = runners[schedule, microbatches]
            expected = predict(make_order(schedule, RANKS, microbatches, stages_per_device=per_device), known, count)
            found.append((abs(runner.seconds / expected - 1), runner.again))
            if rank == 0:
                print(
                    f"{kind:9} {name:14} {schedule:11} {microbatches} micro-batches  slower together "
                    f"{known.slower:.2f}  simulated {expected * 1e3:7.2f} ms  measured {runner.seconds * 1e3:7.2f} ms  "
                    f"ratio {runner.seconds / expected:.3f}  again {runner.again:.1%}",
                    flush=True,
                )
    return found


def main() -> None:
    kinds = sys.argv[1:] or ["waiting", "computing"]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (folder, kinds), nprocs=RANKS)


if __name__ == "__main__":
    main()

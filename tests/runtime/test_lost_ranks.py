"""One rank is killed, raises or is stopped: the others end in bounded time, with an error that names it.

Torchrun itself starts this file as a program. It ends the other processes once one has: mostly they have said by then
whom they lost, and else its own table does.
"""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import AutoshardError
from autoshard.plan import Mesh, Stage
from tests.pipelines.plans import plan_of
from tests.ranks import run_ranks
from tests.runtime.cut_models import columns
from tests.scripts import ROOT
from tests.torch_releases import sharded_replicas

GROUP_SECONDS = 8.0
TRAP = {"when": "", "how": ""}
"""What this process does to itself, and in which phase; only the rank that is to be lost has any."""


def spring(when):
    """End, raise or stop here if this is the phase."""
    if TRAP["when"] != when:
        return
    TRAP["when"] = ""
    if TRAP["how"] == "raise":
        raise ValueError("the reason")
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[TRAP["how"]])


class Trap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        spring("forward")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        spring("backward")
        return gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        return x + Trap.apply(self.down(F.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return {"loss": x.square().mean(), "x": x}


LAUNCHED = ("sharded replicas", "sharded columns")
PATHS = [f"blocks.{index}" for index in range(4)]


def made(kind):
    """A model, its plan and its inputs."""
    torch.manual_seed(0)
    model, given = Net(), {"x": torch.randn(8, 8)}
    if kind.startswith("stages"):
        count = int(kind[-1])
        stages = [PATHS[number * 4 // count : (number + 1) * 4 // count] for number in range(count)]
        return model, plan_of(model, stages, count, given, schedule="1f1b", parts=4), given
    mesh = {
        "replicas": Mesh(dp=2),
        "sharded": Mesh(fsdp=2),
        "columns": Mesh(tp=2),
        "mesh": Mesh(dp=2, tp=2),
        "sharded replicas": Mesh(dp=2, fsdp=2),
        "sharded columns": Mesh(fsdp=2, tp=2),
    }[kind]
    plan = plan_of(model, [PATHS], 1, given, parts=1, mesh=mesh)
    cuts = [columns(24, 2, tuple(PATHS))] if mesh.tp > 1 else []
    stages = [Stage(paths=(path,)) for path in PATHS] if mesh.sharded else []
    whole = None if kind == "columns" else mesh
    launched = {}
    if kind in LAUNCHED:
        training = dataclasses.replace(plan.workload, mode="training")
        launched = {"launch": "processes", "precision": "full", "workload": training}
    return (
        model,
        dataclasses.replace(plan, cuts=tuple(cuts), stages=tuple(stages), mesh=whole, num_microbatches=1, **launched),
        given,
    )


def lose(kind, lost, how, when, path):
    """What this rank is told, and after how many seconds, when another is lost in a phase."""
    model, plan, given = made(kind)
    if dist.get_rank() == lost:
        TRAP["how"] = how
        _set_traps(when)
    begin = time.monotonic()
    try:
        if when in ("before", "apply"):
            spring("before")
            autoshard.apply(model, plan)
            return "applied", 0.0
        autoshard.apply(model, plan)
        step = _step_of(model, kind, given)
        step()
        model.zero_grad()
        if dist.get_rank() == lost:
            TRAP["when"] = "forward" if when == "infer" else when
        begin = time.monotonic()
        if when == "save" and "sharded" in kind:  # no training checkpoint of these
            autoshard.save(model, path)
        elif when == "save":
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            autoshard.save_checkpoint(path, model, optimizer, state={"step": 1})
        elif when == "infer":
            model.eval()
            with torch.no_grad():
                for _ in range(2):
                    model(**given)
        else:
            step()
            step()
    except AutoshardError as error:
        unchanged = all(parameter.grad is None for parameter in model.parameters())
        assert unchanged or not kind.startswith("stages"), "gradients of a step that was not finished"
        return f"{type(error).__name__}: {error}", time.monotonic() - begin
    return "nothing was raised", 0.0


def _step_of(model, kind, given):
    if kind.startswith("stages"):
        runner = autoshard.schedule(model)
        return lambda: runner.step(**given)
    return lambda: model(**given)["loss"].backward()


def _set_traps(when):
    """Phases that are none of the model's: between two meetings of `apply`, and while a checkpoint is written."""
    from autoshard.checkpoint.save import SavedState
    from autoshard.checkpoint.training import SaveParts
    from autoshard.runtime import agreement

    meet, resolve, whole, meetings = agreement.meet, SaveParts.resolve_data, SavedState.whole, []

    def counted(*args):
        meetings.append(1)
        if len(meetings) == 2:
            spring("apply")
        return meet(*args)

    def resolved(*args):
        spring("save")
        return resolve(*args)

    def gathered(*args):
        spring("save")
        return whole(*args)

    agreement.meet, SaveParts.resolve_data, SavedState.whole = counted, resolved, gathered
    TRAP["when"] = when if when in ("before", "apply") else ""


SIZES = {"replicas": 2, "sharded": 2, "columns": 2, "mesh": 4, "stages 2": 2, "stages 4": 4}
SIZES |= {"sharded replicas": 4, "sharded columns": 4}
WAYS, PHASES = ("kill", "raise", "stop"), ("before", "apply", "forward", "backward", "save")
USUAL = {
    ("columns", "stop", "apply"),
    ("stages 2", "kill", "backward"),
    ("sharded", "raise", "save"),
    ("sharded replicas", "kill", "backward"),
}


def marks(kind, *case):
    needs_shards = "sharded" in kind or kind in ("replicas", "mesh")
    return [*([] if (kind, *case) in USUAL else [pytest.mark.slow]), *([sharded_replicas] if needs_shards else [])]


EVERY = [(kind, how, when) for kind in SIZES for how in WAYS for when in PHASES]


@pytest.mark.parametrize(("kind", "how", "when"), [pytest.param(*case, marks=marks(*case)) for case in EVERY])
def test_others_end_and_name_it(kind, how, when, tmp_path):
    size = SIZES[kind]
    lost = size - 2 if size > 2 else 1
    path = str(tmp_path / "saved")
    results = run_ranks(lose, size, kind, lost, how, when, path, lost=lost, group_seconds=GROUP_SECONDS)
    for rank, result in enumerate(results):
        if rank != lost:
            message, seconds = result
            # one that has not heard of it yet may be named as well
            named = rf"rank \d lost ranks? [\d, ]*\b{lost}\b|rank {lost} can't|could not be written on rank {lost}\b"
            assert re.search(named, message), (rank, message)
            assert seconds < 2 * GROUP_SECONDS + 8, (rank, message)


@pytest.mark.slow
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        *(("columns", when) for when in PHASES[1:]),
        *((kind, when) for kind in ("replicas", "stages 2") for when in PHASES[2:4]),
    ],
)
def test_all_end_and_name_it_under_torchrun(kind, how, when, tmp_path):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", __name__)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        (*launcher, kind, how, when, str(tmp_path / "saved")), capture_output=True, text=True, cwd=ROOT,
        env=environment, timeout=240,
    )  # fmt: skip
    assert done.returncode == 1  # torchrun waits for half a minute for one that is stopped
    told = re.search(r"rank 0 after (\S+) s: \w+Error: .*rank 1\b", done.stderr)
    assert told or (how != "stop" and "rank      : 1 (local_rank: 1)" in done.stderr), done.stderr[-3000:]
    assert told is None or float(told[1]) < 2 * GROUP_SECONDS + 8
    assert "leaked" not in done.stderr and "terminate called" not in done.stderr, done.stderr[-3000:]


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_SECONDS))
    message, waited = lose(sys.argv[1], 1, *sys.argv[2:])
    sys.exit(f"rank {dist.get_rank()} after {waited:.1f} s: {message}")

"""What a process imports, and what it leaves when it is done: nothing that outlives its process group."""

import os
import subprocess
import sys

import pytest

from tests.sources import PACKAGE

HEAVY = (
    *("transformers", "torch.distributed.tensor", "torch._dynamo", "torch._inductor", "typer", "rich", "scipy"),
    *("accelerate", "autoshard.axes", "autoshard.capture.", "autoshard.flow", "autoshard.pipelines"),
    *("autoshard.runtime.dispatch", "autoshard.strategies"),
)
PROGRAM = """
import os
import sys
import weakref

import torch
before = set(sys.modules)
import autoshard
print(*sorted(set(sys.modules) - before))
import torch.distributed as dist
from torch import nn

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
from typer.testing import CliRunner
from autoshard.cli.main import app
assert CliRunner().invoke(app, ["devices", "8xH100"]).exit_code == 0
print(*sorted(set(sys.modules) - before))
import autoshard.plan, autoshard.simulate, autoshard.verify
import autoshard.profile.measure, autoshard.capture.capture
model, x = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)), torch.ones(1, 8)
plan = autoshard.plan(model, {"cpu:0": "1GiB"}, inputs=x, strategy="column-parallel", objective="memory")
autoshard.estimate(plan, autoshard.profile(model, x), {"cpu:0": "1GiB"})
from autoshard.plan import Plan
print(*[n for n in autoshard.__all__ if n[0].islower() and type(getattr(autoshard, n)).__name__ != "function"])
from autoshard.runtime.collectives import ProcessRanks
ranks = ProcessRanks.of()  # as a model has that is cut
import torch._dynamo  # planning may import it; it takes in much of torch.distributed
import torch.distributed.fsdp
dist.destroy_process_group()
print("left" if group() is not None else "gone")
try:
    ranks.all_reduce(torch.ones(2))
except autoshard.RankError as error:
    assert "was destroyed" in str(error)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("process") / "meeting"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), "MEETING": str(meeting)}
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env=environment)


def test_import_is_light_and_public_names_stay_calls(done):
    """The package comes with little, and help and devices without transformers, the compiler or distributed tensors.

    `autoshard.plan` is a call and a package: whatever is imported, in whatever order, the name stays the call.
    """
    package, command, no_calls = map(str.split, done.stdout.split("\n")[:3])
    assert not no_calls, done.stderr[-2000:]
    assert "autoshard" in package and "autoshard.cli.main" in command
    heavy = [module for module in package if module.startswith(HEAVY)]
    assert not heavy, f"import autoshard also imports {heavy}"
    needless = ("transformers", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "scipy", "accelerate")
    assert not set(command) & set(needless)


def test_no_process_group_outlives_its_destruction(done):
    """Threads of one that is alive at the end abort the process now and then: "terminate called without an active
    exception". Torch's own default arguments kept it where they were imported after it was made.
    """
    assert (done.returncode, done.stdout.split("\n")[3:]) == (0, ["gone", ""]), done.stderr[-2000:]

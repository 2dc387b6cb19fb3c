"""What a process leaves when it is done: nothing that outlives its process group."""

import os
import subprocess
import sys

PROGRAM = """
import os
import weakref

import autoshard
import torch
import torch.distributed as dist
from torch import nn

from autoshard.runtime.collectives import ProcessRanks

os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
group = weakref.ref(dist.group.WORLD)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
plan = autoshard.plan(
    model, {"cpu:0": "1GiB"}, inputs=torch.ones(4, 8), strategy="column-parallel", objective="memory"
)
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


def test_no_process_group_outlives_its_destruction(tmp_path):
    """Threads of one that is alive at the end abort the process now and then: "terminate called without an active
    exception". Torch's own default arguments kept it where they were imported after it was made.
    """
    environment = {**os.environ, "MEETING": str(tmp_path / "meeting")}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stdout) == (0, "gone\n"), done.stderr[-2000:]

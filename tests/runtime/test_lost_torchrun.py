"""Under torchrun itself one of two ranks is killed, raises or is stopped: all ends in bounded time and names the rank.

torchrun ends the others once one has: mostly they have said by then whom they lost, and else its own table does.
"""

import os
import re
import subprocess
import sys

import pytest

from tests.scripts import ROOT

GROUP_SECONDS = 8
CASES = [
    *(("columns", how, when) for how in ("kill", "raise", "stop") for when in ("apply", "forward", "backward", "save")),
    *((kind, how, when) for kind in ("replicas", "stages 2") for how in ("kill", "raise", "stop")
      for when in ("forward", "backward")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how", "when"), CASES)
def test_all_end_and_name_it(kind, how, when, tmp_path):
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    given = ("tests/runtime/lost_program.py", kind, how, when, str(tmp_path / "saved"), str(GROUP_SECONDS))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        (*launcher, *given), capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240
    )  # torchrun waits for half a minute for one that is stopped
    assert done.returncode == 1
    told = re.search(r"rank 0 after (\S+) s: \w+Error: .*rank 1\b", done.stderr)
    assert told or (how != "stop" and "rank      : 1 (local_rank: 1)" in done.stderr), done.stderr[-3000:]
    assert told is None or float(told[1]) < 2 * GROUP_SECONDS + 8
    assert "leaked" not in done.stderr and "terminate called" not in done.stderr, done.stderr[-3000:]

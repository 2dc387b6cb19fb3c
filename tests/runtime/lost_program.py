"""What torchrun starts in `test_lost_torchrun.py`: rank 1 is lost in one phase, the others say what they were told."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.runtime.test_lost_ranks import lose

if __name__ == "__main__":
    kind, how, when, path, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(seconds)))
    message, waited = lose(kind, 1, how, when, path)
    sys.exit(f"rank {dist.get_rank()} after {waited:.1f} s: {message}")

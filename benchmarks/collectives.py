"""What a sum and a gather of the ranks of a cut model take over gloo, sent to all at once and by gloo's collectives.

    python benchmarks/collectives.py [ranks] [seconds]

In turns on this machine, one thread per rank, with bytes as a decoder sums them: those of a token (4 to 64 KiB), and of
a prompt (512 KiB to 8 MiB). Prints medians with quartiles over rounds, and the median of the ratios within a round.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.multiprocessing

from autoshard.runtime.collectives import ProcessRanks, layout

SIZES = (2**12, 2**16, 2**19, 2**20, 2**21, 2**23)
AGAIN_BYTES, LEAST, MOST = 2**22, 4, 100
"""A round makes as many calls as make so many bytes, within limits."""


def rank_main(rank: int, count: int, seconds: float) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", rank=rank, world_size=count)
    sent = ProcessRanks.of()
    ways = {"sent": sent, "gloo": replace(sent, exchanges=False)}
    where = layout(f"*{count}", (1,) * count)
    order = torch.from_numpy(where.order)
    if not rank:
        print(f"{count} ranks\n| | gloo | sent to all | sent / gloo |\n|---|---:|---:|---:|")
    for nbytes in SIZES:
        tensor = torch.zeros(nbytes // 4)
        part = torch.zeros(1, nbytes // 4 // count)
        calls: dict[str, Callable[[ProcessRanks], object]] = {
            "sum": lambda ranks, tensor=tensor: ranks.all_reduce(tensor),
            "gather": lambda ranks, part=part: ranks.gather(part, 0, where, order),
        }
        for kind, call in calls.items():
            found = measure(call, ways, nbytes, seconds / len(SIZES) / len(calls))
            if not rank:
                print_row(f"{kind}, {nbytes / 1024:,.0f} KiB", found)
    dist.destroy_process_group()


def measure(
    call: Callable[[ProcessRanks], object], ways: dict[str, ProcessRanks], nbytes: int, seconds: float
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    again = min(max(AGAIN_BYTES // nbytes, LEAST), MOST)
    end, going = time.monotonic() + seconds, torch.ones(1)
    while going or len(times["gloo"]) < LEAST:
        for name, ranks in ways.items():
            call(ranks)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(again):
                call(ranks)
            times[name].append((time.perf_counter() - start) / again)
        going[0] = time.monotonic() < end
        dist.broadcast(going, 0)
    return times


def print_row(title: str, times: dict[str, list[float]]) -> None:
    cells = []
    for name in ("gloo", "sent"):
        low, middle, high = (seconds * 1e6 for seconds in statistics.quantiles(times[name], n=4))
        cells.append(f"{middle:,.0f} us ({low:,.0f} to {high:,.0f})")
    ratio = statistics.median(a / b for a, b in zip(times["sent"], times["gloo"], strict=True))
    print(f"| {title} | {' | '.join(cells)} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    ranks, budget = (sys.argv[1:] + ["2", "24"][len(sys.argv) - 1 :])[:2]
    os.environ.setdefault("MASTER_PORT", str(20000 + os.getpid() % 20000))
    torch.multiprocessing.spawn(rank_main, (int(ranks), float(budget)), nprocs=int(ranks))

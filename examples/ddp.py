"""DistributedDataParallel with a DistributedSampler, and autoshard in its place: the same weights as one process.

python examples/ddp.py                                            # by mp.spawn
torchrun --nproc-per-node 2 examples/ddp.py                       # or: autoshard run --processes 2 examples/ddp.py
"""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoshard

BATCH, STEPS = 8, 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(BATCH * STEPS, 16, generator=generator), torch.arange(BATCH * STEPS) % 4)


def train(model: nn.Module, batches: DataLoader) -> None:
    """The loop of one process; nothing in it knows of others."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


def batches_of(rank: int, processes: int) -> DataLoader:
    sampler = DistributedSampler(data(), processes, rank, shuffle=False)
    return DataLoader(data(), batch_size=BATCH // processes, sampler=sampler)


def run(rank: int, processes: int, meeting: str) -> None:
    """What every process does."""
    dist.init_process_group("gloo", rank=rank, world_size=processes, init_method=meeting)  # "nccl" on GPUs
    alone = build()
    train(alone, DataLoader(data(), batch_size=BATCH))  # what one process would have got

    wrapped = DistributedDataParallel(build())
    train(wrapped, batches_of(rank, processes))

    model = build()
    devices = {f"cpu:{number}": "1GiB" for number in range(processes)}
    workload = autoshard.Workload(mode="training")
    autoshard.apply(model, devices, inputs=data()[:BATCH][0], strategy="data-parallel", workload=workload)
    train(model, batches_of(rank, processes))  # the same module, without "module." in front of its names
    autoshard.remove(model)
    if rank == 0:
        for name, parameters in (("DistributedDataParallel", wrapped.parameters()), ("autoshard", model.parameters())):
            error = max((a - b).abs().max().item() for a, b in zip(parameters, alone.parameters(), strict=True))
            print(f"{name}: weights equal to those of one process to {error:.0e}: {error < 1e-6}", flush=True)
            assert error < 1e-6
    del wrapped  # it holds the group: if it went after it, torch could wait for threads that wait for this one
    dist.destroy_process_group()


def main() -> None:
    if "RANK" in os.environ:
        run(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://")
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (2, f"file://{folder}/meeting"), nprocs=2)


if __name__ == "__main__":
    main()

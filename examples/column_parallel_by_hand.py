"""A column-parallel linear layer written by hand, all-reduce in its backward, beside the same found by autoshard.

python examples/column_parallel_by_hand.py                                     # starts two processes
torchrun --nproc-per-node 2 examples/column_parallel_by_hand.py
"""

import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch import nn

import autoshard


class Copy(torch.autograd.Function):
    """Identity in forward; in backward every rank has a part of the gradient, and they are summed."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.contiguous()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """The sum over ranks in forward; every summand has its gradient in backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ByHand(nn.Module):
    """The rows of `up` and the columns of `down` that belong to this rank."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.up, self.down = nn.Linear(32, 128 // size), nn.Linear(128 // size, 32, bias=False)
        self.bias = nn.Parameter(whole.down.bias.detach().clone())
        with torch.no_grad():
            self.up.weight.copy_(whole.up.weight.chunk(size, 0)[rank])
            self.up.bias.copy_(whole.up.bias.chunk(size, 0)[rank])
            self.down.weight.copy_(whole.down.weight.chunk(size, 1)[rank])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Sum.apply(self.down(torch.relu(self.up(Copy.apply(x))))) + self.bias


class Whole(nn.Module):
    """What anybody would write."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def gradient(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().mean().backward()
    return y.detach(), x.grad


def main() -> None:
    if "RANK" not in os.environ:
        sys.exit(subprocess.call([sys.executable, "-m", "autoshard", "run", "--processes", "2", __file__]))
    dist.init_process_group("gloo")  # "nccl" on GPUs
    torch.manual_seed(0)
    whole, x = nn.Sequential(Whole(), Whole()), torch.randn(4, 32)
    expected = gradient(whole, x)
    by_hand = gradient(nn.Sequential(*[ByHand(block) for block in whole]), x)

    devices = {f"cpu:{rank}": "1GiB" for rank in range(dist.get_world_size())}
    plan = autoshard.plan(whole, devices, inputs=x, strategy="column-parallel", objective="memory")
    autoshard.apply(whole, plan)
    found = gradient(whole, x)
    if dist.get_rank() == 0:
        print("found:", [(cut.size, [shard.name for shard in cut.shards]) for cut in plan.cuts])
    for name, result in (("by hand", by_hand), ("by autoshard", found)):
        error = max((one - other).abs().max().item() for one, other in zip(result, expected, strict=True))
        if dist.get_rank() == 0:
            print(f"{name}: output and gradient of the input equal to one device to {error:.0e}: {error < 1e-5}")
        assert error < 1e-5
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

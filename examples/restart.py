"""A run that is killed in the middle goes on from its last checkpoint, with the same losses to the last bit.

python examples/restart.py                                            # starts the line below
autoshard run -p 2 --max-restarts 1 examples/restart.py               # rank 1 kills itself; torchrun starts both again
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn

import autoshard

STEPS, KILLED_AT = 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(self.down(self.up(x).relu()), 0.1, self.training)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step))


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model, cut over the processes, and its optimizer, always the same at the start."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(4)]).train()
    workload = autoshard.Workload(mode="training", optimizer="adamw")
    devices = {f"cpu:{rank}": "1GiB" for rank in range(dist.get_world_size())}
    plan = autoshard.plan(
        model, devices, inputs=batch(0), strategy="column-parallel", objective="memory", workload=workload
    )
    autoshard.apply(model, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(checkpoint: pathlib.Path | None) -> list[float]:
    """Train to the end, from the last checkpoint if there is one."""
    model, optimizer = build()
    losses: list[float] = []
    if checkpoint is not None and checkpoint.exists():
        losses = autoshard.load_checkpoint(checkpoint, model, optimizer)["losses"]
        if dist.get_rank() == 0:
            print(f"goes on after step {len(losses)}", flush=True)
    while len(losses) < STEPS:
        loss = model(batch(len(losses))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if checkpoint is not None:
            autoshard.save_checkpoint(checkpoint, model, optimizer, state={"losses": losses})
            first_life = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if first_life and len(losses) == KILLED_AT and dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses


def main() -> None:
    if "RANK" not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            command = ["-m", "autoshard", "run", "--processes", "2", "--max-restarts", "1", __file__, folder]
            sys.exit(subprocess.call([sys.executable, *command]))
    dist.init_process_group("gloo")  # "nccl" on GPUs
    folder = sys.argv[1] if len(sys.argv) > 1 else "checkpoints"
    losses = train(pathlib.Path(folder) / "last")
    expected = train(None)  # the same run, not interrupted
    if dist.get_rank() == 0:
        print("losses:           ", [f"{loss:.6f}" for loss in losses])
        print("equal to a run that was not interrupted, bit for bit:", losses == expected)
    assert losses == expected
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

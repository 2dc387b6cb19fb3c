"""Lightning's Trainer: one device, "ddp", and autoshard's strategies in its place; the same weights after training.

python tests/integrations/lightning_run.py
"""

import logging
import os
import pathlib
import subprocess
import sys
import tempfile
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import autoshard
from autoshard.integrations.lightning import AutoshardProcessesStrategy, AutoshardStrategy


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)], nn.Linear(16, 1))
        self.example_input_array = torch.zeros(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = x + torch.relu(layer(x))
        return self.layers[-1](x)

    def training_step(self, batch: list[torch.Tensor], number: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-3)


def fit(batch_size: int, **settings: object) -> dict[str, torch.Tensor]:
    """Train for two epochs of 4 steps, the rows in their order, and return the weights."""
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(32, 16, generator=generator), torch.randn(32, 1, generator=generator))
    sampler = None
    if "RANK" in os.environ:  # Lightning's own sampler shuffles
        sampler = DistributedSampler(rows, int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"]), shuffle=False)
    module = Regression()
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, **settings,
    )  # fmt: skip
    trainer.fit(module, DataLoader(rows, batch_size=batch_size, sampler=sampler))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def check(what: str, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    error = max((found[name] - value).abs().max().item() for name, value in expected.items())
    print(f"{what:40} largest difference to one device: {error:.1e}", flush=True)
    assert error < 1e-5


def main() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    if "RANK" in os.environ:  # one of two processes; each step sees 4 rows in each
        strategies = {"ddp": "ddp", "autoshard": AutoshardProcessesStrategy()}
        found = {name: fit(4, devices=2, strategy=strategy) for name, strategy in strategies.items()}
        if os.environ["RANK"] == "0":
            torch.save(found, pathlib.Path(sys.argv[1]) / "found.pt")
        return
    with tempfile.TemporaryDirectory() as folder:  # first: a test forks them off this process, which has no threads yet
        command = [sys.executable, "-m", "autoshard", "run", "--processes", "2", __file__, folder]
        assert subprocess.call(command) == 0
        found = torch.load(pathlib.Path(folder) / "found.pt")
    expected = fit(8, devices=1)
    for name, weights in found.items():
        check(f"{name}, two processes", weights, expected)
    with autoshard.simulate("2x64KiB") as devices:
        check(
            "autoshard, two devices, one process",
            fit(8, strategy=AutoshardStrategy(devices, strategy="balanced")),
            expected,
        )
    print("all equal to one device: True")


if __name__ == "__main__":
    main()

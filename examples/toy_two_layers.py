"""A two-layer model split over two devices and trained: by hand, as one does it today, and by autoshard.

By hand, the model's author writes the devices into the model: where each layer goes, and a `.to(...)` in the forward
for every tensor that crosses. With autoshard the model stays as it was. No GPU is needed here: `simulate` gives devices
with real values and real limits. On a machine with two GPUs, write "cuda:0" and "cuda:1" for them.

    python examples/toy_two_layers.py
"""

import copy

import torch
from torch import nn

import autoshard


class ByHand(nn.Module):
    """The split is part of the model: other devices mean another model."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.net1 = nn.Linear(64, 256).to(first)
        self.net2 = nn.Linear(256, 10).to(second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.net1(x.to(self.first)))
        return self.net2(x.to(self.second))


class Toy(nn.Module):
    """The same model without devices."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(64, 256), nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(torch.relu(self.net1(x)))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 5) -> list[float]:
    """An ordinary loop; nothing in it knows about devices."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    torch.manual_seed(0)
    toy, x = Toy(), torch.randn(8, 64)
    expected = toy(x)

    with autoshard.simulate("2x90KiB") as devices:
        by_hand = ByHand(*devices)
        by_hand.load_state_dict(toy.state_dict())
        print("by hand:       equal to one device:", torch.equal(by_hand(x).cpu(), expected))
        del by_hand  # each device has room for half the model, once

        plan = autoshard.plan(toy, devices, inputs=x, strategy="balanced")
        split = autoshard.apply(toy, plan)
        print("by autoshard:  equal to one device:", torch.equal(split(x).cpu(), expected))
        print("placed:", dict(plan.placements))
        assert split is toy and torch.equal(split(x).cpu(), expected)
        autoshard.remove(toy)

    assert torch.equal(toy(x), expected)
    print("removed:       equal to one device: True")

    twin, y = copy.deepcopy(toy), torch.randn(8, 10)
    losses = train(twin, x, y)
    with autoshard.simulate("2x400KiB") as devices:
        workload = autoshard.Workload(mode="training", optimizer="adamw")
        autoshard.apply(toy, devices, inputs=x, strategy="balanced", workload=workload)
        same = train(toy, x, y) == losses
        autoshard.remove(toy)
    same &= all(torch.equal(ours, theirs) for ours, theirs in zip(toy.parameters(), twin.parameters(), strict=True))
    print("trained:       losses and weights after 5 AdamW steps equal, bit for bit:", same)
    assert same


if __name__ == "__main__":
    main()

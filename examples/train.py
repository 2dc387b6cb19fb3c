"""Training a model that is split over two devices: the same losses, gradients and weights as on one.

python examples/train.py
"""

import copy

import torch
from torch import nn

import autoshard


def build() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(
        nn.Linear(16, 64), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(64, 1)
    )


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
    model, x, y = build().train(), torch.randn(4, 10, 16), torch.randn(4, 10, 1)
    twin = copy.deepcopy(model)
    expected = train(twin, x, y)

    with autoshard.simulate("2x2MiB") as devices:
        workload = autoshard.Workload(mode="training", optimizer="adamw")
        autoshard.apply(model, devices, inputs=x, strategy="balanced", workload=workload)
        losses = train(model, x, y)
        print("losses on one device: ", [f"{loss:.6f}" for loss in expected])
        print("losses on two devices:", [f"{loss:.6f}" for loss in losses])
        autoshard.remove(model)

    equal = all(torch.equal(ours, theirs) for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True))
    print("weights after 5 AdamW steps equal, bit for bit:", equal)
    assert losses == expected and equal


if __name__ == "__main__":
    main()

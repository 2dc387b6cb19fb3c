"""`nn.DataParallel` and autoshard side by side: replicas in one process, the batch divided over devices.

python examples/data_parallel.py

`nn.DataParallel` wants GPUs and just calls the module where there are none; autoshard's replicas run on simulated
devices here. The module stays the same object, so names have no "module." in front of them.
"""

import copy

import torch
from torch import nn

import autoshard


def build() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(64, 8))


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """An ordinary loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    model, x, y = build(), torch.randn(12, 10, 64), torch.randint(0, 8, (12, 8))
    model[1] = nn.Sequential(nn.Linear(64, 8), nn.Flatten(1), nn.Linear(80, 64), nn.Unflatten(1, (8, 8)))
    twin = copy.deepcopy(model)
    expected = train(nn.DataParallel(twin), x, y)

    with autoshard.simulate("2x8MiB,1x4MiB") as devices:
        workload = autoshard.Workload(mode="training", optimizer="sgd")
        plan = autoshard.plan(
            model, devices, inputs=x, strategy="data-parallel", objective="throughput", workload=workload
        )
        print("replicas:", plan.mesh.data, "shares of the batch:", plan.mesh.shares or "equal")
        autoshard.apply(model, plan)
        losses = train(model, x, y)
        autoshard.remove(model)
    print("losses with nn.DataParallel:", [f"{loss:.6f}" for loss in expected])
    print("losses with autoshard:      ", [f"{loss:.6f}" for loss in losses])
    error = max((a - b).abs().max().item() for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    print(f"weights after 4 steps equal to {error:.0e}: {error < 1e-5}")  # products of other shapes round otherwise
    assert error < 1e-5


if __name__ == "__main__":
    main()

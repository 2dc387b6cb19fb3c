"""A ResNet-50 split by hand over two devices, its inputs pipelined in pieces, and autoshard doing both by itself.

python examples/resnet_pipeline.py
"""

import torch
from resnet_two_devices import ResNet
from torch import nn

import autoshard


class SplitByHand(nn.Module):
    """The classic: the first half on one device, the second on another, the batch in pieces that follow one another."""

    def __init__(self, network: ResNet, devices: list[str], rows: int) -> None:
        super().__init__()
        self.devices, self.rows = devices, rows
        self.first = nn.Sequential(network.stem, network.pool, *network.stages[:2]).to(devices[0])
        self.second = nn.Sequential(*network.stages[2:]).to(devices[1])
        self.fc = network.fc.to(devices[1])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pieces = iter(images.split(self.rows))
        between = self.first(next(pieces).to(self.devices[0])).to(self.devices[1])
        results = []
        for piece in pieces:
            results.append(self.finish(between))  # device 1 works on a piece
            between = self.first(piece.to(self.devices[0])).to(self.devices[1])  # while device 0 does the next
        results.append(self.finish(between))
        return torch.cat(results)

    def finish(self, between: torch.Tensor) -> torch.Tensor:
        return self.fc(self.second(between).mean((2, 3)))


def main() -> None:
    torch.manual_seed(0)
    network, images = ResNet().eval(), torch.randn(8, 3, 64, 64)
    with torch.no_grad():
        expected = network(images)
        with autoshard.simulate("2x16MiB") as devices:
            plan = autoshard.plan(
                network, devices, inputs=images, strategy="pipeline", objective="throughput", num_microbatches=4
            )
            autoshard.apply(network, plan)
            found = network(images).cpu()
            autoshard.remove(network)
            print("stages end with", [stage.paths[-1] for stage in plan.stages])
            by_hand = SplitByHand(network, ["cpu:0", "cpu:1"], rows=2)(images).cpu()
    scale = expected.abs().max()
    for name, result in (("by hand", by_hand), ("by autoshard", found)):
        error = ((result - expected).abs().max() / scale).item()
        print(f"{name}: equal to the whole batch on one device to {error:.0e}: {error < 1e-5}")
        assert error < 1e-5


if __name__ == "__main__":
    main()

"""A residual network split over two devices, and its batch pipelined in pieces: by hand, and by autoshard.

Nothing in the model says where to cut. The cut falls where it costs least, also inside a residual block: the sum of two
tensors on different devices is aligned by the runtime. Split only, the result is bit for bit that of the whole network;
in pieces, convolutions sum in another order.

    python examples/resnet_pipeline.py
"""

import torch
from torch import nn

import autoshard
from autoshard.common.sizes import format_bytes


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions around a shortcut, in the proportions of ResNet-50."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        outside = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outside, 1, bias=False), nn.BatchNorm2d(outside)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.relu(self.norm2(self.conv2(out)))
        return self.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Depths (3, 4, 6, 3) and widths 16 to 128: ResNet-50 with a quarter of its channels."""

    def __init__(self, depths: tuple[int, ...] = (3, 4, 6, 3), width: int = 16, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.pool = nn.MaxPool2d(3, 2, 1)
        stages, inside = [], width
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                blocks.append(Bottleneck(inside, width * 2**stage, 2 if stage and not block else 1))
                inside = 4 * width * 2**stage
            stages.append(nn.Sequential(*blocks))
        self.stages, self.fc = nn.Sequential(*stages), nn.Linear(inside, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stages(self.pool(self.stem(x)))
        return self.fc(x.mean((2, 3)))


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


def split(network: ResNet, images: torch.Tensor, expected: torch.Tensor) -> None:
    """Run a network that neither device could hold."""
    with autoshard.simulate("1x6MiB,1x4MiB") as devices:
        profile = autoshard.profile(network, images)
        plan = autoshard.plan(network, devices, inputs=images, strategy="balanced")
        for device in autoshard.estimate(plan, profile).devices:
            peak, memory = format_bytes(device.peak_bytes), format_bytes(device.memory_bytes)
            print(f"{device.name}: {peak} of {memory} at the peak")
        autoshard.apply(network, plan)
        equal = torch.equal(network(images).cpu(), expected)
        print("split: equal to the whole network, bit for bit:", equal)
        assert equal
        autoshard.remove(network)


def pipeline(network: ResNet, images: torch.Tensor, expected: torch.Tensor) -> None:
    """Let the second device work on a piece of the batch while the first does the next."""
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


def main() -> None:
    torch.manual_seed(0)
    network, images = ResNet().eval(), torch.randn(8, 3, 64, 64)
    with torch.no_grad():
        expected = network(images)
        split(network, images[:2], network(images[:2]))
        pipeline(network, images, expected)


if __name__ == "__main__":
    main()

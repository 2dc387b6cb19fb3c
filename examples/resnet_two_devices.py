"""A residual convolutional network split in two, with nothing in the model that says where.

The cut falls where it costs least, also inside a residual block: the sum of two tensors on different devices is aligned
by the runtime. The result is bit for bit that of the unsplit network.

    python examples/resnet_two_devices.py
"""

import torch
from torch import nn

import autoshard
from autoshard.sizes import format_bytes


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


def main() -> None:
    torch.manual_seed(0)
    model, images = ResNet().eval(), torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        expected = model(images)

        with autoshard.simulate("1x6MiB,1x4MiB") as devices:
            profile = autoshard.profile(model, images)
            plan = autoshard.plan(model, devices, inputs=images, strategy="balanced")
            for device in autoshard.estimate(plan, profile).devices:
                peak, memory = format_bytes(device.peak_bytes), format_bytes(device.memory_bytes)
                print(f"{device.name}: {peak} of {memory} at the peak")
            autoshard.apply(model, plan)
            split = model(images)
            equal = torch.equal(split.cpu(), expected)
            print("equal to the unsplit network, bit for bit:", equal)
            assert equal
            autoshard.remove(model)


if __name__ == "__main__":
    main()

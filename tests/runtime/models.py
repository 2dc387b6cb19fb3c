"""Hand-made modules that are hard to spread over devices, each with the map that makes it hard."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

D = 8


class Residual(nn.Module):
    """x + f(x) with f elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.a(x)
        return self.c(h + torch.tanh(self.b(h)))


class ParentReadsChild(nn.Module):
    """The parent computes with its child's weight; the child may be on any device."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.child = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return F.linear(self.first(x), self.child.weight) + self.child(x)


class RootParameters(nn.Module):
    """Parameters and a buffer directly on the root, each on a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))
        self.register_buffer("table", torch.randn(5, D), persistent=False)
        self.out = nn.Linear(D, D)

    def forward(self, x):
        return self.out(x * self.scale + self.shift + self.table[: x.shape[1]])


class Tied(nn.Module):
    """Embedding and head share their weight across devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x.argmax(-1))))


class WritesArgument(nn.Module):
    """A child writes into its argument in place, and the parent reads the argument afterwards."""

    class Child(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(D, D)

        def forward(self, x):
            x.relu_()
            return self.lin(x)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.child = nn.Linear(D, D), self.Child()

    def forward(self, x):
        h = self.first(x)
        return self.child(h) + h


class SharedDict(nn.Module):
    """Children pass results on through a dict and a list that they fill, by identity."""

    class Child(nn.Module):
        def __init__(self, key: int) -> None:
            super().__init__()
            self.key, self.lin = key, nn.Linear(D, D)

        def forward(self, x, store, log):
            h = self.lin(x) + sum(store.values())
            store[self.key] = h
            log.append(h)
            return h

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Child(index) for index in range(3))

    def forward(self, x):
        store, log = {}, []
        for layer in self.layers:
            x = layer(x, store, log)
        assert len(log) == len(store) == 3 and log[2] is store[2]
        return x, store, torch.stack(log)


class CalledTwice(nn.Module):
    """One module at two places in the tree and three times in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Sequential(nn.Linear(D, D))
        self.two.append(self.one)

    def forward(self, x):
        return self.one(self.two(self.one(x)))


class Counting(nn.Module):
    """Buffers that the forward updates in place, with numbers from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("mean", torch.zeros(D))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        h = self.lin(x)
        self.steps += 1
        self.mean.lerp_(h.detach().mean((0, 1)), 0.1)
        return self.norm((h - self.mean).transpose(1, 2)) / self.steps


class Skips(nn.Module):
    """The two ends of a U-Net: the first output goes around everything."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(3))

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = layer(x).relu()
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1))
        return x


class HostTensors(nn.Module):
    """Tensors made on the CPU meet the model's own; a module without tensors mixes devices."""

    class Mix(nn.Module):
        def forward(self, left, right):
            return left * right

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.mix, self.table = nn.Linear(D, D), nn.Linear(D, D), self.Mix(), torch.randn(D)

    def forward(self, x):
        return self.mix(self.a(x), self.b(x)) + torch.arange(D) + self.table


class Steps(nn.Module):
    """The output is a generator: everything runs after the call has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        for _ in range(3):
            x = self.a(x) + self.b(x)
            yield x


class Empty(nn.Module):
    """No tensors at all."""

    def forward(self, x):
        return x + torch.ones(D)


def rows(batch: int = 2, length: int = 4) -> torch.Tensor:
    return torch.randn(batch, length, D)


@dataclass(frozen=True)
class Hard:
    """A model and a map; `trains` is False where the output is not differentiable or no gradient is expected."""

    make: Callable[[], nn.Module]
    device_map: dict[str, str]
    train_mode: bool = False
    trains: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


HARD = {
    "residual": Hard(Residual, {"a": "cpu:0", "b": "cpu:1", "c": "cpu:2"}),
    "parent-reads-child": Hard(ParentReadsChild, {"first": "cpu:0", "child": "cpu:1"}),
    "root-parameters": Hard(
        RootParameters, {"scale": "cpu:0", "shift": "cpu:1", "table": "cpu:2", "out": "cpu:1"}
    ),
    "tied": Hard(Tied, {"embed": "cpu:0", "body": "cpu:1", "head": "cpu:1"}),
    "writes-argument": Hard(WritesArgument, {"first": "cpu:0", "child": "cpu:1"}),
    "shared-dict": Hard(SharedDict, {"layers.0": "cpu:0", "layers.1": "cpu:1", "layers.2": "cpu:2"}),
    "called-twice": Hard(CalledTwice, {"one": "cpu:0", "two": "cpu:1"}),
    "counting": Hard(Counting, {"lin": "cpu:0", "norm": "cpu:1", "mean": "cpu:1", "steps": "cpu:0"}, train_mode=True),
    "skips": Hard(
        Skips,
        {"down.0": "cpu:0", "down.1": "cpu:1", "down.2": "cpu:2", "up.0": "cpu:0", "up.1": "cpu:1", "up.2": "cpu:2"},
    ),
    "host-tensors": Hard(HostTensors, {"a": "cpu:0", "b": "cpu:1"}),
    "host-tensors-one-device": Hard(HostTensors, {"": "cpu:1"}),
    "steps": Hard(Steps, {"a": "cpu:0", "b": "cpu:1"}),
    "empty": Hard(Empty, {"": "cpu:1"}, trains=False),
}  # fmt: skip

"""Small hand-made modules, each with a map that makes it hard to spread over devices; more are in `tests/models`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
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


class Tied(nn.Module):
    """Embedding and head share their weight across devices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(D, D), nn.Linear(D, D), nn.Linear(D, D, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        return self.head(self.body(self.embed(x.argmax(-1))))


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


class Cross(nn.Module):
    """A key and a value made of one memory by a layer elsewhere; the memory is used before and after it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.value = nn.Linear(D, D), nn.Linear(D, D)

        def forward(self, memory):
            return torch.tanh(self.key(memory)) * self.value(memory)

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.layer, self.head = nn.Linear(D, D), self.Layer(), nn.Linear(D, D)

    def forward(self, x):
        memory = self.encoder(x)
        start = memory * memory.abs()
        found = self.layer(memory).cpu()
        return (self.head(memory) + found.to(memory.device)) * start, memory


def rows(batch: int = 2, length: int = 4) -> torch.Tensor:
    return torch.randn(batch, length, D)


@dataclass(frozen=True)
class Hard:
    """A model and a map."""

    make: Callable[[], nn.Module]
    device_map: dict[str, str]
    train_mode: bool = False


HARD = {
    "residual": Hard(Residual, {"a": "cpu:0", "b": "cpu:1", "c": "cpu:2"}),
    "tied": Hard(Tied, {"embed": "cpu:0", "body": "cpu:1", "head": "cpu:1"}),
    "counting": Hard(Counting, {"lin": "cpu:0", "norm": "cpu:1", "mean": "cpu:1", "steps": "cpu:0"}, train_mode=True),
    "host-tensors": Hard(HostTensors, {"a": "cpu:0", "b": "cpu:1"}),
    "host-tensors-one-device": Hard(HostTensors, {"": "cpu:1"}),
    "cross": Hard(Cross, {"encoder": "cpu:0", "layer": "cpu:1", "head": "cpu:0"}),
}

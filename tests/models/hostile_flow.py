"""Hostile models, part 1: control flow that depends on values, and arguments and outputs of every shape."""

import enum
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.models.case import Case

D = 16


def rows(batch: int, length: int) -> dict[str, Any]:
    """One float argument `x` of shape [batch, length, D]."""
    return {"x": torch.randn(batch, length, D)}


def tokens(batch: int, length: int) -> dict[str, Any]:
    """One integer argument `ids` of shape [batch, length], values below 32."""
    return {"ids": torch.randint(0, 32, (batch, length))}


SHAPES = ((2, 6), (5, 6), (2, 9), (2, 3))


class ValueBranch(nn.Module):
    """Takes one branch or the other by the sign of a sum of floats; the branches mix different layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        h = self.first(x)
        if x.sum() > 0:
            return self.left(h) + h
        return torch.tanh(self.right(h) * x) - self.left(h)


class CountedLoop(nn.Module):
    """Reads loop counts and indices out of integer tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(32, D), nn.Linear(D, D)
        self.heads = nn.ModuleList(nn.Linear(D, D) for _ in range(3))

    def forward(self, ids, lengths):
        h = self.embed(ids)
        for _ in range(int(lengths.max())):
            h = torch.tanh(self.step(h))
        for row, count in enumerate(lengths.tolist()):
            h = torch.cat([h[:row], self.heads[count % 3](h[row : row + 1]), h[row + 1 :]])
        return h, (ids > 7).nonzero()


class RoutedExperts(nn.Module):
    """Sends every token to its two best experts, in a loop over the experts that were chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, 24), nn.SiLU(), nn.Linear(24, D)) for _ in range(4))

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for index, expert in enumerate(self.experts):
            where, slot = torch.where(chosen == index)
            if where.numel():
                out.index_add_(0, where, expert(flat[where]) * weights[where, slot, None])
        return out.reshape(x.shape)


class Inner(nn.Module):
    """A child whose forward is a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x) -> Iterator[torch.Tensor]:
        h = self.a(x)
        yield h
        yield self.b(h) + h
        yield self.b(h) * x


class GeneratorChild(nn.Module):
    """Consumes a generator that its child returns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(D, D)

    def forward(self, x):
        return sum(self.out(piece) for piece in self.inner(x))


class GeneratorRoot(nn.Module):
    """Returns a generator: its layers run after the forward has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Inner(), nn.Linear(D, D)

    def forward(self, x):
        return (self.out(piece) + x for piece in self.inner(x))


@dataclass
class Result:
    hidden: list[Any]
    logits: torch.Tensor | None = None
    name: str = ""
    more: dict[str, Any] | None = None


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class DataclassOutputs(nn.Module):
    """Passes a named tuple between children; returns a dataclass of dicts in lists in tuples, None and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.join = nn.Linear(D, D), nn.Linear(D, D), Join()

    def forward(self, x):
        pair = Pair(self.a(x), right=self.b(x))
        h = self.join(pair)
        return Result([h, (pair.right, None)], logits=pair.left, name="done", more={"count": 3, "x": {"y": h.mean()}})


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, pair: Pair):
        return pair.left @ self.weight + pair.right


class Mode(enum.Enum):
    ADD = 1
    CAT = 2


class OddArguments(nn.Module):
    """Arguments of every kind, between its children too: dicts and lists of tensors, numbers, names, an enum."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OddLayer() for _ in range(3))

    def forward(self, batch: dict, scales: list, *, mode: Mode = Mode.ADD, name: str | None = None):
        for index, layer in enumerate(self.layers):
            batch = dict(batch, x=layer(batch, index, flag=name is None, mode=mode, scales=scales))
        return batch["x"]


class OddLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.cat = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, batch: dict, index: int, *, flag: bool, mode: Mode, scales: list):
        x, h = batch["x"], self.fc(batch["x"]) * batch["mask"]["rows"][..., None] * scales[0] ** index + scales[1]
        return x + h if mode is Mode.ADD and flag else self.cat(torch.cat([x, h], dim=-1))


class MutatedDict(nn.Module):
    """A dict and a list in it are filled by one layer and read by the next ones; the caller reads them in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DictLayer() for _ in range(4))

    def forward(self, x):
        state: dict[Any, Any] = OrderedDict(x=x, all=[x])
        for index, layer in enumerate(self.layers):
            layer(state, index)
        return (
            torch.cat(state["all"], -1),
            state["seen"],
            sum(state[key].sum() for key in state if isinstance(key, int)),
        )


class DictLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)

    def forward(self, state: dict, index: int) -> None:
        state[index] = state["x"]
        state["x"] = torch.relu(self.fc(state["x"])) + state.get(index - 2, 0)
        state["seen"] = state.get("seen", 0) + torch.cat(state["all"], dim=-1).mean()
        state["all"].append(state["x"])


class Looped(nn.Module):
    """One block called in a loop with a different index, and one layer shared by two parents."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        shared = nn.Linear(D, D)
        self.left, self.right = nn.Sequential(shared, nn.ReLU()), nn.Sequential(nn.Linear(D, D), shared)
        self.times = nn.Embedding(5, D)

    def forward(self, x):
        for index in range(5):
            x = self.block(x) + self.times.weight[index]
        return self.right(self.left(x)) + x


class DirectForward(nn.Module):
    """Calls `child.forward` and other methods of children, so that no hook of theirs runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.codec = nn.Linear(D, D), nn.Linear(D, D), Codec()

    def forward(self, x):
        h = self.a.forward(x) + self.codec.encode(x)
        return self.codec.decode(self.b.forward(h)), self.codec(h)


class Codec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 24), nn.Linear(24, D)

    def encode(self, x):
        return self.down(F.gelu(self.up(x)))

    def decode(self, x):
        return F.linear(F.linear(x, self.down.weight.T), self.up.weight.T)

    def forward(self, x):
        return self.decode(self.encode(x))


def _counted(batch: int, length: int) -> dict[str, Any]:
    return {**tokens(batch, length), "lengths": torch.arange(1, batch + 1)}


def _odd(batch: int, length: int) -> dict[str, Any]:
    mask = {"rows": (torch.arange(length) % 2).float().expand(batch, length)}
    return {"batch": {**rows(batch, length), "mask": mask}, "scales": [torch.tensor(0.7), torch.randn(D)], "name": None}


FLOW_CASES = [
    Case(name="value-branch", build=ValueBranch, inputs=rows, shapes=SHAPES),
    Case(name="counted-loop", build=CountedLoop, inputs=_counted, shapes=SHAPES),
    Case(name="routed-experts", build=RoutedExperts, inputs=rows, shapes=SHAPES),
    Case(name="generator-child", build=GeneratorChild, inputs=rows, shapes=SHAPES),
    Case(name="generator-root", build=GeneratorRoot, inputs=rows, shapes=SHAPES, refused="return (self.out(piece)"),
    Case(name="dataclass-output", build=DataclassOutputs, inputs=rows, shapes=SHAPES),
    Case(name="odd-arguments", build=OddArguments, inputs=_odd, shapes=SHAPES),
    Case(name="mutated-dict", build=MutatedDict, inputs=rows, shapes=SHAPES),
    Case(name="looped", build=Looped, inputs=rows, shapes=SHAPES),
    Case(name="direct-forward", build=DirectForward, inputs=rows, shapes=SHAPES),
]

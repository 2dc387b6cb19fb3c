"""Blocks in which a size of what could be cut reaches values, and the same blocks without that; all take [2, T, 24]."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.check.blocks import Stack

WIDTH = 24
TABLE = {48: 0.5, 24: 0.7}


class Wide(nn.Module):
    """Up and down again; `between` is what is done in the middle, where the width may be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(F.silu(self.up(x))))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Scaled(Wide):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.up.weight.shape[0] ** -0.5


class Unlike(Wide):
    """Every one adds another number, so no two are alike; some scale by a width, some stop at other lengths than 5."""

    def __init__(self, number: int, scales: bool, stops: bool) -> None:
        super().__init__()
        self.number, self.scales, self.stops = number, scales, stops

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.stops and h.shape[1] != 5 and h.shape[-1] != 2 * WIDTH:
            raise ValueError("too narrow")
        return (h * self.up.weight.shape[0] ** -0.5 if self.scales else h) + self.number


class Mean(Wide):
    """A mean that is a sum and a division, behind a gate that is open for all random values."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.sigmoid(100 + h.sum(-1, keepdim=True) / h.shape[-1])


class OpenMean(Wide):
    """The same, right: the analysis sees a mean."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.sigmoid(100 + h.mean(-1, keepdim=True))


class Counted(Wide):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h / torch.ones(h.shape[-1]).sum()


class Constant(Wide):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.tensor([0.5, 1.0 / h.numel()])[1]


class Threshold(Wide):
    """No value is as large as that."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.clamp(max=1000.0 * h.shape[-1])


class Looked(Wide):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * TABLE[h.shape[-1]]


class Branch(Wide):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h if h.shape[-1] > 30 else h + 1e-9


class Positions(Wide):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h + 1e-9 * torch.arange(h.shape[-1])


class Groups(Wide):
    """Groups of 6 channels in all, of 3 on a rank."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return F.group_norm(h.flatten(0, 1), 8).view_as(h)


class Temperature(nn.Module):
    """Attention divided by the number of heads, which has to be smaller in the shapes."""

    def __init__(self, scale: float = 0.0) -> None:
        super().__init__()
        self.heads, self.scale = 4, scale
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (one(x).view(*x.shape[:2], self.heads, 6).transpose(1, 2) for one in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) / (self.scale or self.heads)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Fixed(Temperature):
    """The same with a temperature of its own."""

    def __init__(self) -> None:
        super().__init__(4.0)


class Flagged(Wide):
    """Does what it should unless it is marked, and then the same by a size."""

    marked = False

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h * (h.shape[-1] if self.marked else 48)


class Outside(Stack):
    """What is around the blocks reads the size of a parameter in them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.blocks[1].up.weight.shape[0] ** -0.5


class Numbers(Stack):
    """Returns a size beside the tensor."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return super().forward(x), self.blocks[0].up.out_features + self.blocks[0].up.weight.shape[0]


class OneMarked(Stack):
    """One of eight blocks that are alike in all they compute has another flag."""

    def __init__(self, kind: type[nn.Module] = Flagged) -> None:
        super().__init__(kind, 8)
        self.blocks[5].marked = True


class Spelt(nn.Module):
    """The sum over ranks is due behind a function that one block calls by another name."""

    marked = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(shape) / 5) for shape in ((WIDTH, 48), (48, WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = (x @ self.up).relu()
        return torch.matmul(h, self.down) if self.marked else h @ self.down

"""Residual blocks of two matrices, which most tests of planning are about."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int = 64, inner: int = 0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner or 4 * width), nn.Linear(inner or 4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    """Blocks one after the other; with `words`, a table before them and a head behind them."""

    def __init__(self, depth: int = 4, width: int = 64, words: int = 0) -> None:
        super().__init__()
        if words:
            self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if hasattr(self, "embed") else x
        for block in self.blocks:
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


class Mixes(nn.Module):
    """Rows of the batch see each other, whatever a plan says: their mean is taken off."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x - x.mean(0, keepdim=True))

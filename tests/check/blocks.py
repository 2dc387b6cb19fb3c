"""Hand-made blocks, each with a trap for whoever cuts them; names say nothing about what they are."""

import torch
import torch.nn.functional as F
from torch import nn


class Grouped(nn.Module):
    """Attention with fewer keys than queries; sizes come from attributes."""

    def __init__(self, width: int = 24, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.many, self.few, self.each = heads, groups, width // heads
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, groups * self.each)
        self.c = nn.Linear(width, groups * self.each)
        self.d = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q = self.a(x).view(rows, length, self.many, self.each).transpose(1, 2)
        k = self.b(x).view(rows, length, self.few, self.each).transpose(1, 2)
        v = self.c(x).view(rows, length, self.few, self.each).transpose(1, 2)
        k, v = (t.repeat_interleave(self.many // self.few, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v)
        return self.d(y.transpose(1, 2).reshape(rows, length, self.many * self.each))


class Fused(nn.Module):
    """Queries, keys and values in one projection, taken apart by sizes in a list."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.sizes = [width, width, width]
        self.all = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.all(x).split(self.sizes, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2) * 0.4).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Dropped(nn.Module):
    """Masks for what is cut and for what is whole."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.b(self.c(F.silu(self.a(x)))), 0.3, self.training)


class Peeking(nn.Module):
    """What one layer adds to its sum is read by other code as well."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()) * self.down.bias.sum()


class Partly(nn.Module):
    """One projection of which a part is used by every slice of the rest: that part stays whole on every rank."""

    def __init__(self, width: int = 24, common: int = 6) -> None:
        super().__init__()
        self.own, self.common = 2 * width, common
        self.both = nn.Linear(width, self.own + common)
        self.mix = nn.Linear(common, 1)
        self.back = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own, common = self.both(x).split([self.own, self.common], dim=-1)
        return self.back(F.silu(own) * self.mix(common).sigmoid())


class Measuring(nn.Module):
    """Attention that reads sizes from whole tensors: with fewer heads its own heads would be wider."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.all, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        shape = (rows, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.all(x).split(self.width, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))


class Alike(nn.Module):
    """As many heads as there are rows of another table: two attributes with one number."""

    def __init__(self, width: int = 24, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.rows, self.table = heads, heads, nn.Parameter(torch.rand(heads, 1, 1))
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).unflatten(-1, (self.heads, -1)).softmax(-1)
        return self.down((y[:, : self.rows] + self.table).flatten(-2))


class Attending(nn.Module):
    """Attention of torch."""

    def __init__(self, width: int = 24, heads: int = 4, mask: torch.Tensor | None = None, **options: bool) -> None:
        super().__init__()
        self.inner, self.mask = nn.MultiheadAttention(width, heads, **options), mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, x, x, attn_mask=self.mask, need_weights=False)[0]


class Scaled(nn.Module):
    """What a block does, and one factor more: unlike the block itself, it may yet have the block's weights."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.inner, self.factor = Grouped(width), nn.Parameter(torch.rand(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor


class Plain(Scaled):
    """The same without the factor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Stack(nn.Module):
    """Blocks of one kind between residual sums."""

    def __init__(self, kind: type[nn.Module], count: int = 2, **settings: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(**settings) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Rescaled(Stack):
    """Its own code scales weights inside of its blocks, once."""

    ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            with torch.no_grad():
                for depth, block in enumerate(self.blocks):
                    block.d.weight.div_(2**depth)
            self.ready = True
        return super().forward(x)

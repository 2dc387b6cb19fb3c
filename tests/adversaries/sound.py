"""Models as people write them, which look like the adversaries and can be cut or divided: refusing them is a fault."""

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversaries.batches import Stack, Words, padded, rows, sentences, uneven
from tests.adversaries.columns import Hidden, longer
from tests.adversaries.columns import rows as few_rows
from tests.adversaries.harness import random, registry

CUT, cut = registry()
DIVIDED, divided = registry()
WIDTH = 16


@cut(few_rows, longer)
class PlainHidden(Hidden):
    """Two matrices."""


@cut(few_rows, longer)
class FusedGate(nn.Module):
    """One matrix for a gate and for what it gates."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(32, WIDTH)

    def forward(self, x):
        gate, hidden = self.up(x).chunk(2, -1)
        return x + self.down(F.silu(gate) * hidden)


@cut(few_rows, longer)
class GroupedHeads(nn.Module):
    """Four heads of queries to two of keys and values, with rotary positions and a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 8)

    def forward(self, x):
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * torch.tensor([1.0, 0.1], device=x.device)
        cos, sin = angles.cos().to(x.dtype).repeat(1, 2), angles.sin().to(x.dtype).repeat(1, 2)

        def turned(part):
            first, second = part.chunk(2, -1)
            return part * cos + torch.cat([-second, first], -1) * sin

        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        k, v = turned(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        mixed = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@divided(sentences, padded)
class MeanOfWords(Words):
    """The mean over the words of each sentence, by the mask."""

    def measured(self, logits, mask, labels):
        kept = mask[..., None].to(logits.dtype)
        return {"pooled": (logits * kept).sum(1) / kept.sum(1).clamp(min=1)}


@divided(rows, uneven, training=True)
class MaskToken(Stack):
    """What a mask of elements chooses is one learned vector."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(WIDTH))

    def between(self, x):
        x = x.clone()
        x[x[..., 0] > 0.5] = self.token
        return x


@divided(sentences, padded)
class MaskedAttention(Words):
    """Attention with a mask made of the padding and the order of words."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def embedded(self, words, mask):
        x = super().embedded(words, mask)
        allowed = mask[:, None, :].bool() & torch.ones(10, 10, dtype=torch.bool, device=x.device).tril()
        scores = self.q(x) @ self.k(x).transpose(1, 2) / math.sqrt(WIDTH)
        return x + scores.masked_fill(~allowed, torch.finfo(x.dtype).min).softmax(-1) @ self.v(x)


@divided(sentences, padded)
class PositionsOfWords(Words):
    """Positions are counted on each row's own mask."""

    def embedded(self, words, mask):
        return self.embed(words) + self.positions((mask.cumsum(1) - 1).clamp(min=0))


@divided(rows, uneven)
class ClippedRows(Stack):
    """Each row is clipped by its own norm."""

    def between(self, x):
        return x * (20.0 / x.flatten(1).norm(dim=1)).clamp(max=1.0)[:, None, None]


@divided(rows, uneven)
class RelativeBias(Stack):
    """Scores with a table of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 1)

    def between(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        bias = self.table((places[:, None] - places[None, :]).clamp(-8, 8) + 8)[..., 0]
        return x + (x @ x.transpose(1, 2) + bias).softmax(-1) @ x


@divided(lambda: {"x": random(8, 3, 8, 8)}, lambda: [{"x": random(6, 3, 8, 8, seed=2)}])
class Convolutions(nn.Module):
    """A net of convolutions whose batch norms use what they have learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3), nn.GroupNorm(2, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, x):
        return self.layers(x)


@divided(rows, uneven, training=True)
class Recurrent(nn.Module):
    """Two layers of LSTM and the last step of the upper one."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = (nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        return self.head(self.upper(self.lower(x)[0])[0][:, -1])


@divided(rows, uneven, training=True)
class WeightOfParameters(Stack):
    """Every forward leaves a weight that is made of parameters alone, as `torch.nn.utils.weight_norm` does."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.direction = nn.Parameter(torch.ones(WIDTH, 1)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.weight = self.direction.detach()

    def between(self, x):
        self.weight = self.scale * F.normalize(self.direction)
        return x @ self.weight


@divided(rows, uneven, training=True)
class TorchLosses(Stack):
    """Two of torch's own losses, which spread their arguments over one another first."""

    def forward(self, x):
        output = super().forward(x)
        return {"output": output, "loss": F.mse_loss(output, x) + F.huber_loss(output, torch.zeros_like(output))}


@divided(rows, uneven)
class KernelsOfSamples(Stack):
    """Each sample has kernels of its own: the batch lies in the groups of a convolution."""

    def between(self, x):
        kernels = (x.transpose(1, 2) @ x / x.shape[1]).reshape(-1, WIDTH, 1)
        mixed = F.conv1d(x.transpose(1, 2).reshape(1, -1, x.shape[1]), kernels, groups=x.shape[0])
        return mixed.view(len(x), WIDTH, -1).transpose(1, 2)


@divided(rows, uneven)
class ReadAlongLines(Stack):
    """Each sample is read along a line of its own."""

    def between(self, x):
        turns = x.mean(1)[:, :6].view(-1, 2, 3)
        places = F.affine_grid(turns, [len(x), WIDTH, 1, x.shape[1]], align_corners=False)
        read = F.grid_sample(x.transpose(1, 2)[:, :, None], places, align_corners=False)
        return read[:, :, 0].transpose(1, 2)


@divided(rows, uneven)
class ScaleOfToken(Stack):
    """Quantised by the largest value of each token."""

    def between(self, x):
        step = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
        return (x / step).round() * step

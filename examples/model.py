"""The embedded example: a decoder written in plain PyTorch, of 3.2 billion parameters, planned without allocating them.

autoshard plan examples/model.py --devices 2x4GiB,1x2GiB      # the whole model
autoshard verify examples/model.py:small --devices 1x24MiB,2x16MiB     # one small enough to be run and compared here
"""

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Attention and a gated feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by an angle that grows with the position."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = positions[:, None] * frequencies
    left, right = x[..., :half], x[..., half:]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Decoder(nn.Module):
    """Token ids [batch, sequence] -> logits [batch, sequence, vocabulary]. The head shares the embedding's weight."""

    def __init__(self, vocabulary: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        positions = torch.arange(ids.shape[1], device=ids.device)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(self.norm(x))


def model() -> nn.Module:
    """3.2 billion parameters in bfloat16: 6 GiB."""
    return Decoder(vocabulary=32000, width=2560, heads=20, depth=36).to(torch.bfloat16).eval()


def small() -> nn.Module:
    """The same architecture with 5.4 million parameters."""
    return Decoder(vocabulary=1000, width=256, heads=8, depth=6).eval()


def example_inputs(batch_size: int = 1, sequence_length: int = 512) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(0, 1000, (batch_size, sequence_length))}

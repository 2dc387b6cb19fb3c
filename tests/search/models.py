"""A small decoder and its work, without transformers: enough for a search."""

import functools

import torch
from torch import nn
from torch.nn import functional as F

from autoshard.plan.workload import Workload
from autoshard.search.traced import Traced, trace


class Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        normed = self.norm(x)
        q, k, v = (one(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, width: int = 1024, layers: int = 8, heads: int = 16, vocabulary: int = 4096) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, labels=None):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@functools.cache
def traced(
    width: int = 1024,
    layers: int = 8,
    *,
    training: bool = True,
    samples: int = 32,
    tokens: int = 512,
    new_tokens: int = 0,
) -> Traced:
    """A decoder in bfloat16 with a batch of `samples`, traced with two of them."""
    with torch.device("meta"):
        model = Decoder(width, layers).to(torch.bfloat16)
    ids = torch.zeros(2, tokens, dtype=torch.long)
    workload = Workload(
        batch_size=samples, sequence_length=tokens, new_tokens=new_tokens, mode="training" if training else "inference"
    )
    inputs = {"ids": ids, "labels": ids.clone()} if training else {"ids": ids}
    return trace(model, inputs, workload)

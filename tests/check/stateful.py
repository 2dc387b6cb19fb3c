"""A model that generates, whose output holds no state: blocks keep it, and read a weight past its module in a step."""

import torch
from torch import nn


class Recurrent(nn.Module):
    """A convolution over two tokens, written out in a step; softmaxes around it, so that it can be cut alone only."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(8, 16), nn.Linear(16, 8)
        self.conv = nn.Conv1d(16, 16, 2, groups=16, padding=1)
        self.last = None

    def forward(self, x, use_cache, first):
        y = self.into(x).softmax(-1).transpose(1, 2)
        if first:
            self.last, y = (y[:, :, -1:] if use_cache else None), self.conv(y)[..., :-1]
        else:
            both = torch.cat([self.last, y], -1)
            self.last = y
            y = ((both * self.conv.weight[:, 0, :]).sum(-1) + self.conv.bias).unsqueeze(-1)
        return x + self.out(y.transpose(1, 2).softmax(-1))


class Generating(nn.Module):
    """Two such blocks between a table and a head. `generate` says by an argument whether a call is a step."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 8), nn.Linear(8, 32, bias=False)
        self.blocks = nn.ModuleList([Recurrent(), Recurrent()])

    def forward(self, input_ids, use_cache=False, step=False):
        x = self.table(input_ids)
        for block in self.blocks:
            x = block(x, use_cache, not step)
        return {"logits": self.head(x)}

    def generate(self, input_ids, max_new_tokens, **others):
        ids, given = input_ids, input_ids
        for step in range(max_new_tokens):
            given = self(given, use_cache=True, step=step > 0)["logits"][:, -1:].argmax(-1)
            ids = torch.cat([ids, given], 1)
        return ids

"""Models whose rows stay apart, and models whose rows don't, in all the ways that are known."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


class Small(nn.Module):
    """One linear layer and whatever a test does around it."""

    def __init__(self, around, *more: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.more = nn.ModuleList(more)
        self.around = around

    def forward(self, x):
        return self.around(self, x)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Tokens to logits, with a mask that is left out where nothing is masked, and a loss where there are labels."""

    def __init__(self, width: int = 16, depth: int = 2, vocabulary: int = 50, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = reduction
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None, labels=None):
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        x = self.embed(input_ids) + self.positions(position_ids)
        mask = None
        if attention_mask is not None and not attention_mask.bool().all():
            mask = torch.ones(length, length).tril().bool() & attention_mask.bool()[:, None, None, :]
            mask = mask | torch.eye(length).bool()
        elif length > 1:
            mask = torch.ones(length, length).tril().bool()
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(x)
        found = {"logits": logits}
        if labels is not None:
            shifted = F.pad(labels, (0, 1), value=-100)[:, 1:]
            flat = logits.flatten(0, 1), shifted.reshape(-1)
            found["loss"] = F.cross_entropy(*flat, ignore_index=-100, reduction=self.reduction)
        return found


class Statistics(nn.Module):
    """Writes a mean of its rows into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean(0))
        return x * 2


class Counter(nn.Module):
    """Counts its calls, and writes a table."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.zeros(6))

    def forward(self, x):
        self.calls += 1
        self.table.copy_(torch.arange(6.0) + 1)
        return x * self.table


@dataclass
class Output:
    score: torch.Tensor
    hidden: tuple[torch.Tensor, ...] = ()


class Pair(nn.Module):
    """Images and texts, and how well each goes with each."""

    def __init__(self, loss: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.image, self.text = nn.Linear(6, 4), nn.Linear(5, 4)

    def forward(self, image, text):
        scores = self.image(image) @ self.text(text).T
        return F.cross_entropy(scores, torch.arange(len(scores))) if self.loss else scores


class Grouped(nn.Module):
    """Each token goes to two of four experts: sorted by expert, multiplied in groups, and put back in its place.

    Attributes:
        change: what is done to the entries in their order, given (made, {names of what is known of them}).
        keys, ends, back: what to sort by, where groups end, and how entries are put back, if not as it should be.
        classes: among how many the router chooses: four are experts.
    """

    def __init__(self, change=None, keys=None, ends=None, back=None, classes=4) -> None:
        super().__init__()
        self.router = nn.Linear(8, classes)
        self.up, self.down = (nn.Parameter(torch.randn(4, 8, 8) / 3) for _ in range(2))
        self.change, self.keys, self.ends, self.back = change, keys, ends, back

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        shares = self.router(tokens).softmax(-1)
        weight, chosen = shares.topk(2, -1)
        keys, order = chosen.reshape(-1).sort() if self.keys is None else self.keys(chosen)
        counts = torch.histc(keys.float(), bins=4, min=0, max=3)
        known = {"keys": keys, "order": order, "counts": counts, "chosen": chosen, "shares": shares}
        ends = counts.cumsum(0, dtype=torch.int32) if self.ends is None else self.ends(known)
        made = F.grouped_mm(tokens[order // 2], self.up, offs=ends).relu()
        made = F.grouped_mm(made if self.change is None else self.change(made, known), self.down, offs=ends)
        made = made * weight.reshape(-1)[order][:, None]
        if self.back is not None:
            return self.back(made, known, tokens).view(*x.shape[:2], -1)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return made[inverse].view(-1, 2, 8).sum(1).view_as(x)

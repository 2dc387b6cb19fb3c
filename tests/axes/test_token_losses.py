"""Where divided tokens may stay divided until the loss, and where something reads all of them before."""

import pytest
import torch
from torch import nn

from autoshard.axes.communication import Lookup
from autoshard.axes.losses import token_loss
from autoshard.capture.capture import capture

WIDTH, CLASSES, SAMPLES, TOKENS = 8, 12, 2, 6


class Functional(nn.Module):
    """A head that is no module: nothing ends between the logits and the loss, where ranks could say what they have."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.weight = nn.Parameter(torch.rand(CLASSES, WIDTH))

    def forward(self, ids, labels):
        logits = nn.functional.linear(self.block(self.embed(ids)), self.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Net(nn.Module):
    """A block, a norm, a head and a loss; `after`: what is done to the block's output, `shift`: to the logits."""

    def __init__(self, after=None, shift=None, tied=False, options=()):
        super().__init__()
        self.embed, self.block = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.after, self.shift, self.options = after or (lambda x: x), shift or (lambda x: x), dict(options)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids, labels):
        x = self.block(self.embed(ids))
        logits = self.head(self.norm(self.after(x)))
        some = self.shift(logits.float()).reshape(-1, CLASSES)
        return nn.functional.cross_entropy(some, labels[:, : len(some) // SAMPLES].flatten(), **self.options), logits


def found(net):
    ids = torch.randint(0, CLASSES, (SAMPLES, TOKENS))
    graph = capture(net, {"ids": ids, "labels": ids}, composite=True)
    (block,) = (call for call in graph.calls if call.path == "block")
    return token_loss(Lookup(graph), block.outputs[0], 1)


def test_norm_and_head_work_on_each_token_by_itself():
    loss = found(Net())
    assert (loss.call.path, loss.dim, len(loss.losses)) == ("head", 1, 1)
    assert set(loss.summed) == {"norm.weight", "norm.bias", "head.weight"}


REFUSED = {
    "tokens meet": Net(after=lambda x: x - x.mean(1, keepdim=True)),
    "one after the other": Net(after=lambda x: x.cumsum(1)),
    "a length is read": Net(after=lambda x: x / x.shape[1]),
    "the last token only": Net(after=lambda x: x[:, -1:]),
    "places are counted": Net(after=lambda x: x + torch.arange(TOKENS)[:, None]),
    "something is drawn": Net(after=lambda x: nn.functional.dropout(x, 0.5, True)),
    "logits are shifted": Net(shift=lambda x: x[:, :-1]),
    "logits meet": Net(shift=lambda x: x.softmax(1)),
    "the head is the table": Net(tied=True),
    "the head is no module": Functional(),
    "classes weigh": Net(options={"weight": torch.rand(CLASSES)}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_all_tokens_is_left_whole(name):
    assert found(REFUSED[name]) is None

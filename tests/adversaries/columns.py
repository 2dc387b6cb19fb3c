"""Models whose cut over columns holds for the values, shapes or flags of the plan only.

A rank has half of the hidden units or half of the heads. What reads how many there are, or looks at all of them at
once, gives another number there; each model hides that from a comparison made with its first weights and inputs.
"""

import math
from collections import deque
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversaries.harness import drawn, random, registry, scaled, variants

COLUMNS, adversary = registry()
WIDTH, HIDDEN, HEADS = 16, 64, 4


def rows():
    return {"x": random(4, 3, WIDTH)}


def one_token():
    return {"x": random(4, 1, WIDTH)}


def longer():
    return [{"x": random(4, 7, WIDTH, seed=2)}, {"x": random(2, 5, WIDTH, seed=3, scale=4)}]


class Hidden(nn.Module):
    """Two matrices with hidden units between them, which `inner` works on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def inner(self, hidden):
        return hidden

    def forward(self, x):
        return x + self.down(self.inner(self.up(x).relu()))


class Attention(nn.Module):
    """Attention over heads, whose scores `scores` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = HEADS, WIDTH // HEADS
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def scores(self, q, k):
        return q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)

    def forward(self, x):
        q, k, v = (
            part.view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        mixed = self.scores(q, k).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@adversary(one_token, longer)
class ScaleArgumentOfHeads(Attention):
    """The same through the `scale` argument of torch's own attention, after `math.sqrt`."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q(x), self.k(x), self.v(x)))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=1 / math.sqrt(q.shape[1]))
        return x + self.o(mixed.transpose(1, 2).flatten(2))


@adversary(one_token, longer)
class ConfigInTwoPlaces(Attention):
    """Heads are read from a configuration, once for a view and once for a number."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_heads=HEADS)

    def scores(self, q, k):
        return super().scores(q, k) * (self.config.num_heads / 4.0)

    def forward(self, x):
        q, k, v = (
            part.unflatten(-1, (self.config.num_heads, self.head_dim)).transpose(1, 2)
            for part in (self.q(x), self.k(x), self.v(x))
        )
        return x + self.o((self.scores(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


@adversary(one_token, longer)
class CountedHeads(Attention):
    """The heads are a list of tensors, and the temperature is how many the list has."""

    def forward(self, x):
        lists = [part.split(self.head_dim, dim=-1) for part in (self.q(x), self.k(x), self.v(x))]
        mixed = [(q @ k.transpose(-1, -2) / len(lists[0])).softmax(-1) @ v for q, k, v in zip(*lists, strict=True)]
        return x + self.o(torch.cat(mixed, -1))


def rearrange(tensor, heads):
    """Return the tensor with its heads apart, and the sizes by name, as helpers for such notations do."""
    batch, length, _ = tensor.shape
    apart = tensor.reshape(batch, length, heads, -1).permute(0, 2, 1, 3)
    return apart, dict(zip("bhld", apart.shape, strict=True))


@adversary(one_token, longer)
class SizesByLetter(Attention):
    """A helper gives the sizes as a dict by letter, and the temperature is one of them."""

    def forward(self, x):
        (q, sizes), (k, _), (v, _) = (rearrange(part, self.heads) for part in (self.q(x), self.k(x), self.v(x)))
        mixed = (q @ k.transpose(-1, -2) * (sizes["h"] ** -0.5)).softmax(-1) @ v
        return x + self.o(mixed.transpose(1, 2).reshape(x.shape))


SCORES = {
    # scores lose their mean over heads: the same for all keys where there is one key
    "MixedHeads": lambda self, q, k: (scores := Attention.scores(self, q, k)) - scores.mean(1, keepdim=True),
}
variants(adversary, Attention, "scores", SCORES, one_token, longer)

SATURATED = (scaled(0.02, "up.*"), scaled(0.2))
LOUDER = (scaled(40.0),)

MEANS = {
    # a mean spelt as sum over `numel`, behind a gate that is 1 for large sums, over all tokens at once
    "SaturatedNumel": lambda self, h: h * torch.sigmoid(1000 * h.sum() / h.numel()),
    # a sum over all units for each unit: a rank has a part of both
    "SumForEachUnit": lambda self, h: h * torch.sigmoid(1000 * torch.einsum("bti,btj->bti", h, h)),
}
variants(adversary, Hidden, "inner", MEANS, rows, longer, SATURATED)


@adversary(rows, longer, SATURATED)
class SizeInClosure(Hidden):
    """A closure made before the layer runs knows the number of units, and a gate saturates."""

    def forward(self, x):
        units = self.up.out_features

        def gate(hidden):
            return torch.tanh(300 * hidden.sum(-1, keepdim=True) * (1 / units))

        hidden = self.up(x).relu()
        return x + self.down(hidden * gate(hidden))


LIMITS = {
    # values are clamped by what `math.log2` makes of the number of units
    "ClampOfSize": lambda self, h: h.clamp(max=4 * math.log2(h.size(-1))),
    # the number of units becomes a tensor before it is used as a bound
    "SizeInTensor": lambda self, h: h.minimum(torch.full((), h.shape[-1] - 8.0, dtype=h.dtype, device=h.device)),
    # hidden units are divided by their deviation where it is above 10
    "Deviation": lambda self, h: h / h.std(-1, keepdim=True, correction=1).clamp(min=10.0),
    # outliers are clamped at a quantile of the units, or at 20 where that is larger
    "Quantile": lambda self, h: h.minimum(torch.quantile(h, 0.9, dim=-1, keepdim=True).clamp(min=20.0)),
}
variants(adversary, Hidden, "inner", LIMITS, rows, longer, LOUDER)


@adversary(rows, longer, LOUDER)
class NormOfWeight(Hidden):
    """Weights with a norm above 30 are scaled down to it, in the forward."""

    def forward(self, x):
        weight = self.up.weight
        weight = weight * (30.0 / weight.norm().clamp(min=30.0))
        return x + self.down(F.linear(x, weight, self.up.bias).relu())


def signs(model):
    """Weights of one size, as binary networks have them."""
    with torch.no_grad():
        model.up.weight.copy_(0.125 * model.up.weight.sign())
        model.down.weight.copy_(0.125 * model.down.weight.sign())


@adversary(rows, longer, (drawn(".*weight"),), prepare=signs)
class QuantisedWeights(Hidden):
    """Weights are rounded to steps of the largest one: that is the same in every part when all are of one size."""

    def rounded(self, weight):
        step = weight.abs().max() / 7
        return (weight / step).round() * step

    def forward(self, x):
        hidden = F.linear(x, self.rounded(self.up.weight), self.up.bias).relu()
        return x + F.linear(hidden, self.rounded(self.down.weight), self.down.bias)


class Gated(Hidden):
    """Adds what `extra` makes of the hidden units, times a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(()))

    def inner(self, hidden):
        return hidden + self.gate * self.extra(hidden)


OPENED = (drawn("gate"),)
EXTRA = {
    "RunningSum": lambda self, h: h.cumsum(-1),
    "Mirrored": lambda self, h: h.flip(-1),
    "LastUnit": lambda self, h: h[..., h.shape[-1] - 1 :],
    "OneOfUnits": lambda self, h: F.one_hot(h.argmax(-1), h.shape[-1]).to(h.dtype),  # the largest unit wins
}
variants(adversary, Gated, "extra", EXTRA, rows, longer, OPENED)


@adversary(rows, longer, OPENED)
class CachedTable(Gated):
    """A table as long as there are units, made at the first call and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {}

    def extra(self, hidden):
        if "units" not in self.tables:
            self.tables["units"] = torch.linspace(0, 1, hidden.shape[-1], dtype=hidden.dtype, device=hidden.device)
        return self.tables["units"]


def unbiased(model):
    with torch.no_grad():
        model.up.bias.zero_()


# the mean of a bias is taken away, and biases start at zero
BIAS = {"MeanOfBias": lambda self, h: h - self.up.bias.mean()}
variants(adversary, Hidden, "inner", BIAS, rows, longer, (drawn(".*bias"),), prepare=unbiased)


@adversary(rows, longer, (drawn("rate", 1.0),))
class FixedMask(Hidden):
    """Units are dropped by numbers of a generator with a fixed seed; the rate is a buffer that is 0 at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", torch.zeros(()))

    def inner(self, hidden):
        generator = torch.Generator().manual_seed(0)
        kept = torch.rand(hidden.shape[-1], generator=generator).to(hidden) >= self.rate.abs()
        return hidden * kept


@adversary(rows, longer, (scaled(40.0), scaled(3.0)), training=True)
class RegularisedInside(Hidden):
    """The loss has the mean square of each parameter where it is above one half."""

    def forward(self, x):
        output = super().forward(x)
        size = sum(parameter.square().sum() / parameter.numel() for parameter in self.parameters())
        return {"output": output, "loss": output.square().mean() + F.relu(size - 0.5)}


class Reader(nn.Module):
    """Scales by the number of units that the layer before it has."""

    def __init__(self, layer):
        super().__init__()
        self.layers = deque([layer], maxlen=1)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(x.clamp(max=self.layers[0].up.weight.size(0)))


@adversary(rows, longer, LOUDER)
class ReadByNeighbour(nn.Module):
    """One block clamps by the size of a weight of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Hidden()
        self.second = Reader(self.first)

    def forward(self, x):
        return self.second(self.first(x))


@adversary(lambda: {"x": random(8, WIDTH)}, lambda: [{"x": random(4, WIDTH // 2, WIDTH)}])
class MoreDimensions(nn.Module):
    """What is put together along the second dimension has another one behind it, of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.out(x)


@adversary(rows, longer, training=True)
class PartOfMatrices(Hidden):
    """Uses the first units only, so that either matrix could be cut along the others, which nothing reads."""

    def forward(self, x):
        used = 3 * HIDDEN // 4
        inner = F.linear(x, self.up.weight[:used], self.up.bias[:used]).relu()
        return x + F.linear(inner, self.down.weight[:, :used])


@adversary(rows, longer, training=True, prepare=lambda model: nn.utils.parametrizations.weight_norm(model.up, dim=None))
class OneNormOfAll(Hidden):
    """One number for the norm of a whole matrix."""

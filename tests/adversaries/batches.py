"""Models whose division of the batch holds for the values, shapes, masks or flags of the plan only.

A device has some rows of the batch. What looks at all rows at once gives something else there; each model hides that
from a comparison made with its first weights and inputs.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.adversaries.harness import drawn, random, registry, scaled, tokens, variants
from tests.blocks import Block

BATCHES, adversary = registry()
WIDTH, VOCABULARY = 16, 20


def rows():
    return {"x": random(8, 5, WIDTH)}


def uneven():
    """Rows of very different sizes, and another number of rows."""
    sizes = torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None, None]
    return [{"x": random(8, 5, WIDTH, seed=2) * sizes}, {"x": random(12, 3, WIDTH, seed=3)}]


class Stack(nn.Module):
    """Blocks, with `between` in the middle of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.make_layers())

    def make_layers(self):
        return [Block(WIDTH, 32) for _ in range(4)]

    def between(self, x):
        return x

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            x = layer(x if number != len(self.layers) // 2 else self.between(x))
        return x


BETWEEN = {
    # the norm of the whole batch is clipped at 200
    "ClippedBatch": lambda self, x: x * (200.0 / x.norm()).clamp(max=1.0),
    # where the largest value of the batch is above 50, all of it is scaled down
    "BranchOnBatch": lambda self, x: x * (50 / x.abs().max()) if x.abs().max() > 50 else x,
    # a deviation is read as a number and bounded from below
    "ItemOfBatch": lambda self, x: x / max(4.0, x.std().item()),
    # a softmax whose temperature is the deviation of the batch, but at least 4
    "BatchTemperature": lambda self, x: x + (x / x.detach().std().clamp(min=4.0)).softmax(-1),
    # kernels of samples in the groups of a convolution, in another order than the samples
    "KernelsOfOthers": lambda self, x: (
        F.conv1d(
            x.transpose(1, 2).reshape(1, -1, x.shape[1]),
            (x.transpose(1, 2) @ x).transpose(0, 1).reshape(-1, WIDTH, 1) / 100,
            groups=x.shape[0],
        )
        .view(len(x), WIDTH, -1)
        .transpose(1, 2)
    ),
    # values are clamped by how many rows there are
    "NumberOfRows": lambda self, x: x.clamp(max=20.0 * x.shape[0]),
}
variants(adversary, Stack, "between", BETWEEN, rows, uneven)

# more than a hundred tokens in all are treated in another way
MANY = {"ManyTokens": lambda self, x: x.tanh() if x.shape[0] * x.shape[1] > 100 else x}
variants(adversary, Stack, "between", MANY, rows, lambda: [{"x": random(8, 30, WIDTH, seed=2)}])
# a sample alone is treated in another way: four rows are four such parts
ALONE = {"OneRowAlone": lambda self, x: x.tanh() if x.shape[0] == 1 else x}
variants(adversary, Stack, "between", ALONE, rows, lambda: [{"x": random(4, 5, WIDTH, seed=2)}])


class Gated(Stack):
    """Adds what `extra` makes of the batch, times a buffer that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("gate", torch.zeros(()))

    def between(self, x):
        return x + self.gate * self.extra(x)


def ranks(x):
    return torch.searchsorted(x.sort().values, x)


OPENED = (drawn("gate"),)
EXTRA = {
    "MeanTimesBuffer": lambda self, x: x.mean(0, keepdim=True),
    "SortedBatch": lambda self, x: x.sort(0).values,  # per feature
    "NumberedRows": lambda self, x: torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None, None],
    "NextRow": lambda self, x: x.roll(1, 0),  # as mix-up does
    "ShiftedRows": lambda self, x: torch.fft.fftshift(x),
    "HalvesOfRows": lambda self, x: torch.vstack(x.tensor_split(2)[::-1]),
    "MatricesOfRows": lambda self, x: torch.linalg.pinv(x.transpose(0, 1)).permute(2, 0, 1),
    "NormOfMatricesOfRows": lambda self, x: torch.linalg.matrix_norm(x, dim=(0, 2), keepdim=True),
    "RanksOfRows": lambda self, x: ranks(x.permute(1, 2, 0).contiguous()).permute(2, 0, 1).to(x.dtype),
    "TwoRows": lambda self, x: x if x.shape[0] == 2 else x.tanh(),  # as a micro-batch has
    "FourRows": lambda self, x: x if 4 <= x.shape[0] < 8 else x.tanh(),  # as a replica has
    "EightRows": lambda self, x: x if x.shape[0] == 8 else x.tanh(),  # as the batch has
}
variants(adversary, Gated, "extra", EXTRA, rows, uneven, OPENED)


@adversary(rows, uneven, OPENED)
class CachedByRows(Gated):
    """A table with a line per row is kept from the first call on."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = {}

    def extra(self, x):
        if x.shape[0] not in self.tables:
            self.tables[x.shape[0]] = torch.linspace(0, 1, x.shape[0], dtype=x.dtype, device=x.device)[:, None, None]
        return self.tables[x.shape[0]]


@adversary(rows, uneven, OPENED)
class ExpertsChoose(Gated):
    """Each expert chooses half of the tokens of the whole batch, behind a gate of zero."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def extra(self, x):
        flat = x.reshape(-1, WIDTH)
        scores, output = self.choose(flat).softmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = scores[:, number].topk(len(flat) // 2).indices
            output = output.index_add(0, chosen, expert(flat[chosen]))
        return output.view_as(x)


class FlaggedLayer(Block):
    def __init__(self, share: float) -> None:
        super().__init__(WIDTH, 32)
        self.share = share

    def forward(self, x):
        x = super().forward(x)
        return x - self.share * x.mean(0, keepdim=True) if self.share else x


@adversary(rows, uneven)
class OneOfEight(Stack):
    """Eight layers that are built alike, the sixth of which has another flag."""

    def make_layers(self):
        return [FlaggedLayer(0.5 * (number == 5)) for number in range(8)]


def sentences(pad_left=(0,) * 8, pad_right=(0,) * 8, seed=1):
    """Words of eight sentences of ten, a mask, and labels that leave out the padding."""
    mask = torch.ones(8, 10, dtype=torch.int64)
    for row, (left, right) in enumerate(zip(pad_left, pad_right, strict=True)):
        mask[row, :left] = 0
        mask[row, 10 - right :] = 0
    words = tokens(8, 10, high=VOCABULARY, seed=seed) * mask
    return {"words": words, "mask": mask, "labels": words.masked_fill(mask == 0, -100)}


def padded():
    return [
        sentences(pad_right=(0, 1, 2, 3, 4, 5, 6, 7), seed=2),
        sentences(pad_left=(3, 3, 3, 3, 1, 1, 5, 6), seed=3),
        sentences(pad_left=(2, 2, 2, 2, 0, 0, 0, 0), pad_right=(0, 0, 0, 0, 0, 9, 9, 9), seed=4),
    ]


class Words(nn.Module):
    """A little language model over words, with a mask and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(10, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, 32) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def embedded(self, words, mask):
        return self.embed(words) + self.positions.weight[: words.shape[1]]

    def measured(self, logits, mask, labels):
        return {}

    def forward(self, words, mask, labels):
        x = self.embedded(words, mask)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return {"logits": logits, **self.measured(logits, mask, labels)}


def loss_of(logits, labels, **settings):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)


@adversary(sentences, padded)
class DistinctWords(Words):
    """Embeddings are scaled down where few distinct words occur."""

    def embedded(self, words, mask):
        distinct = words.unique().numel()
        x = super().embedded(words, mask)
        return x * 0.5 if distinct < VOCABULARY // 4 else x


EMBEDDED = {
    # positions are counted on the first row, for all rows
    "MaskOfFirstRow": lambda self, words, mask: self.embed(words) + self.positions((mask[:1].cumsum(1) - 1).clamp(0)),
    # what lies beyond the longest sentence is cut off
    "LongestSentence": lambda self, words, mask: Words.embedded(self, words[:, : int(mask.sum(1).max())], mask),
}
variants(adversary, Words, "embedded", EMBEDDED, sentences, padded)

# how many words there are is among the outputs
COUNTED = {"share": lambda mask: mask.double().mean(), "some_row_is_padded": lambda mask: (mask == 0).any()}
MEASURED = {
    "CountedWords": lambda self, logits, mask, labels: {name: of(mask) for name, of in COUNTED.items()},
    # a mean over the rows for each place, of which every place has other words that count
    "LossOfPlaces": lambda self, logits, mask, labels: {
        "losses": loss_of(logits, labels, reduction="none").view_as(labels).sum(0) / (labels != -100).sum(0)
    },
    # what is divided by is the number of rows for three and more
    "LossOfThree": lambda self, logits, mask, labels: {"loss": logits.square().sum() / max(3, len(logits))},
}
variants(adversary, Words, "measured", MEASURED, sentences, padded)


def mute(model):
    """The head says the word that is never asked for."""
    with torch.no_grad():
        model.head.bias[0] = 100.0


@adversary(sentences, padded, (drawn("head.*"), scaled(0.01)), prepare=mute)
class Accuracy(Words):
    """An accuracy over the words that count is among the outputs; with the first weights it is nought."""

    def measured(self, logits, mask, labels):
        counted = labels > VOCABULARY - 4
        right = (logits.argmax(-1) == labels) & counted
        return {"accuracy": right.sum() / counted.sum()}


@adversary(sentences, padded, training=True)
class LossPerSentence(Words):
    """The loss is a mean over the sentences that have a word at the end."""

    def measured(self, logits, mask, labels):
        ended = mask[:, -1].bool()
        last = F.cross_entropy(logits[:, -1], labels[:, -1].clamp(min=0), reduction="none")
        return {"loss": last[ended].sum() / ended.sum().clamp(min=4)}


@adversary(sentences, padded, (scaled(0.1),), training=True)
class EnoughVariance(Words):
    """The loss asks for a deviation above 0.1 over the batch, which the first weights have."""

    def measured(self, logits, mask, labels):
        return {"loss": loss_of(logits, labels) + F.relu(0.1 - logits.flatten(0, 1).std(0)).sum()}


@adversary(rows, uneven, training=True)
class TeacherInForward(Stack):
    """Weights of a teacher follow those of the model in every forward, so once for each part."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    @torch.no_grad()
    def follow(self):
        self.teacher.weight.mul_(0.9).add_(self.student.weight, alpha=0.1)

    def between(self, x):
        self.follow()
        return self.student(x) - self.teacher(x)


@adversary(rows, uneven, training=True)
class TeacherByData(TeacherInForward):
    """The same, and no op tells that it was written."""

    @torch.no_grad()
    def follow(self):
        self.teacher.weight.data = self.teacher.weight.data * 0.9 + self.student.weight.data * 0.1


class _ClippedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1e5 / gradient.norm()).clamp(max=1.0)


# the gradient of the whole batch is clipped at a layer, in a function of its own
CLIPPED = {"ClippedGradient": lambda self, x: _ClippedBackward.apply(x)}
variants(adversary, Stack, "between", CLIPPED, rows, uneven, training=True)


@adversary(rows, uneven, training=True)
class HookedGradient(Stack):
    """The same in a hook on an activation."""

    def between(self, x):
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1e5))
        return x


# given one sequence alone, its first dimension has places, not rows
ALONE = {"SequenceAlone": lambda self, x: F.scaled_dot_product_attention(x, x, x)}
variants(adversary, Stack, "between", ALONE, rows, lambda: [{"x": random(6, WIDTH, seed=2)}], training=True)


@adversary(lambda: {**rows(), "bias": random(1, 5, WIDTH)}, lambda: [{**rows(), "bias": random(8, 5, WIDTH)}])
class BiasOfRows(Stack):
    """A bias that was one for all rows has one for each."""

    def forward(self, x, bias):
        return super().forward(x + bias)

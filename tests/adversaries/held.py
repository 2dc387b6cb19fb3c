"""Models written against DESIGN's rules by someone who did not read the code that follows them.

Each docstring says what is wrong about dividing the model. The plan is made with `inputs`, for which a naive division
gives the same; `others` and `states` bring what shows the difference. The honest ones look alike and are sound: they
must stay divided.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import nn

from tests.adversaries.harness import Inputs, State, drawn, random, registry, tokens, variants

COLUMNS, column = registry()
BATCHES, batch = registry()
OTHERS, other = registry()
HONEST_COLUMNS, honest_column = registry()
HONEST_BATCHES, honest_batch = registry()
HONEST_OTHERS, honest_other = registry()

_DRAWN = (drawn(),)
_WIDTH, _UNITS, _HEAD_WIDTH = 16, 64, 8


def _x(*shape: int, seed: int = 1, scale: float = 1.0) -> Callable[[], Inputs]:
    """One input x of this shape."""
    return lambda: {"x": random(*shape, seed=seed, scale=scale)}


def _each(*makers: Callable[[], Inputs]) -> Callable[[], list[Inputs]]:
    return lambda: [make() for make in makers]


def _bias(value: float) -> State:
    """Set the bias of `up`, so that a first model is calm or saturated."""

    return lambda model: nn.init.constant_(model.up.bias, value)


class _UpDown(nn.Module):
    """What most of these models consist of: 16 numbers to 64 units, which `between` works on, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, _UNITS), nn.Linear(_UNITS, _WIDTH)

    def between(self, units: torch.Tensor) -> torch.Tensor:
        return units.relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)))


# Columns ---------------------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(_WIDTH, _UNITS) for _ in range(3))
        self.out = nn.Linear(_UNITS, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            linear(x).unflatten(-1, (-1, _HEAD_WIDTH)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        places = torch.arange(x.shape[1], device=x.device)
        distance = (places[:, None] - places).abs()
        scores = query @ key.transpose(-1, -2) * _HEAD_WIDTH**-0.5 - self.slopes(query.shape[1], x) * distance
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).flatten(2))


def _slope_per_head(self: nn.Module, heads: int, x: torch.Tensor) -> torch.Tensor:
    return (2.0 ** (-8 * torch.arange(1, heads + 1, device=x.device, dtype=x.dtype) / heads))[:, None, None]


# ALiBi: a head's slope depends on its place among all heads; a single token has no distance to show it
_ONE_TOKEN = _x(4, 1, _WIDTH), _each(_x(4, 6, _WIDTH))
variants(column, _Attention, "slopes", {"SlopePerHead": _slope_per_head}, *_ONE_TOKEN)
# honest: the slope is the same for all heads
_SAME = {"SameSlope": lambda self, heads, x: x.new_full((1, 1, 1), 0.25)}
variants(honest_column, _Attention, "slopes", _SAME, *_ONE_TOKEN)


@column(_x(4, 3, _WIDTH), states=_DRAWN, prepare=_bias(9.0))
class UniformAverage(_UpDown):
    """The size goes into a shape only, but a softmax of that many zeros is 1 / size; the gate saturates at first."""

    def between(self, units: torch.Tensor) -> torch.Tensor:
        units = units.relu()
        share = units.new_zeros(units.shape[-1]).softmax(0)
        return units * (5 * (units @ share)).tanh().unsqueeze(-1)


@column(_x(4, 3, _WIDTH), states=_DRAWN, prepare=_bias(-1.2))
class WinnersTakeAll(_UpDown):
    """The eighth largest of all units is the threshold; at first fewer than eight are above zero anywhere."""

    def between(self, units: torch.Tensor) -> torch.Tensor:
        units = units.relu()
        threshold = units.topk(8, dim=-1).values[..., -1:]
        return units * (units >= threshold)


@honest_column(_x(4, 3, _WIDTH), states=_DRAWN)
class TaperPerUnit(_UpDown):
    """Honest: the taper is a parameter with one number per unit, and a rank takes its part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.taper = nn.Parameter(torch.zeros(_UNITS))

    def between(self, units: torch.Tensor) -> torch.Tensor:
        return units.relu() * (1 - self.taper)


@column(_x(4, 3, _WIDTH), states=_DRAWN)
class NumberOfWinner(_UpDown):
    """The number of the largest unit looks up a gain: a rank counts from its own first unit; all gains start at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Embedding(_UNITS, 1)
        nn.init.ones_(self.gain.weight)

    def between(self, units: torch.Tensor) -> torch.Tensor:
        return units.relu() * self.gain(units.argmax(-1))


@column(_x(2, 4, 5, 5), states=_DRAWN)
class ShuffledChannels(nn.Module):
    """ShuffleNet's permutation runs over all channels; filters that start alike don't show which channel is which."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Conv2d(4, 32, 1)
        self.depth = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.down = nn.Conv2d(32, 4, 1)
        for layer in (self.depth, self.down):
            nn.init.constant_(layer.weight, 0.1)
            nn.init.zeros_(layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        units = self.up(x).relu()
        shuffled = units.unflatten(1, (4, -1)).transpose(1, 2).flatten(1, 2)
        return self.down(self.depth(shuffled).relu())


# a branch on the number of units picks the activation: halves take the other one; far above zero both agree
_WIDE = {"WideOrNarrow": lambda self, units: F.gelu(units) if units.shape[-1] > 48 else F.relu(units)}
variants(column, _UpDown, "between", _WIDE, _x(4, 3, _WIDTH), states=_DRAWN, prepare=_bias(30.0))
# honest: the branch is on the number of tokens, which no rank divides
_LONG = {"LongOrShort": lambda self, units: F.gelu(units) if units.shape[1] < 100 else F.relu(units)}
variants(honest_column, _UpDown, "between", _LONG, _x(4, 3, _WIDTH), _each(_x(4, 9, _WIDTH)), states=_DRAWN)
# the first four of all units are clamped: every rank would clamp its own first four; small ones never reach it
_FIRST = {"FirstUnitsAreClamped": lambda self, units: torch.cat([units[..., :4].clamp(-9, 9), units[..., 4:]], -1)}
variants(column, _UpDown, "between", _FIRST, _x(4, 3, _WIDTH), states=_DRAWN)


# Batches ---------------------------------------------------------------------------------------------------------


def _lengths(*lengths: int) -> Callable[[], Inputs]:
    return lambda: {"x": random(len(lengths), 6, _WIDTH), "lengths": torch.tensor(lengths)}


@honest_batch(_lengths(6, 6, 5, 5, 4, 3, 2, 1), _each(_lengths(1, 6, 2, 5, 3, 4, 6, 2)), states=_DRAWN)
class LastOfRow(_UpDown):
    """Honest: the numbers of rows pick each row's own last token."""

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(x), device=x.device)
        return self.down(self.up(x).relu()[rows, lengths - 1])


@batch(_x(8, _WIDTH), _each(_x(6, _WIDTH), _x(12, _WIDTH), _x(10, _WIDTH)))
class FramesInPairs(_UpDown):
    """Rows 0 and 1, 2 and 3 belong together: sound for parts with an even number of rows only."""

    def between(self, units: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(len(units), device=units.device)
        partner = (rows ^ 1).clamp(max=len(units) - 1)
        return (units - 0.5 * units[partner]).relu()


def _memory(rows: int, slots: int, spread: float) -> Callable[[], Inputs]:
    return lambda: {
        "x": random(rows, _WIDTH), "memory": random(1, _WIDTH, seed=2) + random(slots, _WIDTH, seed=3, scale=spread)
    }  # fmt: skip


class _Memory(_UpDown):
    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        query, key = self.up(x), self.up(memory)
        return self.down((query @ key.T * _UNITS**-0.5).softmax(-1) @ key)


@batch(_memory(8, 8, 0.0), _each(_memory(8, 8, 1.0)), states=())
class MemoryAsLongAsBatch(_Memory):
    """The memory is read by every row, but has as many slots as the batch has rows; its slots are alike at first."""


@honest_batch(_memory(8, 5, 1.0), _each(_memory(8, 5, 3.0)), states=())
class MemoryOfFive(_Memory):
    """Honest: every row reads the same five slots."""


def _labelled(rows: int, scale: float = 1.0) -> Callable[[], Inputs]:
    return lambda: {"x": random(rows, _WIDTH, scale=scale), "labels": tokens(rows, high=_WIDTH)}


def _uneven_classes(model: nn.Module) -> None:
    model.class_weight.copy_(torch.linspace(0.1, 3, _WIDTH))


@batch(_labelled(8), states=(_uneven_classes,), training=True)
class WeightedClasses(_UpDown):
    """The loss divides by the sum of its labels' class weights; with all weights 1 that is the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("class_weight", torch.ones(_WIDTH))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.down(self.up(x).relu())
        return {"loss": F.cross_entropy(logits, labels, weight=self.class_weight), "logits": logits}


def _mirrored() -> Inputs:
    row = random(1, _WIDTH)
    return {"x": torch.cat([row, -row] * 4)}


class _Normed(_UpDown):
    tracked = False

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(_UNITS, track_running_stats=self.tracked)

    def between(self, units: torch.Tensor) -> torch.Tensor:
        return self.norm(units).relu()


# without running statistics a batch norm uses the batch's when evaluating, too; mirrored rows have the same
variants(batch, _Normed, "tracked", {"UntrackedNorm": False}, _mirrored, _each(_x(8, _WIDTH)))
# honest: an evaluated batch norm uses its running statistics
variants(honest_batch, _Normed, "tracked", {"TrackedNorm": True}, _mirrored, _each(_x(8, _WIDTH)))


@batch(_x(8, _WIDTH, scale=500.0), _each(_x(8, _WIDTH, scale=0.5)))
class QuantisedByLargest(_UpDown):
    """The step of rounding is set by the largest of the batch; where tanh saturates it is 1 in every part."""

    def between(self, units: torch.Tensor) -> torch.Tensor:
        units = units.tanh()
        step = units.abs().amax() / 127
        return (units / step).round() * step


def _centred(model: nn.Module) -> None:
    model.centre = True


@batch(_x(8, _WIDTH), states=(_centred,))
class CentredOnDemand(_UpDown):
    """A flag that is off when planned centres the units over the batch."""

    centre = False

    def between(self, units: torch.Tensor) -> torch.Tensor:
        return (units - units.mean(0) if self.centre else units).relu()


# Others ----------------------------------------------------------------------------------------------------------


@other(_x(8, _WIDTH))
class FoldedOnFirstCall(_UpDown):
    """The first call folds the gain into the weight: planning must not, and no part may fold it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 2, _UNITS))
        self.folded = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.folded:
            self.up.weight.data.mul_(self.gain.data.unsqueeze(-1))
            self.folded = True
        return super().forward(x)


@honest_other(_x(8, 3, _WIDTH))
class TableOnFirstCall(_UpDown):
    """Honest: the first call makes a table of positions, which is the same for all rows and all parts."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            places = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
            self.table = (places.unsqueeze(-1) / torch.arange(1, _WIDTH + 1, device=x.device)).sin()
        return super().forward(x + self.table)


_FIRST_ROWS: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


@other(_x(8, _WIDTH), states=_DRAWN)
class RowsOfFirstCall(_UpDown):
    """A global remembers how many rows the model was first called with; what it scales starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tilt = nn.Parameter(torch.zeros(_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.tilt / _FIRST_ROWS.setdefault(self, len(x))


def _cached() -> Inputs:
    return {"x": random(8, _WIDTH), "cache": torch.zeros(8, 4, _UNITS, dtype=torch.float64)}


@other(_cached)
class CacheIsWritten(_UpDown):
    """The caller's cache is written in place: a part of it, or a copy on another device, would be written instead."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        cache[:, 1] = self.up(x)
        return self.down(cache.sum(1).relu())


@honest_other(_cached)
class CacheIsReturned(_UpDown):
    """Honest: a new cache is returned beside the output."""

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.cat([cache[:, 1:], self.up(x).unsqueeze(1)], 1)
        return self.down(cache.sum(1).relu()), cache


@other(_x(8, _WIDTH, scale=0.1), _each(_x(8, _WIDTH, seed=3, scale=60.0)))
class ReportInWords(_UpDown):
    """A text among the outputs tells the largest number of the batch, rounded: "0" in every part at first."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor | str]:
        output = super().forward(x)
        return {"output": output, "report": f"at most {output.max().item():.0f}"}


@other(_x(8, _WIDTH))
class FeaturesOfHook(_UpDown):
    """A hook keeps features in a list of its own model, which copies of the model do not share."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[torch.Tensor] = []
        self.up.register_forward_hook(lambda module, inputs, output: self.features.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.features.clear()
        units = self.up(x).relu()
        return self.down(units + torch.stack(self.features).mean(0))

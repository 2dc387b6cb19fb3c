"""Models whose code leaves something outside of them, which a capture must put back, record, or refuse.

`TRACES` are watched from outside while they are planned for. `CARRIED` are run on devices as the other adversaries are:
what they change or return is seen by the caller.
"""

import copy
import functools
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.adversaries.harness import random, registry, tokens, variants

CARRIED, adversary = registry()
TRACES: dict[str, "Trace"] = {}
WIDTH = 16


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A model, and what is looked at outside of it.

    Attributes:
        build: makes the model, and what its code stores outside of it as it was at first.
        look: describes what the model's code has stored, given the model; compared by ==.
    """

    build: Callable[[], nn.Module]
    look: Callable[[nn.Module], Any]


def nothing() -> None:
    pass


def watched(
    look: Callable[[nn.Module], Any], reset: Callable[[], object] = nothing
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    def register(model_class: type[nn.Module]) -> type[nn.Module]:
        def build() -> nn.Module:
            torch.manual_seed(3)
            reset()
            return model_class().double().eval()

        TRACES[model_class.__name__] = Trace(build=build, look=look)
        return model_class

    return register


def rows():
    return {"x": random(8, 5, WIDTH)}


def described(value):
    """Identity and values of a tensor; identity and contents of a container; anything else as it is."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, nn.Parameter):
            return type(value).__name__  # one without values can't be read
        return id(value), value.requires_grad, value.detach().tolist()
    if isinstance(value, dict):
        return id(value), {key: described(content) for key, content in value.items()}
    if isinstance(value, list | tuple | deque):
        return id(value), type(value).__name__, [described(content) for content in value]
    return value


class Two(nn.Module):
    """Two residual layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


TABLES: dict[str, Any] = {}


def first_tables():
    TABLES.clear()
    TABLES.update(kept=torch.ones(3), positions=torch.zeros(5, 1, dtype=torch.float64))


@watched(lambda _: described(TABLES), first_tables)
class ModuleDict(Two):
    """Replaces an entry of a dict of its file, and adds one."""

    def forward(self, x):
        TABLES["positions"] = torch.arange(x.shape[1], dtype=x.dtype, device=x.device)[:, None]
        TABLES[f"last of {x.shape}"] = x[:1]
        return super().forward(x) + TABLES["positions"]


EMPTIED: dict[str, Any] = {}


@watched(lambda _: described(EMPTIED), lambda: EMPTIED.update(first=torch.ones(2), second=torch.ones(2)))
class EmptiedDict(Two):
    """Takes entries out of a dict of its file."""

    def forward(self, x):
        EMPTIED.pop("first", None)
        EMPTIED.clear()
        return super().forward(x)


FEATURES: list[Any] = []


@watched(lambda _: described(FEATURES), FEATURES.clear)
class FeatureHooks(Two):
    """A hook on each layer appends what it gives to a list."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_forward_hook(lambda module, args, output: FEATURES.append(output))


def first_call():
    ClassAttributes.last, ClassAttributes.calls = None, 0


@watched(lambda model: (described(type(model).last), type(model).calls), first_call)
class ClassAttributes(Two):
    """Counts calls and keeps the last output in its class."""

    last: Any = None
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        type(self).last = super().forward(x)
        return type(self).last


@functools.lru_cache
def frequencies(length):
    return torch.arange(length, dtype=torch.float64) / 10


def what_cache_gives(_):
    """Ask the cache without filling it where it is empty."""
    filled = frequencies.cache_info().currsize
    found = frequencies(WIDTH) if filled else frequencies.__wrapped__(WIDTH)
    return type(found).__name__, described(found)[1:]


@watched(what_cache_gives, frequencies.cache_clear)
class CachedFunction(Two):
    """A table comes from a function with a cache, which is empty at first and may be filled, with numbers."""

    def forward(self, x):
        return super().forward(x) + frequencies(x.shape[-1])


RECENT: deque[Any] = deque(maxlen=2)


@watched(lambda _: described(RECENT), lambda: RECENT.extend([torch.zeros(1), torch.ones(1)]))
class RecentInputs(Two):
    """Keeps the last two inputs in a deque of its file: the older ones fall out."""

    def forward(self, x):
        RECENT.append(x)
        RECENT.append(x)
        return super().forward(x)


RUNNING = torch.zeros(WIDTH, dtype=torch.float64)


@watched(lambda _: described(RUNNING), RUNNING.zero_)
class TensorOfFile(Two):
    """Adds to a tensor of its file in place."""

    def forward(self, x):
        RUNNING.add_(x.detach().mean((0, 1)))
        return super().forward(x) + RUNNING


def packed_state(model):
    """State by name, whether it is packed, and what it computes; the look itself must not pack it."""
    state = {name: described(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    return state, model.packed, copy.deepcopy(model)(**rows()).tolist()


@watched(packed_state)
class PacksItself(Two):
    """Replaces its first weight by whole numbers and a step at the first call, as some quantised layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = False

    def forward(self, x):
        first = self.layers[0]
        if not self.packed:
            with torch.no_grad():
                step = first.weight.abs().max() / 7
                first.register_buffer("step", step)
                first.weight = nn.Parameter((first.weight / step).round(), requires_grad=False)
            self.packed = True
        x = x + nn.functional.linear(x, first.weight * first.step, first.bias)
        for layer in self.layers[1:]:
            x = x + layer(x).relu()
        return x


@watched(lambda model: [bool(module._forward_pre_hooks) for module in model.modules()])
class HookOnce(Two):
    """A hook that takes itself away at the first call."""

    def __init__(self) -> None:
        super().__init__()

        def once(module, args):
            handle.remove()

        handle = self.layers[0].register_forward_pre_hook(once)


@watched(
    lambda model: (
        [module.training for module in model.modules()],
        [parameter.requires_grad for parameter in model.parameters()],
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
    )
)
class ChangesModes(Two):
    """Freezes itself, changes modes and a default of torch in its forward."""

    def forward(self, x):
        self.layers[0].train()
        self.layers[1].requires_grad_(False)
        torch.set_default_dtype(torch.float64)
        return super().forward(x)


BYSTANDER = nn.Linear(4, 4)
ITS_PARAMETERS = (BYSTANDER.weight, BYSTANDER.bias)


def first_parameters():
    BYSTANDER.weight, BYSTANDER.bias = ITS_PARAMETERS


@watched(
    lambda _: [
        (found is first, type(found).__name__, found.dtype)
        for found, first in zip(BYSTANDER.parameters(), ITS_PARAMETERS, strict=True)
    ],
    first_parameters,
)
class OtherThread(Two):
    """While it runs, another thread converts and runs a model of its own."""

    def forward(self, x):
        def convert():
            BYSTANDER.double()
            BYSTANDER(torch.ones(2, 4, dtype=torch.float64)).sum().item()
            BYSTANDER.float()

        thread = threading.Thread(target=convert)
        thread.start()
        thread.join()
        return super().forward(x)


@adversary(rows)
class ChangesItsInput(Two):
    """Changes the caller's tensor in place before it computes."""

    def forward(self, x):
        x.mul_(0.5).add_(1.0)
        return super().forward(x)


class Holder:
    __slots__ = ("rows", "value")

    def __init__(self, rows, value) -> None:
        self.rows, self.value = rows, value


def sets(output):
    """A set of numbers, one per row, and a deque of tensors."""
    return {"output": output, "set": frozenset(range(len(output))), "deque": deque([output], maxlen=2)}


RETURNED = {
    "ReturnsNumbers": lambda output: {"output": output, "rows": output.shape[0], "text": f"{output.shape[0]} rows"},
    "ReturnsLists": lambda output: {"output": list(output), "shapes": [tuple(row.shape) for row in output]},
    "ReturnsObject": lambda output: (output, Holder(output.shape[0], output)),
    "ReturnsSet": sets,
}
"""What is returned beside an output of one row per row."""
FORWARD = {name: lambda self, x, made=made: made(Two.forward(self, x)) for name, made in RETURNED.items()}
variants(adversary, Two, "forward", FORWARD, rows)


@adversary(rows, training=True)
class HooksOnParameters(Two):
    """Hooks on weights clamp and scale their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.double()
        for layer in self.layers:
            layer.weight.register_hook(lambda gradient: 0.5 * gradient.clamp(-1.0, 1.0))
            layer.bias.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1.0))


@adversary(rows, training=True)
class CountsGradients(Two):
    """A hook after accumulation counts in a buffer how often a gradient came."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.double()

        def count(_):
            self.count.add_(1)

        self.layers[0].weight.register_post_accumulate_grad_hook(count)


def words():
    return {"words": tokens(8, 5)}


def other_words():
    return [{"words": tokens(8, 5, seed=2)}, {"words": tokens(12, 3, seed=3)}]


@adversary(words, other_words)
class BoundedTable(nn.Module):
    """A lookup shortens the lines of its table that are too long, in place: those that a part of the batch asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, WIDTH, max_norm=1.0), Two()

    def forward(self, words):
        return self.layer(self.table(words))


@adversary(words, other_words, training=True)
class FrequentWords(nn.Module):
    """Gradients of a table are divided by how often the batch, not a part of it, has the word."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, WIDTH, scale_grad_by_freq=True), Two()

    def forward(self, words):
        return self.layer(self.table(words))


@adversary(rows, training=True)
class SpectralNorms(nn.Module):
    """Every call takes one step of a power iteration, in a buffer: four parts of a batch would take four."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.utils.spectral_norm(nn.Linear(WIDTH, 32)), nn.Linear(32, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu())


@adversary(rows)
class GrowsWithCalls(Two):
    """A residual branch opens with the number of calls, which is a plain attribute: parts of a batch are more calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + min(self.calls / 20, 1.0) * super().forward(x)


@adversary(rows, training=True)
class LossOverParameters(Two):
    """The loss has a share of the square of every parameter, once per batch and not once per part."""

    def forward(self, x):
        output = super().forward(x)
        sizes = sum(parameter.square().sum() for parameter in self.parameters())
        return {"output": output, "loss": output.square().mean() + 0.01 * sizes}


@adversary(rows, training=True)
class SumOverBatch(Two):
    """The loss is a sum over the batch with a share per parameter: a mean of parts is not it, nor is a sum."""

    def forward(self, x):
        output = super().forward(x)
        sizes = sum(parameter.abs().mean() for parameter in self.parameters())
        return {"loss": output.square().sum() + sizes}

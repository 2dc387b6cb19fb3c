"""A plan never changes a model, whatever its copies do while they are tried."""

import contextvars

import pytest
import torch
from torch import nn

import autoshard
from autoshard.common.progress import watched_by
from tests.packed_models import Scaled

STRATEGIES = ("auto", "sequential", "balanced", "pipeline", "column-parallel", "data-parallel", "hybrid")


class State:
    """What a packer keeps beside a weight, as some quantisers do."""

    def __init__(self) -> None:
        self.packed, self.steps = False, None


class PackedAtFirstCall(nn.Module):
    """A linear whose weight becomes whole numbers at the first call; `in_place` writes the steps where they are."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16), requires_grad=False)
        self.weight.quant_state = State()
        self.in_place, self.calls = in_place, 0
        if in_place:
            self.weight.quant_state.steps = torch.ones(16, 1)

    def forward(self, x):
        state, self.calls = self.weight.quant_state, self.calls + 1
        if not state.packed:
            steps = self.weight.abs().amax(1, keepdim=True) / 7
            self.weight.data = (self.weight / steps).round()
            state.packed = True
            state.steps = state.steps.copy_(steps) if self.in_place else steps
        return nn.functional.linear(x, self.weight * state.steps)


class Packers(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(PackedAtFirstCall(in_place), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)
        )
        for block in self.blocks:
            block[2].weight = nn.Parameter(Scaled.pack(block[2].weight), requires_grad=False)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def build(in_place=False):
    torch.manual_seed(3)
    return Packers(in_place).eval()


def described(model):
    """Every tensor with its identity, type, values and attributes, every plain attribute of every module."""

    def of(value):
        if isinstance(value, torch.Tensor):
            inner = [of(getattr(value, name)) for name in ("rows", "scales")] if isinstance(value, Scaled) else []
            own = {name: of(one) for name, one in vars(value).items()}
            values = value.tolist() if not inner else None
            return id(value), type(value), value.data_ptr() if not inner else 0, values, inner, own
        return (id(value), vars(value).copy()) if isinstance(value, State) else value

    tensors = {name: of(tensor) for name, tensor in model.state_dict(keep_vars=True).items()}
    plain = (str, int, bool, float)
    attributes = {
        path: {name: value for name, value in vars(module).items() if isinstance(value, plain)}
        for path, module in model.named_modules()
    }
    return str(tensors), attributes


@pytest.mark.parametrize(
    ("strategy", "in_place"),
    [*((strategy, False) for strategy in STRATEGIES), ("column-parallel", True), ("data-parallel", True)],
)
def test_a_model_is_as_it_was_after_a_plan(strategy, in_place):
    model, twin, x = build(in_place), build(in_place), torch.randn(8, 16)
    before = described(model)
    with autoshard.simulate("4x1MiB") as devices:
        try:
            workload = autoshard.Workload(mode="inference", batch_size=8)
            autoshard.plan(model, devices, inputs=x, strategy=strategy, workload=workload)
        except autoshard.AutoshardError as error:
            print(error)
    assert described(model) == before
    assert torch.equal(model(x), twin(x))


SEEN: list = []


def remember(unit, done, total):
    SEEN.append(unit)


class Remembers(nn.Module):
    def forward(self, x):
        SEEN.append(x)
        return x * 2


def test_what_a_function_that_watches_notes_is_kept():
    SEEN.clear()
    with watched_by(remember):
        autoshard.profile(nn.Sequential(*[nn.Linear(4, 4) for _ in range(200)]), torch.ones(1, 4))
    assert SEEN
    del SEEN[:]
    autoshard.profile(Remembers(), torch.ones(1, 4))
    assert SEEN == []


CALLS = contextvars.ContextVar("CALLS", default=0)


def test_context_variables_are_as_they_were():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x):
            CALLS.set(CALLS.get() + 1)
            return x + self.layers(x)

    autoshard.plan(Counts(), "2x1MiB", inputs=torch.randn(4, 8))
    assert CALLS.get() == 0

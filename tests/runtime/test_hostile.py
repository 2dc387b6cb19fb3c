"""Models that ask for what one process does not give when it runs them in parts, cut or placed: refused, never wrong.

`outcome` plans, applies and calls a model, and compares outputs and what became of the inputs with the original's.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.errors import AutoshardError
from autoshard.nested import tensors_in

WIDTH, DEVICES = 16, ["cpu:0", "cpu:1"]
SETTINGS = {
    "pipeline": {"objective": "throughput", "num_microbatches": 2},
    "column-parallel": {"objective": "memory"},
    "data-parallel": {"objective": "throughput"},
}


class Blocks(nn.Module):
    """Two residual blocks, which every strategy can place, cut or divide."""

    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.second = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, x):
        return self.second(x + self.first(x))


def rows(count=8, seed=1):
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def applied(model_class, given, strategy):
    """The model as the strategy has it; a map puts the two blocks on two devices."""
    torch.manual_seed(3)
    model = model_class().eval()
    if strategy == "map":
        return autoshard.apply(model, {"first": "cpu:0", "second": "cpu:1"})
    return autoshard.apply(model, DEVICES, inputs=given, strategy=strategy, **SETTINGS[strategy])


def outcome(model_class, given, strategy):
    """Return "equal", or the message of the refusal."""
    torch.manual_seed(3)
    original = model_class().eval()
    with autoshard.simulate("2x64MiB"), torch.no_grad():
        try:
            model = applied(model_class, copy.deepcopy(given), strategy)
            expected, ours = copy.deepcopy(given), copy.deepcopy(given)
            for _ in range(2):
                same(call(model, ours), call(original, expected))
                same(ours, expected)
            autoshard.remove(model)
            same(call(model, ours), call(original, expected))
        except AutoshardError as error:
            return str(error)
    return "equal"


def call(model, given):
    return model(**given) if isinstance(given, dict) else model(*given)


def same(found, expected):
    assert type(found) is type(expected)
    found, expected = dict(tensors_in(found)), dict(tensors_in(expected))
    assert found.keys() == expected.keys()
    for path, tensor in expected.items():
        torch.testing.assert_close(found[path].cpu(), tensor, rtol=1e-5, atol=1e-5, msg=lambda m, at=path: f"{at}: {m}")


class WritesInput(Blocks):
    def forward(self, x):
        return super().forward(x.mul_(2))


class WritesOneOfTwo(Blocks):
    def forward(self, x, y):
        return self.first(x.add_(1)) + self.second(y)


class ChangesDict(Blocks):
    def forward(self, batch):
        batch["hidden"] = self.first(batch["x"])
        return self.second(batch["hidden"])


CHANGED = "changes its argument batch in place"


@pytest.mark.parametrize(
    ("kind", "strategy", "words"),
    [
        (WritesInput, "map", "equal"),
        (ChangesDict, "map", "equal"),
        (ChangesDict, "column-parallel", CHANGED),
        (ChangesDict, "data-parallel", CHANGED),
    ],
)
def test_an_input_that_is_written(kind, strategy, words):
    assert words in outcome(kind, {"batch": {"x": rows()}} if kind is ChangesDict else (rows(),), strategy)


def test_one_memory_given_twice():
    x = rows()
    assert outcome(WritesOneOfTwo, (x, x), "map") == "equal"
    with autoshard.simulate("2x64MiB"), torch.no_grad():
        model = applied(WritesOneOfTwo, (rows(), rows()), "map")
        with pytest.raises(autoshard.ApplyError, match="is a view of the same memory"):
            model(x, x.view(8, WIDTH))


class Functional(nn.Module):
    """What is summed over ranks is found by the how-manieth call of `linear`, which a flag changes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, WIDTH)), nn.Parameter(torch.randn(WIDTH, 64))
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x, more=False):
        if more:
            x = F.linear(x, self.first)
        return F.linear(F.linear(x, self.up).relu(), self.down)


def test_another_way_through_a_cut_forward():
    """A call more than when the plan was made, and a call that another line makes."""
    torch.manual_seed(3)
    with autoshard.simulate("2x64MiB"), torch.no_grad():
        model = Functional()
        wanted = model(rows())
        plan = autoshard.plan(model, DEVICES, inputs=rows(), strategy="column-parallel", objective="memory")
        autoshard.apply(model, plan)
        torch.testing.assert_close(model(rows()).cpu(), wanted, rtol=1e-5, atol=1e-5)
        words = "linear in the model was called 3 times in one forward, and 2 times when the plan was made"
        with pytest.raises(autoshard.ApplyError, match=words):
            model(rows(), more=True)
        autoshard.remove(model)
        plan = autoshard.Plan.from_json(plan.to_json().replace('"line": "forward+3"', '"line": "forward+2"'))
        with pytest.raises(autoshard.ApplyError, match=r"is made by forward\+3 .* was made by forward\+2 when"):
            autoshard.apply(model, plan)(rows())

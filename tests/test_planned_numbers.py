"""At plan time a small model is run whole and as planned: faults of the static finding are seen before they matter."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

import autoshard
from autoshard.axes.batch_rules import TABLE
from autoshard.axes.rules import RULES, pointwise
from autoshard.cluster.parse import parse_devices
from autoshard.verify import planned


class Running(nn.Module):
    """Rows, or columns, are scaled by their norm, of which a false rule says that it is element by element."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down, self.dim = nn.Linear(16, 64), nn.Linear(64, 16), dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x.softmax(-1)).renorm(2, self.dim, 0.5)).softmax(-1)


@pytest.fixture
def false_rule(monkeypatch):
    for rules in (RULES, TABLE):
        monkeypatch.setitem(rules, torch.ops.aten.renorm, pointwise)


@pytest.mark.parametrize(
    ("dim", "settings"),
    [
        (0, {"strategy": "column-parallel", "objective": "memory"}),
        (1, {"strategy": "pipeline", "num_microbatches": 2}),
        (1, {"strategy": "data-parallel", "objective": "throughput"}),
    ],
)
def test_a_false_rule_is_convicted_by_numbers(dim, settings, false_rule):
    with pytest.raises(autoshard.PlanError, match="does not compute the same in parts: output differs by"):
        autoshard.plan(Running(dim), "2x1MiB", inputs=torch.randn(4, 16), **settings)


def test_auto_places_whole_modules_instead(false_rule, monkeypatch):
    model, x, workload = Running(1), torch.randn(64, 16), autoshard.Workload(batch_size=64)
    two = parse_devices("2x1MiB")  # so slow that a small batch is worth dividing
    two = replace(two, devices=tuple(replace(device, flops_per_second={"default": 1e7}) for device in two.devices))
    plan = autoshard.plan(model, two, inputs=x, workload=workload)
    assert plan.num_microbatches == 1 and plan.batch is None
    monkeypatch.setattr(planned, "MOST_FLOPS", 1)  # nothing is run, nothing found
    assert autoshard.plan(model, two, inputs=x, workload=workload).batch is not None


def test_a_pass_that_takes_long_is_not_run(false_rule, monkeypatch):
    monkeypatch.setattr(planned, "MOST_FLOPS", 4 * 2 * 2 * 16 * 64 - 1)  # four rows through two matrices
    plan = autoshard.plan(Running(1), "2x1MiB", inputs=torch.randn(4, 16), strategy="pipeline", num_microbatches=2)
    assert plan.num_microbatches == 2


class Chosen(nn.Module):
    """Of two scores that are sums of the same terms the second is larger by less than float32 tells apart."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.scores, self.table = nn.Linear(16, 256), nn.Linear(256, 2), nn.Embedding(2, 8)
        one, other = torch.randperm(256).view(2, 128)
        with torch.no_grad():
            self.up.weight[other], self.up.bias[other] = self.up.weight[one], self.up.bias[one]
            self.scores.weight[1, other] = self.scores.weight[0, one]
            self.scores.weight[0, other], self.scores.weight[1, one] = 0, 0
            self.scores.bias.copy_(torch.tensor([0.0, 1e-9]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(self.scores(self.up(x).relu()).argmax(-1))


def test_a_choice_that_rounding_made_convicts_nothing():
    torch.manual_seed(0)
    model, x = Chosen(), torch.randn(256, 16)
    assert not torch.equal(model(x), model.double()(x.double()).float()), "rounding decides some of the choices"
    settings = {"strategy": "column-parallel", "objective": "memory"}
    plan = autoshard.plan(model.float(), "2x1MiB", inputs=x, **settings)
    found = autoshard.verify(model, plan, inputs=x)
    assert plan.cuts and not found.ok and any(".double()" in note for note in found.notes)
    plan = autoshard.plan(model.double(), "2x1MiB", inputs=x.double(), **settings)
    assert plan.cuts and autoshard.verify(model, plan, inputs=x.double()).ok


class Amplified(nn.Module):
    """What is rounding in the products is seen in the result."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (1e6 * self.down(self.up(x).relu())).sin()


@pytest.mark.parametrize(("factor", "dtype"), [(1.0, torch.float32), (1.01, torch.float32), (1.01, torch.float64)])
def test_rounding_that_a_model_amplifies_convicts_nothing(factor, dtype, monkeypatch):
    """A fault is as large in float64."""
    torch.manual_seed(0)
    model, x = Amplified().to(dtype), torch.randn(4, 16, dtype=dtype)
    make = _planning(model, x, factor, monkeypatch)
    if factor != 1:
        with pytest.raises(autoshard.PlanError, match="does not compute the same in parts"):
            make("2x1MiB")
    else:
        assert make("2x1MiB").cuts


class Lowered(nn.Module):
    """Double precision around products in single precision, as routers of experts compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64).double(), nn.Linear(64, 16).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.up(x).relu().float(), self.down.weight.float()).double()


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_step_in_single_precision_rounds_as_such(factor, monkeypatch):
    """A fault of one percent is a fault there, too."""
    torch.manual_seed(0)
    model, x = Lowered(), torch.randn(4, 16, dtype=torch.float64)
    make = _planning(model, x, factor, monkeypatch)
    if factor != 1:
        with pytest.raises(autoshard.PlanError, match="does not compute the same in parts"):
            make("2x1MiB")
        return
    with autoshard.simulate("2x1MiB") as devices, torch.no_grad():
        expected = model(x)
        plan = make(devices)
        found = autoshard.apply(model, plan)(x)
    assert plan.cuts and 1e-10 < (found - expected).abs().max() < 1e-6
    assert autoshard.verify(Lowered(), plan, inputs=x, training=False).ok


def _planning(model: nn.Module, x: torch.Tensor, factor: float, monkeypatch: pytest.MonkeyPatch):
    """What plans for some devices, where ranks give so many times what they should."""
    applied = planned._applied
    monkeypatch.setattr(planned, "_applied", lambda copy, *args: _times(applied(copy, *args), factor))
    return partial(autoshard.plan, model, inputs=x, strategy="column-parallel", objective="memory")


def _times(model: nn.Module, factor: float) -> nn.Module:
    model.register_forward_hook(lambda module, args, output: output * factor if factor != 1 else None)
    return model

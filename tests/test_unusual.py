"""What few models have and nobody expects to be planned: it works, or one clear refusal says what would."""

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import autoshard
from autoshard import Workload
from autoshard.errors import CaptureError, PlanError, SpecError

DEVICES = {"cpu:0": "1GiB", "cpu:1": "1GiB"}
DIVIDING = ("pipeline", "column-parallel", "data-parallel")


def pair():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


class Multiplies(nn.Module):
    """A sparse input by a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(torch.sparse.mm(x, self.first.weight))


def jagged():
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


UNUSUAL = {
    "jagged": (pair, jagged),
    "coo": (Multiplies, lambda: torch.eye(4).to_sparse()),
    "csr": (Multiplies, lambda: torch.eye(4).to_sparse_csr()),
    "no width": (lambda: nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 0)), lambda: torch.ones(4, 0)),
    "no rows": (pair, lambda: torch.ones(0, 4)),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_inputs_are_placed_and_neither_divided_nor_cut(name):
    build, inputs = UNUSUAL[name]
    workload = Workload(mode="inference")
    assert autoshard.plan(build(), DEVICES, inputs=inputs(), strategy="balanced", workload=workload)
    assert autoshard.plan(build(), DEVICES, inputs=inputs(), workload=workload)
    for strategy in DIVIDING:
        with pytest.raises(PlanError, match=r'input 0 .*Give others, or use "balanced"'):
            autoshard.plan(build(), DEVICES, inputs=inputs(), strategy=strategy, workload=workload)


def test_nested_inputs_without_shapes():
    with pytest.raises(CaptureError, match=r"input 0 .*torch\.jagged"):
        autoshard.profile(pair(), torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)]))


def test_lazy_modules():
    model = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8))
    with pytest.raises(CaptureError, match=r"0\.weight has no shape yet.*call the model once"):
        autoshard.profile(model, torch.ones(2, 4))
    model(torch.ones(2, 4))
    assert autoshard.profile(model, torch.ones(2, 4))


class Flexible(nn.Module):
    def forward(self, x):
        return flex_attention(x, x, x)


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_flex_attention(mode):
    x = torch.randn(1, 2, 128, 16, requires_grad=mode == "training")
    with pytest.raises(CaptureError, match=r"calls flex_attention \(.*test_unusual.py:\d+\).*sdpa"):
        autoshard.profile(Flexible(), x, workload=Workload(mode=mode))


@pytest.mark.parametrize(
    "wrong", [{"batch_size": "4"}, {"batch_size": 2.5}, {"sequence_length": True}, {"new_tokens": "3"}]
)
def test_workloads_of_other_types(wrong):
    with pytest.raises(SpecError, match=f"{next(iter(wrong))} must be a whole number"):
        Workload(**wrong)


def test_no_workload():
    with pytest.raises(SpecError, match="workload must be a Workload, got 'training'"):
        autoshard.profile(pair(), torch.ones(2, 4), workload="training")


def test_errors_of_shapes_name_the_module():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(5, 4)))
    with pytest.raises(CaptureError, match=r"cannot be multiplied .*\(in 1\.0\)"):
        autoshard.profile(model, torch.ones(2, 4))

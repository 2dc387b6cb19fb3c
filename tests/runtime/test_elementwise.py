"""Optimizers of cut models: those that look at whole matrices are refused, others step as ever."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ApplyError
from autoshard.runtime.cuts import apply_cuts
from autoshard.runtime.local_ranks import LocalRanks
from tests.runtime.cut_models import columns


class OwnAdam(torch.optim.Adam):
    """Inherits its steps."""


class OwnSteps(torch.optim.SGD):
    """Has steps of its own, about which it says what they do."""

    elementwise = True

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


def muon(parameters):
    return torch.optim.Muon([one for one in parameters if one.dim() == 2])


EACH = {
    "inherited": OwnAdam,
    "says so": lambda ps: OwnSteps(ps, lr=0.1),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
    "foreach": lambda ps: torch.optim.RMSprop(ps, foreach=True),
}
WHOLE = {"factored": torch.optim.Adafactor, "orthogonal": muon, "directions": torch.optim.LBFGS}


def cut_model():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)), torch.randn(4, 8)
    return apply_cuts(model, [columns(32, 2, up="0", down="2")], LocalRanks.of(["cpu", "cpu"])), x


@pytest.mark.parametrize("name", EACH)
def test_what_treats_each_number_by_itself_steps(name):
    model, x = cut_model()
    optimizer = EACH[name](list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x).square().mean().backward()
    called = []
    optimizer.register_step_pre_hook(lambda *given: called.append(1))
    optimizer.step()
    scheduler.step()
    assert called == [1] and all(not torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_whole_matrices_is_refused(name):
    model, x = cut_model()
    optimizer = WHOLE[name](list(model.parameters()))
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model(x).square().mean().backward()
    for _ in range(2):  # not let through at its second step, either
        with pytest.raises(ApplyError, match="is not known to treat each number of a parameter by itself"):
            optimizer.step(*([lambda: torch.zeros(())] if name == "directions" else []))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    autoshard.remove(model)
    optimizer.step(*([lambda: torch.zeros(())] if name == "directions" else []))

"""Modules and parameters that are added to an applied model, and modules that are exchanged or taken away."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import ApplyError
from autoshard.runtime import adopt, apply_device_map, remove
from tests.models import same
from tests.runtime.models import HARD, D, Residual, rows

CPU, ONE, TWO = torch.device("cpu"), torch.device("cpu:1"), torch.device("cpu:2")


class LowRank(nn.Module):
    """An adapter around a linear layer, as fine-tuning libraries put it in that layer's place."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base, nn.Linear(D, 2, bias=False), nn.Linear(2, D, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def pair():
    torch.manual_seed(0)
    original = Residual()
    torch.manual_seed(0)
    return original, Residual()


def wrap(model, seed=1):
    torch.manual_seed(seed)
    model.b = LowRank(model.b)
    return model


@pytest.mark.parametrize("asked", [False, True])
def test_adapter_lands_on_its_hosts_device_and_trains(asked):
    original, model = pair()
    x = rows()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        model(x)
        wrap(original)
        wrap(model)
        if asked:
            assert adopt(model) is model
            assert model.b.down.weight.device == ONE
        assert same(model(x), original(x))
        assert model.b.down.weight.device == model.b.up.weight.device == model.b.base.weight.device == ONE
        for each in (original, model):
            for p in each.parameters():
                p.requires_grad_(False)
            for p in (each.b.down.weight, each.b.up.weight):
                p.requires_grad_(True)
            optimizer = torch.optim.AdamW([each.b.down.weight, each.b.up.weight], lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                each(x).square().mean().backward()
                optimizer.step()
        remove(model)
    assert all(p.device == CPU for p in model.parameters())
    assert same(dict(model.state_dict()), dict(original.state_dict()))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_layer_in_the_place_of_another():
    original, model = pair()
    x = rows()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        old = model.c
        torch.manual_seed(3)
        original.c = nn.Linear(D, D)
        torch.manual_seed(3)
        model.c = nn.Linear(D, D)
        assert same(model(x), original(x))
        assert model.c.weight.device == TWO and not old._forward_pre_hooks
        remove(model)


def test_parameters_assigned_from_a_state_dict():
    original, model = pair()
    x = rows()
    with autoshard.simulate("3x1MiB"):
        apply_device_map(model, HARD["residual"].device_map)
        fresh = {name: torch.randn_like(tensor, device="cpu") for name, tensor in original.state_dict().items()}
        original.load_state_dict(fresh)
        model.load_state_dict(fresh, assign=True)
        assert same(model(x), original(x))
        assert model.b.weight.device == ONE
        remove(model)
        assert same(model(x), original(x))


def test_new_parameter_in_mixed_glue():
    """A parameter put on the root goes to the root's home, and what it meets is brought to it."""

    class Scaled(Residual):
        def forward(self, x):
            h = super().forward(x)
            return h * self.scale if hasattr(self, "scale") else h

    torch.manual_seed(0)
    model, x = Scaled(), rows()
    with autoshard.simulate("3x1MiB"):
        expected = model(x) * 3
        apply_device_map(model, HARD["residual"].device_map)
        model(x)
        model.scale = nn.Parameter(torch.full((D,), 3.0))
        assert same(model(x), expected)
        remove(model)


def test_adopting_needs_something_applied_and_room():
    _, model = pair()
    with pytest.raises(ApplyError, match="nothing to adopt"):
        adopt(model)
    with autoshard.simulate({"cpu:0": "1MiB", "cpu:1": "300B", "cpu:2": "1MiB"}):
        apply_device_map(model, HARD["residual"].device_map)
        model.b = LowRank(model.b)
        with pytest.raises(ApplyError, match=r"b\.down\.weight.*cpu:1"):
            model(rows())
        assert model.b.down.weight.device == CPU
        remove(model)


def test_modules_registered_elsewhere_cost_nothing():
    """Only registrations in the model's own modules make it look for new ones."""
    _, model = pair()
    apply_device_map(model, {"": "cpu"})
    runtime = next(iter(model._forward_pre_hooks.values())).runtime
    nn.Sequential(model.a, nn.Linear(2, 2))
    assert not runtime.tree.changed
    model.extra = nn.Dropout()
    assert runtime.tree.changed
    model(rows())
    assert not runtime.tree.changed


def test_registration_hooks_go_with_the_last_applied_model():
    from torch.nn.modules import module as torch_module

    before = len(torch_module._global_module_registration_hooks)
    _, model = pair()
    apply_device_map(model, {"": "cpu"})
    assert len(torch_module._global_module_registration_hooks) == max(before, 1)  # one for all applied models
    remove(model)
    assert len(torch_module._global_module_registration_hooks) == before

"""Bad input is answered in one paragraph: what, where and what would work; nothing is moved or half-written."""

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import AutoshardError, PlanError
from tests.conformance.checks import state
from tests.hooks import is_hooked
from tests.models import by_name, same


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


X = {"inputs": torch.zeros(2, 64)}


def refused(kind, words, call):
    """The call raises `kind`; its message is one paragraph and names the words."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n\n" not in message, message
    assert 20 < len(message) < 2000, message
    for word in words:
        assert word.lower() in message.lower(), f"{word!r} is not in: {message}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has cuda:0")
def test_device_that_is_not_here(model):
    before = state(model)
    plan = autoshard.plan(model, {"cuda:0": "1GiB"}, **X)
    refused(AutoshardError, ["cuda:0"], lambda: autoshard.apply(model, plan))
    assert same(before, state(model)) and all(p.device.type == "cpu" for p in model.parameters())


MAPS = {
    "a tensor without a device": ({"0": "cpu:0"}, "2."),
    "an unknown module": ({"0": "cpu:0", "2": "cpu:1", "nonsense": "cpu:0"}, "nonsense"),
    "two devices for one tensor": ({"0": "cpu:0", "2": "cpu:1", "2.bias": "cpu:0"}, "2."),
    "an unknown device": ({"0": "cpu:0", "2": "tpu:7"}, "tpu"),
}


@pytest.mark.parametrize("kind", MAPS)
def test_device_maps(model, kind):
    device_map, word = MAPS[kind]
    before = state(model)
    with autoshard.simulate("2x1MiB"):
        refused(AutoshardError, [word], lambda: autoshard.apply(model, device_map, **X))
    assert same(before, state(model))


def test_a_map_or_a_plan_of_another_model(model):
    profile = autoshard.profile(model, **X)
    refused(PlanError, ["nonsense"], lambda: autoshard.estimate({"0": 0, "2": 1, "nonsense": 0}, profile, "2x1MiB"))
    plan = autoshard.plan(model, "2x1MiB", **X)
    other = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    with autoshard.simulate("2x1MiB"):
        refused(PlanError, ["2.weight"], lambda: autoshard.apply(other, plan))


def test_refused_apply_moves_nothing():
    """Not enough memory on the second device, found half way: the model is as it was."""
    case = by_name("mutated-dict")
    model, before = case.model(), state(case.model())
    paths = [path for path, _ in model.named_children()] or [""]
    device_map = dict.fromkeys(paths, "cpu:1")
    with autoshard.simulate({"cpu:0": "1MiB", "cpu:1": "2KiB"}), pytest.raises((AutoshardError, RuntimeError)):
        autoshard.apply(model, device_map, inputs=case.example())
    assert same(before, state(model))
    assert not is_hooked(model)

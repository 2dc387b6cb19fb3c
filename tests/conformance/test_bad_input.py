"""Bad input is answered in one paragraph: what, where and what would work; nothing is moved or half-written."""

import json

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


@pytest.mark.parametrize(
    "devices, words",
    [
        ("2x24Gib,1xpotato", ["potato"]),
        ("0xH100-80GB", []),
        ("2x0GiB", ["0GiB"]),
        ("2x-4GiB", []),
        ({"cuda:0": "-3GiB"}, ["3GiB"]),
        ({"cuda:0": 0}, ["0"]),
        ("8xH1000", ["H1000"]),
        ("", []),
        ([], []),
        (0, []),
        (-1, []),
        ("/no/such/cluster.json", ["/no/such/cluster.json"]),
        (["cuda:0", "cuda:0"], ["cuda:0"]),
        (3.5, []),
    ],
)
def test_device_specs(model, devices, words):
    refused(AutoshardError, words, lambda: autoshard.plan(model, devices, **X))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has cuda:0")
def test_device_that_is_not_here(model):
    before = state(model)
    plan = autoshard.plan(model, {"cuda:0": "1GiB"}, **X)
    refused(AutoshardError, ["cuda:0"], lambda: autoshard.apply(model, plan))
    assert same(before, state(model)) and all(p.device.type == "cpu" for p in model.parameters())


@pytest.mark.parametrize("change", ["missing", "unknown", "overlap", "device"])
def test_device_maps(model, change):
    device_map = {"0": "cpu:0", "2": "cpu:1"}
    words = {"missing": ["2."], "unknown": ["nonsense"], "overlap": ["2."], "device": ["tpu"]}[change]
    device_map |= {"unknown": {"nonsense": "cpu:0"}, "overlap": {"2.bias": "cpu:0"}, "device": {"2": "tpu:7"}}.get(
        change, {}
    )
    if change == "missing":
        del device_map["2"]
    before = state(model)
    with autoshard.simulate("2x1MiB"):
        refused(AutoshardError, words, lambda: autoshard.apply(model, device_map, **X))
    assert same(before, state(model))


def test_an_estimate_of_a_device_map_with_unknown_modules(model):
    profile = autoshard.profile(model, **X)
    refused(PlanError, ["nonsense"], lambda: autoshard.estimate({"0": 0, "2": 1, "nonsense": 0}, profile, "2x1MiB"))


def test_plan_of_another_model(model):
    plan = autoshard.plan(model, "2x1MiB", **X)
    other = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 32))
    with autoshard.simulate("2x1MiB"):
        refused(PlanError, ["2.weight"], lambda: autoshard.apply(other, plan))


@pytest.mark.parametrize("damage", ["cut", "empty", "newer", "list", "unknown-key", "type"])
def test_plan_files(model, damage, tmp_path):
    path = tmp_path / "plan.json"
    autoshard.plan(model, "2x1MiB", **X).save(path)
    data = json.loads(path.read_text())
    if damage == "cut":
        path.write_text(path.read_text()[:-20])
    elif damage == "empty":
        path.write_text("")
    elif damage == "list":
        path.write_text("[1, 2]")
    else:
        data |= {"newer": {"version": 999}, "unknown-key": {"surprise": 1}, "type": {"placements": 7}}[damage]
        path.write_text(json.dumps(data))
    refused(AutoshardError, [str(path)], lambda: autoshard.Plan.load(path))


def test_inputs_that_do_not_fit(model):
    refused(AutoshardError, [], lambda: autoshard.plan(model, "2x1MiB", inputs=torch.zeros(2, 65)))
    refused(AutoshardError, [], lambda: autoshard.plan(model, "2x1MiB", inputs={"nope": torch.zeros(2, 64)}))
    refused(AutoshardError, ["inputs"], lambda: autoshard.plan(model, "2x1MiB"))


def test_refused_apply_moves_nothing():
    """Not enough memory on the second device, found half way: the model is as it was."""
    case = by_name("growing-list")
    model, before = case.model(), state(case.model())
    paths = [path for path, _ in model.named_children()] or [""]
    device_map = dict.fromkeys(paths, "cpu:1")
    with autoshard.simulate({"cpu:0": "1MiB", "cpu:1": "8KiB"}), pytest.raises((AutoshardError, RuntimeError)):
        autoshard.apply(model, device_map, inputs=case.example())
    assert same(before, state(model))
    assert not is_hooked(model)

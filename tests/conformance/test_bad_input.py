"""Bad input is answered in one paragraph: what, where and what would work; nothing is moved or half-written."""

import json
import pathlib

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import AutoshardError, PlanError, SpecError
from tests.conformance.checks import state
from tests.hooks import is_hooked
from tests.models import by_name, same
from tests.test_examples import run


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


def test_unknown_strategy_and_objective(model):
    devices = "2x1MiB"
    refused(SpecError, ["greedy", "balanced"], lambda: autoshard.plan(model, devices, strategy="greedy", **X))
    refused(SpecError, ["speed", "latency"], lambda: autoshard.plan(model, devices, objective="speed", **X))


def test_model_that_cannot_fit(model):
    """By how much, who needs it, and one change that works: the change is tried here."""
    refused(PlanError, ["KiB", "2"], lambda: autoshard.plan(model, "2x40KiB", **X))


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


def command(tmp_path: pathlib.Path, text: str, *more: str):
    path = tmp_path / "model.py"
    path.write_text(text)
    return run("-m", "autoshard", "plan", str(path), "--devices", "2x1MiB", *more)


@pytest.mark.slow  # many processes; tests/cli has the cases one by one
def test_model_files(tmp_path):
    """What the user wrote is at fault: exit status 1 or 2, a short message, no traceback of ours."""
    raises = command(tmp_path, "import torch\nraise ValueError('bad weather')\n")
    assert raises.returncode in (1, 2)
    assert "bad weather" in raises.stderr and "model.py" in raises.stderr and "line 2" in raises.stderr
    assert raises.stderr.count("\n") < 25, raises.stderr

    for text, word in (("x = 1\n", "model"), ("model = 3\n", "model"), ("def model():\n    return 3\n", "model")):
        done = command(tmp_path, text)
        assert done.returncode in (1, 2) and word in done.stderr and "Traceback" not in done.stderr, done.stderr

    missing = run("-m", "autoshard", "plan", str(tmp_path / "nowhere.py"), "--devices", "2x1MiB")
    assert missing.returncode == 2 and "nowhere.py" in missing.stderr and "Traceback" not in missing.stderr


@pytest.mark.slow  # many processes; tests/cli has the cases one by one
def test_exit_status_and_half_written_files(tmp_path):
    text = "import torch\nmodel = torch.nn.Linear(512, 512)\nexample_inputs = torch.zeros(1, 512)\n"  # 1 MiB of weights
    out = tmp_path / "plan.json"
    too_big = command(tmp_path, text.replace("Linear(512, 512)", "Linear(512, 5120)"), "-o", str(out))
    assert too_big.returncode == 1 and not out.exists(), too_big.stderr
    fine = command(tmp_path, text.replace("Linear(512, 512)", "Linear(512, 64)"), "-o", str(out))
    assert fine.returncode == 0 and json.loads(out.read_text())["placements"], fine.stderr
    for wrong in (["--strategy", "greedy"], ["--batch", "0"], ["--no-such-option"], ["--devices", "potato"]):
        done = command(tmp_path, text, *wrong)
        assert done.returncode == 2 and "Traceback" not in done.stderr, (wrong, done.returncode, done.stderr)


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

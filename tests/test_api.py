"""The public calls, as a user types them."""

import inspect
import sys
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard.errors import SpecError
from tests.blocks import Block

KIB = 1024


@pytest.fixture
def model():
    return nn.Sequential(*[Block(32) for _ in range(6)])  # 33 KiB each


@torch.no_grad()
def run(model):
    return model(X)


X = torch.linspace(-1, 1, 4 * 32).reshape(4, 32)


MAP = {str(i): f"cpu:{i % 3}" for i in range(6)}


@pytest.mark.parametrize("given", ["plan", "devices", "device map"])
def test_apply_and_remove(model, given):
    expected = run(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with autoshard.simulate("1x120KiB,2x100KiB") as devices:
        plan = autoshard.plan(model, devices, inputs=X)
        what = {"plan": plan, "devices": devices, "device map": MAP}[given]
        assert autoshard.apply(model, what, **({"inputs": X} if given == "devices" else {})) is model
        assert len({p.device for p in model.parameters()}) > 1
        assert given != "device map" or model[4].up.weight.device == torch.device("cpu", 1)
        assert torch.equal(run(model).cpu(), expected)
        assert autoshard.remove(model) is model
    assert torch.equal(run(model), expected)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[name], before[name]) for name in before)


def test_a_model_on_meta_is_planned(model):
    with torch.device("meta"):
        same = nn.Sequential(*[Block(32) for _ in range(6)])
    plans = [autoshard.plan(m, "3x120KiB", inputs=X, strategy="sequential") for m in (model, same)]
    assert plans[0] == plans[1]
    assert all(p.is_meta for p in same.parameters())


def test_profile_and_estimate(model):
    workload = autoshard.Workload(batch_size=4, mode="training", optimizer="sgd")
    profile = autoshard.profile(model, X, workload=workload)
    assert profile.workload == workload
    assert profile.parameter_bytes == profile.gradient_bytes == sum(p.nbytes for p in model.parameters())
    plan = autoshard.plan(model, "2x1MiB", inputs=X, workload=workload, strategy="balanced")
    estimate = autoshard.estimate(plan, profile)
    assert estimate.fits and estimate.latency_seconds > 0
    assert estimate == autoshard.estimate(plan, profile, "2x1MiB")
    moved = autoshard.estimate({"": "cuda:1"}, profile, "2x4MiB")
    assert moved.devices[0].peak_bytes == 0 < moved.devices[1].peak_bytes


def test_a_profile_is_taken_once_for_many_sets_of_devices(model):
    workload = autoshard.Workload(mode="training")
    profile = autoshard.profile(model, X, workload=workload)
    for devices in ("2x1MiB", "1x1MiB,1x2MiB"):
        known = autoshard.plan(model, devices, inputs=X, profile=profile, strategy="balanced")
        assert known == autoshard.plan(model, devices, inputs=X, workload=workload, strategy="balanced")
    settings = {"launch": "processes", "mesh": "fsdp=2"}
    known = autoshard.plan(model, "2x80GiB", profile=profile, **settings)
    assert known.workload.training
    assert known == autoshard.plan(model, "2x80GiB", inputs=X, workload=workload, **settings)
    with pytest.raises(autoshard.SpecError, match="another model"):
        autoshard.plan(nn.Linear(16, 8), "2x1MiB", inputs=X, profile=profile)
    with pytest.raises(autoshard.SpecError, match="leave workload out"):
        autoshard.plan(model, "2x1MiB", inputs=X, profile=profile, workload=autoshard.Workload())


def test_a_part_of_known_cards_is_kept_free_unless_told(model):
    card = autoshard.plan(model, "1xRTX4090,cpu", inputs=X).devices[0]
    plan = autoshard.plan(model, "1xRTX4090,cpu", inputs=X, max_memory={"cuda:0": 2**40})
    assert card.memory_bytes == int(plan.devices[0].memory_bytes * 0.95)
    assert not any("kept free" in reason for reason in plan.reasons)
    sized = autoshard.plan(model, "2x1MiB", inputs=X)
    assert sized.devices[0].memory_bytes == 2**20


def test_max_memory_and_pins(model):
    plan = autoshard.plan(
        model, max_memory={0: "150KiB", "cuda:1": 400 * KIB}, inputs=X, pins={"5": 1}, strategy="sequential"
    )
    assert [d.name for d in plan.devices] == ["cuda:0", "cuda:1"]
    assert plan.device_map["5"] == "cuda:1" and plan.pins == {"5": "cuda:1"}
    tighter = autoshard.plan(model, "2x1MiB", max_memory={"cuda:0": "100KiB"}, inputs=X, strategy="sequential")
    profile = autoshard.profile(model, X)
    assert autoshard.estimate(tighter, profile, "2x1MiB").devices[0].peak_bytes <= 100 * KIB
    with pytest.raises(SpecError, match=r"cuda:5.*not among"):
        autoshard.plan(model, "2x1MiB", max_memory={5: "1MiB"}, inputs=X)
    with pytest.raises(SpecError, match=r"pin of '0'.*not among"):
        autoshard.plan(model, "2x1MiB", pins={"0": "cpu"}, inputs=X)


def test_only_public_names_are_listed():
    assert sorted(dir(autoshard)) == sorted([*autoshard.__all__, "__version__"])
    assert all(callable(getattr(autoshard, name)) for name in autoshard.__all__)
    from autoshard.plan import Plan  # the module is still found, though the call has its name

    assert Plan is autoshard.Plan and autoshard.plan is not sys.modules["autoshard.plan"]


def test_a_plan_sums_itself_up(model):
    lines = autoshard.plan(model, "3x120KiB", inputs=X, strategy="balanced", pins={"0": 1}).summary().splitlines()
    assert lines[0] == "Plan  balanced, for latency, 3 devices"
    assert "  cuda:2  generic  120 KiB" in lines and "  0 -> cuda:1" in lines
    assert any(line.startswith("  - ") for line in lines)


def test_compare_explain_report(model, tmp_path):
    found = autoshard.compare(model, "3x120KiB", inputs=X)
    assert found.chosen.plan.fingerprint and {one.name for one in found.alternatives} >= {"placement", "sequential"}
    assert any(one.name.startswith("Accelerate") for one in found.peers)
    lines = str(found).splitlines()
    assert len(lines) == 1 + len(found.alternatives) + len(found.peers)
    assert sum(line.startswith("  * ") for line in lines) == 1 and "compare" not in repr(found)[1:].split(":")[0]
    profile = autoshard.profile(model, X)
    why = autoshard.explain(autoshard.plan(model, "3x120KiB", inputs=X, strategy="balanced"), profile, "2")
    assert "is on cuda:" in str(why) and len(str(why).splitlines()) == 2 + len(why.sentences) + len(why.alternatives)
    page = tmp_path / "page.html"
    autoshard.report(found.chosen.plan, profile, page, comparison=found, title="six blocks")
    text = page.read_text()
    assert text.startswith("<!") and "six blocks" in text and "Accelerate" in text
    with pytest.raises(SpecError, match="is a folder"):
        autoshard.report(found.chosen.plan, profile, tmp_path)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"strategy": "ballanced"}, "unknown strategy 'ballanced'.* Did you mean balanced?"),
        ({"objective": "speed", "strategy": "pipeline"}, "unknown objective 'speed': use one of latency, throughput"),
        ({"schedule": "1F1B"}, "unknown schedule '1F1B'.* Did you mean 1f1b?"),
        ({"strategy": None}, "unknown strategy None"),
    ],
)
def test_names_that_do_not_exist_are_refused_before_the_model_is_looked_at(settings, says):
    with pytest.raises(SpecError, match=says):
        autoshard.plan(None, "2x1GiB", **settings)


@pytest.mark.parametrize("call", [autoshard.plan, autoshard.apply])
def test_what_is_no_model_is_refused_in_words(call):
    with pytest.raises(SpecError, match=r"not str.*autoshard\.load"):
        call("llama", "2x1GiB")


def test_public_signatures_say_what_they_take():
    """Nothing but values of any kind, which a checkpoint's state is, is typed Any."""
    for name in autoshard.__all__:
        call = getattr(autoshard, name)
        if inspect.isfunction(call):
            for parameter in inspect.signature(call).parameters.values():
                loose = parameter.annotation in (Any, str, "Any", "str") and parameter.name not in ("state", "settings")
                assert not loose or (name, parameter.name) in {("explain", "subject"), ("report", "title")}, parameter

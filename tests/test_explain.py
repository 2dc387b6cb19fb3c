"""Explanations: the alternatives are real plans, priced as they would be by themselves."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.cluster.parse import cluster_of
from autoshard.errors import SpecError
from autoshard.report.explanation import explain
from tests.blocks import Block
from tests.conformance.tp_plans import slow_devices
from tests.models import by_name
from tests.models.hf import SMALL, build


@pytest.fixture(scope="module")
def placed():
    model = nn.Sequential(*[Block() for _ in range(6)])
    profile = autoshard.profile(model, torch.zeros(2, 64))
    plan = autoshard.plan(
        model, "3x1MiB", inputs=torch.zeros(2, 64), strategy="balanced", objective="throughput", pins={"5": 2}
    )
    return plan, profile, cluster_of(plan.devices)


class Masked(nn.Module):
    """Takes a view of a mask, which is made where the mask is, and copied from there."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, state):
        return {"x": self.linear(state["x"]) * state["mask"][:, None], "mask": state["mask"]}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Masked(), Masked()])

    def forward(self, state):
        for layer in self.layers:
            state = layer(state)
        return state["x"]


def test_what_a_module_copies_to_itself_does_not_go_from_it():
    model, inputs = Twice(), ({"x": torch.zeros(2, 64), "mask": torch.ones(2, dtype=torch.bool)},)
    profile = autoshard.profile(model, inputs)
    plan = autoshard.plan(model, "2x1MiB", inputs=inputs, pins={"layers.0": 0, "layers.1": 1})
    cluster = cluster_of(plan.devices)
    estimate = autoshard.estimate(plan, profile, cluster)
    assert any(one.producer == one.consumer == "layers.1" for one in estimate.transfers), estimate.transfers
    (out,) = (one for one in explain(plan, profile, cluster, "layers.1").sentences if "goes from it" in one)
    assert out.startswith("512 B goes from it")


def test_a_module_elsewhere_is_priced_as_the_plan_it_would_be(placed):
    plan, profile, cluster = placed
    found = explain(plan, profile, cluster, "2")
    home = plan.placements["2"]
    assert f"is on {home}" in found.sentences[0]
    assert found.chosen.value == autoshard.estimate(plan, profile, cluster).bottleneck_seconds
    elsewhere = {one.title: one for one in found.alternatives}
    for device in {"cuda:0", "cuda:1", "cuda:2"} - {home}:
        moved = replace(plan, placements={**plan.placements, "2": device})
        figures = autoshard.estimate(moved, profile, cluster)
        assert elsewhere[f"all of it on {device}"].value == figures.bottleneck_seconds
    values = [one.value for one in found.alternatives if not one.lacking_bytes]
    assert values == sorted(values)


def test_a_part_of_a_placed_module_is_taken_out_of_it(placed):
    plan, profile, cluster = placed
    found = explain(plan, profile, cluster, "2.up")
    assert found.sentences[0].endswith(", as all of 2.")
    home = plan.placements["2"]
    other = next(device for device in ("cuda:0", "cuda:1") if device != home)
    rest = {path: device for path, device in plan.placements.items() if path != "2"}
    moved = replace(plan, placements={**rest, "2.down": home, "2.up": other})
    figures = autoshard.estimate(moved, profile, cluster)
    assert next(a for a in found.alternatives if a.title == f"all of it on {other}").value == figures.bottleneck_seconds


def test_pins_and_memory_are_given_as_reasons(placed):
    plan, profile, cluster = placed
    assert any("pinned" in sentence for sentence in explain(plan, profile, cluster, "5").sentences)
    tight = replace(cluster, devices=tuple(replace(d, memory_bytes=300_000) for d in cluster.devices))
    assert any("Memory binds it" in sentence for sentence in explain(plan, profile, tight, "2").sentences)


def test_a_device_says_what_it_holds(placed):
    plan, profile, cluster = placed
    found = explain(plan, profile, cluster, "cuda:1")
    row = next(device for device in autoshard.estimate(plan, profile, cluster).devices if device.name == "cuda:1")
    assert found.kind == "device" and row.peak_bytes > 0
    assert any("weights" in sentence for sentence in found.sentences)


def test_a_cut_and_what_stays_whole():
    model = build("LlamaForCausalLM", "LlamaConfig", {**SMALL, "num_hidden_layers": 1})
    inputs = by_name("llama").example()
    cluster = slow_devices(2)
    plan = autoshard.plan(model, cluster, inputs=inputs, strategy="column-parallel")
    profile = autoshard.profile(model, inputs)
    found = explain(plan, profile, cluster, "model.layers.0.mlp")
    text = " ".join(found.sentences)
    assert "cut into" in text and "1 all-reduce per block" in text and "Checked:" in text
    alone = next(one for one in found.alternatives if one.title.startswith("the whole model on"))
    assert alone.value > found.chosen.value
    assert "Nothing of it is cut" in " ".join(explain(plan, profile, cluster, "model.norm").sentences)


def test_what_is_not_there_is_named_with_what_is(placed):
    plan, profile, cluster = placed
    with pytest.raises(SpecError, match=r"neither a module nor a device .* cuda:0, cuda:1.* 0\.up"):
        explain(plan, profile, cluster, "9.up")


def test_the_command_finds_the_model_of_a_plan(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(
        "import torch\nmodel = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)])\n"
        "example_inputs = torch.zeros(2, 64)\n"
    )
    runner = CliRunner()
    made = runner.invoke(app, ["plan", "model.py", "-d", "2x100KiB", "-s", "balanced", "-o", "plan.json"])
    assert made.exit_code == 0, made.output
    shown = runner.invoke(app, ["explain", "plan.json", "3"])
    assert shown.exit_code == 0 and "is on cuda:0" in shown.stdout and max(map(len, shown.stdout.splitlines())) <= 80
    data = json.loads(runner.invoke(app, ["explain", "plan.json", "cuda:1", "--json"]).stdout)
    assert data["kind"] == "device" and data["chosen"]["title"] == "as planned"
    (tmp_path / "model.py").rename("moved.py")
    unshardable = runner.invoke(app, ["explain", "plan.json", "3"])
    assert unshardable.exit_code == 2
    assert runner.invoke(app, ["explain", "plan.json", "3", "--target", "moved.py"]).exit_code == 0


@pytest.fixture(scope="module")
def staged():
    """A pipeline of four blocks, of which the last is the slowest, over two devices."""
    model = nn.Sequential(*[Block() for _ in range(3)], nn.Sequential(Block(), Block()))
    x, workload = torch.zeros(8, 64), autoshard.Workload(batch_size=8, mode="training")
    profile = autoshard.profile(model, x, workload=workload)
    settings = {"strategy": "pipeline", "num_microbatches": 4, "schedule": "gpipe", "workload": workload}
    plan = autoshard.plan(model, "2x8MiB", inputs=x, **settings)
    return plan, profile, cluster_of(plan.devices)


def test_a_pipeline_says_which_stage_binds_it(staged):
    plan, profile, cluster = staged
    figures = autoshard.estimate(plan, profile, cluster)
    seconds = [stage.forward_seconds + stage.backward_seconds for stage in figures.pipelining.stages]
    slowest = seconds.index(max(seconds))
    path = plan.stages[slowest].paths[0]
    found = explain(plan, profile, cluster, path)
    text = str(found)
    assert f"Stage {slowest} of 2, on cuda:{slowest}, is the slowest" in text
    assert "This is the stage that binds the time of a pass." in text
    assert f"Devices wait {figures.pipelining.bubble:.0%} of a pass (the bubble)" in text
    assert "with 4 micro-batches in the order of gpipe" in text and "full at its peak" in text
    other = explain(plan, profile, cluster, plan.stages[1 - slowest].paths[0])
    assert any(f"Stage {1 - slowest}, which this is, takes" in sentence for sentence in other.sentences)

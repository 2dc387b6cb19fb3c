"""The cells of a page hold what the command line says for the same request: of the plan, and of other devices."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import autoshard
from autoshard.cli.main import app
from autoshard.cluster.parse import parse_devices
from autoshard.plan.batching import of_size
from autoshard.plan.workload import Workload
from autoshard.search.sizes import for_size
from tests.engine.test_events import Net
from tests.report.net import MODEL

CASES = {
    "placed": ("2x2MiB", "balanced"),
    "stages": ("2xT4", "pipeline"),
    "offload": ("cuda:0=400KiB,cpu=1GiB", "balanced"),
    "replicas": ("2xT4", "data-parallel"),
}


def run(*arguments):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code in (0, 1), done.output
    return done.stdout


@pytest.mark.parametrize(
    "case", ["placed", "offload", *(pytest.param(case, marks=pytest.mark.slow) for case in ("stages", "replicas"))]
)
def test_cells_are_what_the_command_line_says(case, tmp_path, monkeypatch):
    spec, strategy = CASES[case]
    net, file, cells = tmp_path / "net.py", tmp_path / "plan.json", []
    net.write_text(MODEL)
    one = ("--launch", "one-process")
    run("plan", net, "-d", spec, "--strategy", strategy, "--batch", 8, "--seq", 16, *one, "-o", file)
    page = importlib.import_module("autoshard.report.page")
    monkeypatch.setattr(page, "make_page", lambda *_, **shown: cells.extend(shown["cells"]) or "")
    run("report", file, "-o", tmp_path / "page.html", "--no-compare")
    own = next(cell for cell in cells if cell.own)
    here = [cell for cell in cells if not cell.card]
    assert len(here) > 6
    for cell in (own, here[-1]):
        said = json.loads(run("estimate", file, "--batch", cell.batch, "--seq", cell.tokens, "--json"))["estimate"]
        assert cell.seconds == pytest.approx(said["latency_seconds"])
        assert cell.tokens_per_second == pytest.approx(cell.batch * cell.tokens / said["latency_seconds"])
        assert cell.full == pytest.approx(max(row["peak_bytes"] / row["memory_bytes"] for row in said["devices"]))
    others = [cell for cell in cells if cell.card and cell.mesh]
    assert bool(others) == (strategy == "balanced")
    for cell in others[:2] if case == "placed" else ():
        devices = f"{cell.devices}x{cell.card}".replace(" ", "")
        asked = (net, "-d", devices, "--strategy", strategy, "--batch", 8, "--seq", 16, "--json")
        said = json.loads(run("plan", *asked))["estimate"]
        assert cell.seconds == pytest.approx(said["latency_seconds"])


def test_a_divided_plan_with_another_batch_is_the_one_that_is_made_for_it():
    """Its replicas have their part of the new batch, which the plan alone does not say."""

    def made(size):
        inputs, workload = torch.zeros(size, 16, dtype=torch.long), Workload(batch_size=size, sequence_length=16)
        profile = autoshard.profile(Net(), inputs, workload=workload)
        asked = {"strategy": "data-parallel", "launch": "one-process"}
        return autoshard.plan(Net(), "2xA100-40GB", inputs=inputs, workload=workload, **asked), profile, workload

    plan, _, _ = made(64)
    other, profile, workload = made(4096)
    assert of_size(plan.batch, 4096) == replace(other.batch, proof=plan.batch.proof)
    cluster = parse_devices("2xA100-40GB")
    found = autoshard.estimate(for_size(plan, workload), profile, cluster)
    assert found == autoshard.estimate(replace(other, mesh=plan.mesh), profile, cluster)
    with pytest.raises(autoshard.PlanError, match="one of 1 rows is too small"):
        for_size(plan, Workload(batch_size=1, sequence_length=16))

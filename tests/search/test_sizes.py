"""The cells of a page hold what the command line says for the same request: of the plan, and of other devices."""

import json
import re
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
    "replicas": ("2xT4", "data-parallel"),
    "ranks": ("2xT4", "column-parallel"),
    "offload": ("cuda:0=400KiB,cpu=1GiB", "balanced"),
}


def run(*arguments):
    done = CliRunner().invoke(app, [str(one) for one in arguments])
    assert done.exit_code in (0, 1), done.output
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_cells_are_what_the_command_line_says(case, tmp_path):
    spec, strategy = CASES[case]
    net, file = tmp_path / "net.py", tmp_path / "plan.json"
    net.write_text(MODEL)
    run("plan", net, "-d", spec, "--strategy", strategy, "--batch", 8, "--seq", 16, "-o", file)
    run("report", file, "-o", tmp_path / "page.html", "--no-compare")
    text = (tmp_path / "page.html").read_text()
    cells = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])["cells"]
    own = next(cell for cell in cells if cell[6])
    here = [cell for cell in cells if cell[0] == own[0]]
    assert len(here) > 6
    for _, batch, tokens, seconds, rate, full, _ in (own, here[1], here[3], here[-1]):
        said = json.loads(run("estimate", file, "--batch", batch, "--seq", tokens, "--json"))["estimate"]
        assert seconds == pytest.approx(said["latency_seconds"])
        assert rate == pytest.approx(batch * tokens / said["latency_seconds"])
        assert full == pytest.approx(max(row["peak_bytes"] / row["memory_bytes"] for row in said["devices"]))
    others = {cell[0]: cell for cell in cells if cell[0] != own[0]}
    assert bool(others) == (strategy == "balanced")
    for name in [name for name in others if case == "placed"][:4]:
        asked = (net, "-d", name.replace(" ", ""), "--strategy", strategy, "--batch", 8, "--seq", 16, "--json")
        said = json.loads(run("plan", *asked))["estimate"]
        assert others[name][3] == pytest.approx(said["latency_seconds"])


def test_a_divided_plan_with_another_batch_is_the_one_that_is_made_for_it():
    """Its replicas have their part of the new batch, which the plan alone does not say."""

    def made(size):
        inputs, workload = torch.zeros(size, 16, dtype=torch.long), Workload(batch_size=size, sequence_length=16)
        profile = autoshard.profile(Net(), inputs, workload=workload)
        plan = autoshard.plan(Net(), "2xA100-40GB", inputs=inputs, workload=workload, strategy="data-parallel")
        return plan, profile, workload

    plan, _, _ = made(64)
    other, profile, workload = made(4096)
    assert of_size(plan.batch, 4096) == replace(other.batch, proof=plan.batch.proof)
    cluster = parse_devices("2xA100-40GB")
    found = autoshard.estimate(for_size(plan, workload), profile, cluster)
    assert found == autoshard.estimate(replace(other, mesh=plan.mesh), profile, cluster)
    with pytest.raises(autoshard.PlanError, match="one of 1 rows is too small"):
        for_size(plan, Workload(batch_size=1, sequence_length=16))

"""`autoshard compare`: every strategy and peer priced by the same estimate."""

import json

import pytest
from typer.testing import CliRunner

from autoshard.cli.main import app
from autoshard.cluster.parse import parse_devices
from autoshard.integrations.peer_maps import peer_maps
from tests.models import by_name
from tests.report.net import BLOCK

MODEL = (
    BLOCK
    + """
def model():
    return nn.Sequential(*[Block() for _ in range(8)])

def example_inputs(batch_size=4):
    return torch.zeros(batch_size, 64)
"""
)


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return "model.py"


def test_all_strategies_and_peers_are_priced_alike(target):
    done = CliRunner().invoke(
        app, ["compare", target, "-d", "1x700KiB,1x1500KiB", "--objective", "throughput", "--json"]
    )
    assert done.exit_code == 0, done.output
    data = json.loads(done.stdout)
    rows = {row["name"]: row for row in data["strategies"]}
    assert {"sequential", "balanced", "column-parallel", "pipeline", "data-parallel"} <= set(rows)
    assert all(row["possible"] or row["refused"] for row in rows.values())
    best = min((row for row in rows.values() if row["possible"] and row["usable_now"]), key=lambda row: row["value"])
    assert rows[data["chosen"]]["value"] == pytest.approx(best["value"], rel=1e-8)
    assert data["lower_bound"] <= best["value"] * (1 + 1e-9)
    theirs = {row["name"]: row for row in data["others"]}
    assert theirs["Accelerate balanced"]["bottleneck_seconds"] >= rows["balanced"]["bottleneck_seconds"]


def test_what_spills_is_said():
    case = by_name("llama")
    tight, roomy = (
        {one.name: one for one in peer_maps(case.model(), parse_devices({"cuda:0": size, "cuda:1": size}))}
        for size in ("50KB", "1GiB")
    )
    assert all(one.refused and not one.device_map for one in tight.values())
    assert set(roomy["Accelerate balanced"].device_map.values()) == {"cuda:0", "cuda:1"}


def test_a_model_without_parameters_is_compared(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("import torch\nmodel, example_inputs = torch.nn.Identity(), torch.zeros(2, 3)\n")
    done = CliRunner().invoke(app, ["compare", str(file), "-d", "2x1MiB", "--json"])
    assert done.exit_code == 0, done.output
    assert all("placements are empty" in row["refused"] for row in json.loads(done.stdout)["others"])

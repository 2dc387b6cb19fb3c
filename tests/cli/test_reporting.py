"""`report` and `trace` as commands: files that appear whole, plans that know their model, errors that help."""

import json

import pytest
from typer.testing import CliRunner

from autoshard.cli.main import app

MODEL = """
import torch
from torch import nn

model = lambda: nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
example_inputs = torch.zeros(2, 64)
"""


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def net(tmp_path):
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path / "net.py"


def test_a_plan_file_knows_its_model(net, tmp_path):
    plan, trace, page = tmp_path / "plan.json", tmp_path / "trace.json", tmp_path / "page.html"
    assert run("plan", net, "-d", "cpu=1GiB", "-o", plan).exit_code == 0
    done = run("trace", plan, "-o", trace, "--measure")
    assert done.exit_code == 0, done.output
    processes = [row["args"]["name"] for row in json.loads(trace.read_text())["traceEvents"]
                 if row["name"] == "process_name"]  # fmt: skip
    assert processes == ["host0, predicted", "host0, measured"]
    done = run("report", plan, "-o", page, "--no-compare")
    assert done.exit_code == 0, done.output
    assert page.read_text().endswith("</html>") and 'id="whatif"' not in page.read_text()  # of one size


def test_a_device_map_needs_the_model_named(net, tmp_path):
    maps = tmp_path / "map.json"
    maps.write_text(json.dumps({str(i): "cuda:0" if i < 3 else "cuda:1" for i in range(6)}))
    done = run("report", maps)
    assert done.exit_code == 2 and "does not say which model" in done.output
    done = run("trace", maps, net, "-o", tmp_path / "trace.json")
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(("--strategy", "no"), "no"), (("-o", "no/such/folder/page.html"), "Choose a folder that exists")],
)
def test_what_makes_no_sense_is_refused(net, arguments, words):
    done = run("report", net, "-d", "2xT4", "--no-compare", "--no-what-if", *arguments)
    assert done.exit_code == 2 and words in " ".join(done.output.split())

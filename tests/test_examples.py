"""Every example runs to its end and says that the split model equals the unsplit one."""

import os
import runpy
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from autoshard.cli.main import app
from tests.scripts import ROOT, run_script

EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "model.py")
# What each prints if it is right; they assert it themselves too.
SAYS = {
    "column_parallel.py": "24 tokens of 2 sequences equal: True",
    "ddp.py": "autoshard: weights equal to those of one process",
    "generate.py": "24 tokens of 2 sequences equal: True",
    "plan_llama_405b.py": "one forward:",
    "resnet_pipeline.py": "by autoshard: equal to the whole batch on one device",
    "restart.py": "not interrupted, bit for bit: True",
    "toy_two_layers.py": "5 AdamW steps equal, bit for bit: True",
}


def run(*command: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a command of this Python from the root of the project, with one thread."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "120", **variables}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=ROOT)


# What runs without a launcher, in processes of its own, with the slow tests.
ALONE = ("ddp.py", "restart.py", "column_parallel.py")
LARGE = "plan_llama_405b.py"


@pytest.mark.parametrize("layers", [8, pytest.param(126, marks=pytest.mark.slow)])
def test_large_example(layers, monkeypatch, capsys):
    """By default with few layers, which have room everywhere."""
    transformers = pytest.importorskip("transformers")
    read = transformers.AutoConfig.from_pretrained
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", lambda path: read(path, num_hidden_layers=layers))
    monkeypatch.setattr(sys, "argv", [LARGE, *(["8xH200"] if layers == 8 else [])])
    runpy.run_path(str(ROOT / "examples" / LARGE), run_name="__main__")
    said = capsys.readouterr().out
    assert SAYS[LARGE] in said and (layers == 8 or ("does not fit" in said and "per forward" in said)), said


# All but those that take long in processes of their own, with the slow ones.
QUICK = [path for path in EXAMPLES if path.name not in (*ALONE, LARGE)]


@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.name)
def test_example(path):
    done = run_script(str(path))
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[path.name] in done.stdout, done.stdout


UNDER_TORCHRUN = ("column_parallel.py", "ddp.py")
LAUNCHER = ("-m", "autoshard", "run", "--processes", "2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "launcher"), [*((name, LAUNCHER) for name in UNDER_TORCHRUN), *((name, ()) for name in ALONE)]
)
def test_example_in_processes_of_its_own(name, launcher):
    done = run(*launcher, f"examples/{name}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[name] in done.stdout, done.stdout


def test_embedded_example_is_verified():
    done = CliRunner().invoke(app, ["verify", f"{ROOT}/examples/model.py:small", "--devices", "1x24MiB,2x16MiB"])
    assert done.exit_code == 0, done.output

"""Every example runs to its end and says that the split model equals the unsplit one."""

import json
import os
import shutil
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


# In the default tests a copy of these plans fewer layers for these devices; the whole runs with the slow ones.
SHORTER = {"plan_llama_405b.py": ("8xH200",)}
# What runs without a launcher, in processes of its own, with the slow tests.
ALONE = ("ddp.py", "restart.py", "column_parallel.py")


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORTER)
def test_whole_example(name):
    done = run(f"examples/{name}")
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[name] in done.stdout and "no recipe fits" in done.stdout and "per forward" in done.stdout, done.stdout


# All but those that take long in processes of their own, with the slow ones.
QUICK = [path for path in EXAMPLES if path.name not in ALONE]


def with_few_layers(path, folder):
    """Copy an example with the configuration beside it, of which all is as it was but the number of layers."""
    config = json.loads((path.parent / "llama-3.1-405b" / "config.json").read_text())
    (folder / "llama-3.1-405b").mkdir()
    (folder / "llama-3.1-405b" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 16}))
    return shutil.copy(path, folder)


@pytest.mark.parametrize("path", QUICK, ids=lambda path: path.name)
def test_example(path, tmp_path):
    example = with_few_layers(path, tmp_path) if path.name in SHORTER else path
    done = run_script(str(example), *SHORTER.get(path.name, ()))
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

"""`autoshard doctor` and `autoshard run`: real processes, as a user starts them."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from autoshard.cli.machine import launch_of, processes_of
from autoshard.cli.main import app
from autoshard.errors import PlanError, SpecError
from autoshard.plan import PLAN_VARIABLE, Mesh, Plan, PlanDevice
from autoshard.plan.workload import Workload
from autoshard.report import doctor
from autoshard.report.doctor import Finding, _talk
from tests.scripts import run_script

SCRIPT = """
import os, sys

def say(*words):  # in one write: processes share the pipe
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

say("rank", os.environ.get("RANK", "alone"), "of", os.environ.get("WORLD_SIZE", 1), "got", *sys.argv[1:])
if sys.argv[1:] == ["plan"] and os.environ["RANK"] == "1":
    say(os.environ["AUTOSHARD_PLAN"])
sys.exit(int(os.environ.get("FAIL", 0)))
"""


def plan_for(count, hosts=1, **settings):
    devices = tuple(
        PlanDevice(name=f"cpu:{i}", memory_bytes=1 << 30, host=f"host{i * hosts // count}") for i in range(count)
    )
    return Plan(
        strategy="balanced", objective="latency", workload=Workload(), devices=devices, placements={"": "cpu:0"},
        **settings,
    )  # fmt: skip


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_script_runs_plainly_and_its_status_comes_back(script, tmp_path):
    command = tmp_path / "command.py"
    command.write_text("import os, autoshard_command\nos.environ['FAIL'] = '3'\nautoshard_command.run()\n")
    done = run_script(command, "run", script, "--plan", "x")
    assert done.returncode == 3
    assert done.stdout == "rank alone of 1 got --plan x\n"


def test_a_plan_decides_how_many_processes_run(script, tmp_path):
    plan_for(2, mesh=Mesh(dp=2)).save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "autoshard", "run", "--plan", str(tmp_path / "plan.json"), str(script), "plan"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = sorted(done.stdout.splitlines())
    assert lines == [str(tmp_path / "plan.json"), "rank 0 of 2 got plan", "rank 1 of 2 got plan"]


def test_the_command_for_several_machines(script, tmp_path):
    plan_for(4, hosts=2, mesh=Mesh(pp=4)).save(tmp_path / "plan.json")
    with pytest.raises(SpecError, match="--node-rank 0 to 1"):
        launch_of(script, [], plan_file=tmp_path / "plan.json")
    launch = launch_of(script, ["a"], plan_file=tmp_path / "plan.json", node_rank=1, rendezvous="first:29500")
    assert "--nnodes=2" in launch.command and "--nproc-per-node=2" in launch.command
    assert "--rdzv-endpoint=first:29500" in launch.command and launch.command[-1] == "a"
    assert launch.environment[PLAN_VARIABLE] == str(tmp_path / "plan.json")


def test_what_makes_no_sense_is_refused(script, tmp_path, monkeypatch):
    plan_for(2, mesh=Mesh(dp=2)).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="for 2 processes"):
        launch_of(script, [], plan_file=tmp_path / "plan.json", processes=3)
    with pytest.raises(SpecError, match="no file"):
        launch_of(tmp_path / "none.py", [])
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    with pytest.raises(PlanError, match="no plan was given"):
        Plan.load()
    monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
    assert Plan.load() == Plan.load(tmp_path / "plan.json")
    assert processes_of(plan_for(3)) == 1


def test_doctor_finds_something_for_every_check():
    done = CliRunner().invoke(app, ["doctor", "--json"])
    found = {row["check"]: row for row in json.loads(done.stdout)}
    assert {"python", "torch", "memory", "threads", "gloo"} <= set(found)
    assert done.exit_code == any(row["status"] == "bad" for row in found.values())
    assert all(row["fix"] for row in found.values() if row["status"] == "bad")
    assert found["gloo"]["status"] == "good"


def test_doctor_says_why_processes_cannot_talk(monkeypatch):
    monkeypatch.setattr(doctor, "_TALK", "import sys; raise ValueError(f'no backend {sys.argv[1]}')")
    found = _talk("nothing")
    assert isinstance(found, Finding) and found.status == "bad"
    assert found.found == "two processes can't talk: ValueError: no backend nothing"

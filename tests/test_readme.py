"""The README is true: its Python blocks run, in order, and its commands exist."""

import pathlib
import re

from tests.documents import blocks, broken_links, check_commands, run_python

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_python(README) >= 5


def test_commands_exist():
    assert check_commands(README.read_text()) >= 5


def test_links_lead_somewhere():
    assert broken_links(README) == []


def test_two_commands_set_up_and_ci_runs_them():
    """`.ci/run` takes every line of a shell block that installs, as it stands; the oldest torch is pyproject's."""
    lines = [line for block in blocks(README.read_text(), "sh") for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("pip install -e ")]
    assert len(commands) == 2 and "autoshard plan" in commands[0] and "pytest" in commands[1]
    assert not any(command.endswith("\\") for command in commands)
    script = (ROOT / ".ci" / "run").read_text()
    assert "grep '^pip install -e '" in script
    oldest = re.search(r'"torch>=(.*)"', (ROOT / "pyproject.toml").read_text()).group(1)
    assert f'oldest="{oldest}.' in script

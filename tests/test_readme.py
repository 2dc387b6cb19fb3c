"""README.md is true: its Python runs and prints what it shows, its picture is a command's output, commands exist."""

import html
import importlib.util
import pathlib
import re

from typer.testing import CliRunner

from autoshard.cli.main import app
from tests.documents import blocks, run_python

ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def test_python_runs_and_prints_what_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run_python(README) == 1
    assert capsys.readouterr().out == blocks(README.read_text(), "text")[0]


def test_the_picture_is_what_the_command_prints():
    specification = importlib.util.spec_from_file_location("terminal", ROOT / "docs" / "figures" / "terminal.py")
    terminal = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(terminal)
    shown = re.findall(r"<text [^>]*>(.*?)</text>", terminal.PICTURE.read_text())
    shown = "".join(html.unescape(piece) for piece in shown)
    size = {"COLUMNS": str(terminal.WIDTH), "LINES": "60"}
    printed = CliRunner().invoke(app, terminal.COMMAND.split()[1:], env=size).stdout
    hint = "the picture is old: python docs/figures/terminal.py"
    assert _letters(f"$ {terminal.COMMAND}{printed}") in _letters(shown), hint
    assert terminal.COMMAND in blocks(README.read_text(), "sh")[0]


def _letters(text: str) -> str:
    """Without spaces, which a picture has elsewhere."""
    return re.sub(r"\s", "", text)


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150


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

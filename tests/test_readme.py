"""The README is true: its Python blocks run, in order, and its commands exist."""

import pathlib

from tests.documents import broken_links, check_commands, run_python

README = pathlib.Path(__file__).parents[1] / "README.md"


def test_python_blocks_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_python(README) >= 5


def test_commands_exist():
    assert check_commands(README.read_text()) >= 5


def test_links_lead_somewhere():
    assert broken_links(README) == []

"""The documentation is true: its Python runs, its commands and links exist. `.ci/run` builds it."""

import pathlib
import re
import runpy

import pytest

from tests.documents import blocks, broken_links, check_commands, run_python

ROOT = pathlib.Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
README = ROOT / "README.md"


def names(path: pathlib.Path) -> str:
    return path.name if path == README else str(path.relative_to(ROOT / "docs"))


@pytest.mark.parametrize("path", [page for page in PAGES if blocks(page.read_text(), "python")], ids=names)
def test_python_blocks_run(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_python(path)


@pytest.mark.parametrize("path", [README, *PAGES], ids=names)
def test_commands_and_links_exist(path):
    used = check_commands(path.read_text().replace("pip install -e . && ", ""))
    assert used or path != README
    assert broken_links(path) == []


def test_messages_are_those_of_the_package():
    said = re.findall(r"^\*\*(.+?)\*\*(?: · \*\*(.+?)\*\*)?\.", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    source = "\n".join(path.read_text() for path in (ROOT / "autoshard").rglob("*.py"))
    assert len(said) > 10
    assert [message for pair in said for message in pair if message not in source] == []


def test_the_reference_of_commands_is_what_they_say():
    said = runpy.run_path(str(ROOT / "docs/commands.py"))["page"]()
    assert said == (ROOT / "docs/reference/command-line.md").read_text(), "run python docs/commands.py"
    assert "`--compile, --eager`" in said


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [names(page) for page in PAGES if f"- {names(page)}\n" not in menu] == []

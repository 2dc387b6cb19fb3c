"""The README is true: its Python blocks run, in order, and its commands exist."""

import pathlib
import re

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def test_python_blocks_run(tmp_path, monkeypatch):
    """One session: a later block may use names of an earlier one."""
    monkeypatch.chdir(tmp_path)
    found = blocks("python")
    assert len(found) >= 5
    session: dict = {"__name__": "readme"}
    for block in found:
        line = README[: README.index(block)].count("\n") + 1
        exec(compile("\n" * (line - 1) + block, "README.md", "exec"), session)


def test_commands_exist():
    """Every `autoshard <command> --option` of the README is known to the command line."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from autoshard.cli.main import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    used = [line.split("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    used = [words for words in used if words[:1] == ["autoshard"]]
    assert used
    for words in used:
        assert words[1] in commands, words
        shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, f"{option} is no option of {words[1]}"

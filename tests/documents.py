"""Code blocks of Markdown files: Python ones are run, commands are looked up."""

import re
from pathlib import Path


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language; `python notest` is not `python`."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.M | re.S)


def run_python(path: Path) -> int:
    """Run the Python blocks of a file in one session: later ones know names of earlier ones. Returns how many."""
    text = path.read_text()
    session: dict = {"__name__": "document"}
    found = blocks(text, "python")
    for block in found:
        line = text[: text.index(block)].count("\n") + 1
        exec(compile("\n" * (line - 1) + block, path.name, "exec"), session)
    return len(found)


def check_commands(text: str) -> int:
    """Every `autoshard <command> --option` is known to the command line. Returns how many there are."""
    from typer.main import get_command
    from typer.testing import CliRunner

    from autoshard.cli.main import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    used = [re.split(r"\s#", line)[0].split() for block in blocks(text, "sh") for line in block.splitlines()]
    used = [words for words in used if words[:1] == ["autoshard"]]
    for words in used:
        assert words[1] in commands, words
        shown = CliRunner().invoke(app, [words[1], "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
        for option in (word for word in words if word.startswith("--")):
            assert option in shown, f"{option} is no option of {words[1]}"
    return len(used)


def broken_links(path: Path) -> list[str]:
    """Relative links of a file that lead nowhere, and anchors that no heading has."""
    broken = []
    for target in re.findall(r"\[[^]]*\]\(([^)\s]+)\)", path.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    return broken


def _anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}

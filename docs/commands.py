"""Write docs/reference/command-line.md from the commands themselves: python docs/commands.py"""

import pathlib
from typing import Any

from typer.main import get_command

from autoshard.cli.main import app

PAGE = pathlib.Path(__file__).parent / "reference" / "command-line.md"


def page() -> str:
    """The commands, their arguments and options, in the order in which they are declared."""
    lines = [
        "# Command line",
        "",
        "Exit status: 0 done, 1 the request can't be met (the reason is printed), 2 wrong usage. `--json` prints one",
        "JSON document and nothing else on stdout. `TARGET` is a Python file (`model.py`, or `model.py:name`) with",
        "`model` and `example_inputs` in it, a Hugging Face directory, or a `config.json`. **The file is run**, with",
        "weights left unallocated.",
        "",
    ]
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        parts = [part for part in command.params if part.opts != ["--help"]]
        arguments = [_metavar(part) for part in parts if part.param_type_name == "argument"]
        usage = " ".join(["autoshard", name, *arguments, "[OPTIONS]"])
        rows = [(_shown(part), _help(part)) for part in parts]
        lines += [f"## {name}", "", (command.help or "").strip(), "", "```text", usage, "```", ""]
        lines += ["| | |", "|---|---|", *(f"| `{left}` | {_cell(right)} |" for left, right in rows if right), ""]
    return "\n".join(lines)


def _metavar(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _shown(part: Any) -> str:
    if part.param_type_name == "argument":
        return _metavar(part)
    flag = ", ".join([*part.opts, *part.secondary_opts])
    return flag if part.is_flag else f"{flag} {part.metavar or part.name.upper()}"


def _help(part: Any) -> str:
    text = getattr(part, "help", None) or ""
    default = part.default
    shown = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{text} Default: `{default}`." if shown and text else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page())

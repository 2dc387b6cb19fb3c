"""Draw docs/figures/terminal.svg, the picture of README.md, from the command itself: python docs/figures/terminal.py"""

import io
import os
import pathlib
import re
import subprocess
import sys

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

ROOT = pathlib.Path(__file__).parents[2]
PICTURE = pathlib.Path(__file__).parent / "terminal.svg"
COMMAND = "autoshard plan examples/model.py --devices 2x4GiB,1x2GiB"
WIDTH = 84


def printed() -> str:
    """What the command prints on a terminal of WIDTH columns, with its colours."""
    environment = os.environ | {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": "60"}
    environment.pop("NO_COLOR", None)
    command = [sys.executable, "-c", "import autoshard_command; autoshard_command.run()", *COMMAND.split()[1:]]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    return done.stdout


def draw(text: str) -> str:
    """The picture as SVG; fonts are the reader's own, so that nothing is fetched."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(f"\x1b[1m$ {COMMAND}\x1b[0m\n{text.rstrip()}"), soft_wrap=True)
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.S).replace("Fira Code, ", "")
    return console.export_svg(title="autoshard", code_format=template, unique_id="terminal")


if __name__ == "__main__":
    PICTURE.write_text(draw(printed()))

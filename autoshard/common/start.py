"""The first and the last moments of a command: Ctrl-C ends it with status 130, without a traceback.

torch takes two seconds to import, before any code of the command line runs; so importing the package sees to it.
"""

import os
import signal
import sys
from typing import Any

INTERRUPTED = 130
"""Exit status of what Ctrl-C ended, as shells give it."""


def end_quietly() -> None:
    """Let Ctrl-C end this process at once: nothing has been begun, or all is done."""
    signal.signal(signal.SIGINT, _exit)


def is_command() -> bool:
    """Whether this process is `autoshard …` or `python -m autoshard …`, and not a program that imports the package."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "-m":  # Python is looking for the module
        arguments = sys.orig_argv
        return "autoshard" in arguments and arguments[arguments.index("autoshard") - 1] == "-m"
    return name in ("autoshard", "autoshard.exe")


def _exit(*_: Any) -> None:
    os._exit(INTERRUPTED)

"""The first and the last moments of a command: Ctrl-C ends it with status 130, without a traceback.

torch takes two seconds to import, before any code of the command line runs; so importing the package sees to it.
"""

import atexit
import os
import signal
import sys
import threading
from typing import Any

INTERRUPTED = 130
"""Exit status of what Ctrl-C ended, as shells give it."""


def end_quietly() -> None:
    """Let Ctrl-C end this process at once: nothing has been begun, or all is done."""
    signal.signal(signal.SIGINT, _exit)


def leave(status: int) -> None:
    """End this process without taking its objects apart: a second and 120 MB after a plan of 70 billion parameters.

    What was registered for the end runs. Where other threads are still to be waited for, this does nothing.
    """
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def is_command() -> bool:
    """Whether this process is `autoshard …` or `python -m autoshard …`, and not a program that imports the package."""
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    if name == "-m":  # Python is looking for the module
        arguments = sys.orig_argv
        return "autoshard" in arguments and arguments[arguments.index("autoshard") - 1] == "-m"
    return name in ("autoshard", "autoshard.exe")


def _exit(*_: Any) -> None:
    os._exit(INTERRUPTED)

"""Which process is gone when a collective fails.

rank 3 dies  ──▶  ranks 2 and 0 find its connection closed, look who of their host has ended, leave word in the store
             ──▶  rank 1, whose neighbours then stop, finds the word and names rank 3, not them

Gloo and NCCL say that a connection broke, not whose. Processes of other machines can't be looked at: where all of one's
own are there, the word of others counts, and without one the error lists who it may have been.
"""

import os
import pathlib
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard import torch_private

GRACE_SECONDS = 2.0
"""How long an end may come after its connections broke, and word of it after that."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `host` is the same for those that can look at each other."""

    host: str
    pid: int

    def has_ended(self) -> bool:
        """Whether it has ended, also if nobody has asked for its exit status yet."""
        try:
            state = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return not _is_there(self.pid)
        return state in ("Z", "X")


def this_process() -> Process:
    """Return the process that calls, as others will see it."""
    space = "/proc/self/ns/pid"
    number = os.stat(space).st_ino if os.path.exists(space) else 0
    return Process(f"{socket.gethostname()}/{number}", os.getpid())


def find_departed(processes: Sequence[Process], group: str) -> list[int]:
    """Return the ranks that were first found to have ended, by this process or another; none if nobody knows."""
    own = this_process()
    store, key = torch_private.default_store(), f"autoshard/departed/{group}"
    deadline = time.monotonic() + GRACE_SECONDS
    while True:
        ended = [rank for rank, process in enumerate(processes) if process.host == own.host and process.has_ended()]
        word = ",".join(map(str, ended))
        try:
            if store is not None and (ended or store.check([key])):
                word = store.compare_set(key, "", word).decode()
        except RuntimeError:  # the store went with the process that kept it
            store = None
        if word:
            return [int(rank) for rank in word.split(",")]
        if time.monotonic() > deadline:
            return []
        time.sleep(_POLL_SECONDS)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True

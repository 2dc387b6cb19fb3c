"""Which process is gone when a collective fails.

rank 3 dies   ──▶  ranks 2 and 0 find its connection closed, look who of their host has ended, leave word in the store
              ──▶  rank 1, whose neighbours then stop, finds the word and names rank 3, not them
rank 3 stops  ──▶  the others wait until the timeout of their group, look who of their host is stopped, leave word
rank 3 raises and goes on  ──▶  the others wait until the timeout, and say so in the store; rank 3 does not

Gloo and NCCL say that a connection broke, not whose. Processes of other machines can't be looked at: where all of one's
own are there, the word of others counts, and without one the error lists who it may have been.
"""

import functools
import os
import pathlib
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard import torch_private

GRACE_SECONDS = 2.0
"""How long an end may come after its connections broke, and word of it after that."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Process:
    """A process; `host` is the same for those that can look at each other."""

    host: str
    pid: int

    def state(self) -> str:
        """Return "ended" (also if nobody asked for its exit status yet), "stopped" (SIGSTOP, a debugger), or ""."""
        if self.host != _own_host():
            return ""
        try:
            state = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "" if _is_there(self.pid) else "ended"
        return {"Z": "ended", "X": "ended", "T": "stopped", "t": "stopped"}.get(state, "")

    def has_ended(self) -> bool:
        """Whether it is known to have ended."""
        return self.state() == "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Ranks that others wait for in vain. `how`: they "ended", are "stopped", or "silent": they are not waiting."""

    ranks: Sequence[int]
    how: str


def this_process() -> Process:
    """Return the process that calls, as others will see it."""
    return Process(_own_host(), os.getpid())


def _own_host() -> str:
    space = "/proc/self/ns/pid"
    number = os.stat(space).st_ino if os.path.exists(space) else 0
    return f"{socket.gethostname()}/{number}"


def said_of(rank: int, gone: Gone, where: str = "in a collective") -> str:
    """What `rank` is told of ranks that are gone; `where`: in what, or when."""
    names, several = ", ".join(map(str, gone.ranks)), len(gone.ranks) > 1
    those, has = ("those processes", "have") if several else ("that process", "has")
    what, remedy = {
        "ended": (f"{those} ended", "Look at the last lines that came from there, then start all ranks again."),
        "stopped": (
            f"{those} {'are' if several else 'is'} stopped (SIGSTOP, Ctrl-Z or a debugger)",
            "End all ranks and start them again.",
        ),
        "silent": (
            f"{those} {has} not come to the same point",
            "Look at the last lines that came from there, then start all ranks again.",
        ),
    }[gone.how]
    return f"rank {rank} lost rank{'s' if several else ''} {names} {where}: {what}. {remedy}"


def find_gone(processes: Sequence[Process], group: str, rank: int | None) -> Gone | None:
    """Return the ranks that were first found to be gone, by this process or another; None if nobody knows.

    `rank`: of this process among them, which says in the store that it waits; None: the store is not asked.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    word, reachable = "", rank is not None
    while not word:
        states = [process.state() for process in processes]
        for how in ("ended", "stopped"):
            if how in states and not word:
                word = f"{how}:{','.join(str(at) for at, state in enumerate(states) if state == how)}"
        if rank is not None and reachable:
            found = _answered(functools.partial(_exchanged, group, rank, len(processes), word, deadline))
            reachable = found is not None  # else the store went with the process that kept it
            word = found or word
        if time.monotonic() > deadline:
            break
        if not word:
            time.sleep(_POLL_SECONDS)
    if not word:
        return None
    how, _, ranks = word.partition(":")
    return Gone(ranks=[int(one) for one in ranks.split(",")], how=how)


def _exchanged(group: str, rank: int, size: int, word: str, deadline: float) -> str:
    """Leave word in the store, and return what was left there first."""
    store, key = torch_private.default_store(), f"autoshard/departed/{group}"
    if store is None:
        return word
    store.set(f"{key}/{rank}", "waits")
    if not word and time.monotonic() > deadline:
        silent = [other for other in range(size) if not store.check([f"{key}/{other}"])]
        word = f"silent:{','.join(map(str, silent))}" if silent else ""
    return store.compare_set(key, "", word).decode() if word or store.check([key]) else ""


def _answered(ask: Callable[[], str]) -> str | None:
    """What the store says; None if it does not within the grace: its process may be the one that is stopped."""
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(ask())
        except RuntimeError:
            said.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS)
    return said[0] if said else None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True

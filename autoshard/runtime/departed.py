"""Which process is gone when a collective fails.

rank 3 dies   ──▶  ranks 2 and 0 find its connection closed, look who of their host has ended, leave word in the store
              ──▶  rank 1, whose neighbours then stop, finds the word and names rank 3, not them
rank 3 stops  ──▶  the others wait until the timeout of their group, look who of their host is stopped, leave word
rank 3 raises and goes on  ──▶  the others wait until the timeout, and say so in the store; rank 3 does not

Gloo and NCCL say that a connection broke, not whose. Processes of other machines can't be looked at: where all of one's
own are there, the word of others counts, and without one the error lists who it may have been. Ranks are those of all
processes, whatever group was in a collective: the one who is gone may be in another.
"""

import functools
import os
import pathlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gone:
    """Ranks that others wait for in vain. `how`: they "ended", are "stopped", or "silent": they are not waiting."""

    ranks: Sequence[int]
    how: str


@dataclass(slots=True, eq=False)
class Peers:
    """What the processes of a run know of each other. `processes`: by rank, as far as they have met.

    `token`: is in the keys of what they tell each other of this run, the same on all of them.
    """

    processes: dict[int, Process] = field(default_factory=dict)
    token: str = ""


_peers: "weakref.WeakKeyDictionary[Any, Peers]" = weakref.WeakKeyDictionary()


def peers_of(world: Any) -> Peers:
    """What is known of the processes of the default group, for as long as it is there."""
    return _peers.setdefault(world, Peers())


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


def find_gone(peers: Peers, members: Sequence[int], own: int, use_store: bool = True, wait: bool = True) -> Gone | None:
    """Return the ranks that were first found to be gone, by this process or another; None if nobody knows.

    `members`: of the group in whose collective it was found; the others are looked at, too, since one who waits for a
    member may be the reason. `own`: the rank of this process, which says in the store that it waits. `wait`: look for
    some time, as an end may be seen a moment after its connections broke.
    """
    deadline = time.monotonic() + GRACE_SECONDS
    gone: Gone | None = None
    while gone is None:
        gone = _seen(peers, members)
        if use_store:
            late = time.monotonic() > deadline
            try:
                word = answered(functools.partial(_exchanged, peers, members, own, gone, late))
            except RuntimeError:
                word = None
            use_store = word is not None  # else the store went with the process that kept it
            gone = read_gone(word or "") or gone
        if time.monotonic() > deadline or not wait:
            break
        if gone is None:
            time.sleep(_POLL_SECONDS)
    return gone


def _seen(peers: Peers, members: Sequence[int]) -> Gone | None:
    """The processes of this host that are not running any more: members of the group, or else others."""
    states = {rank: process.state() for rank, process in sorted(peers.processes.items())}
    for among in (members, list(states)):
        for how in ("ended", "stopped"):
            ranks = [rank for rank in among if states.get(rank) == how]
            if ranks:
                return Gone(ranks=ranks, how=how)
    return None


def _exchanged(peers: Peers, members: Sequence[int], own: int, gone: Gone | None, late: bool) -> str:
    """Leave word in the store, and return what was left there first."""
    store, key = torch_private.default_store(), f"autoshard/departed/{peers.token}"
    word = "" if gone is None else word_of(gone)
    if store is None:
        return word
    store.set(f"{key}/{own}", "waits")
    if not word and late:
        for among in (members, sorted(peers.processes)):
            silent = [rank for rank in among if not store.check([f"{key}/{rank}"])]
            if silent and not word:
                word = word_of(Gone(ranks=silent, how="silent"))
    return store.compare_set(key, "", word).decode() if word or store.check([key]) else ""


def word_of(gone: Gone) -> str:
    """What is left in the store of ranks that are gone; see `read_gone`."""
    return f"{gone.how}:{','.join(map(str, gone.ranks))}"


def read_gone(word: str) -> Gone | None:
    """Undo `word_of`; None for an empty word."""
    how, _, ranks = word.partition(":")
    return Gone(ranks=[int(one) for one in ranks.split(",")], how=how) if ranks else None


def answered(ask: Callable[[], Any]) -> Any:
    """What the store says; None if it does not within the grace: its process may be the one that is stopped.

    Raises RuntimeError if the store is gone.
    """
    said: list[Any] = []

    def run() -> None:
        try:
            said.append(ask())
        except RuntimeError as error:
            said.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS)
    if said and isinstance(said[0], RuntimeError):
        raise said[0]
    return said[0] if said else None


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True

"""Which processes are not there when a collective fails: those that leave no word in the store that they wait, too.

rank 3 ends, is stopped, or goes on elsewhere  ──▶  a connection breaks, or the others wait until the timeout
                                               ──▶  each leaves word, and names those that have left none

Gloo and NCCL say that a connection broke, not whose. Ranks are those of all processes: the one who is gone may be in
another group than that of the collective.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from autoshard import torch_private

GRACE_SECONDS = 2.0
"""How long word of others may come after a collective has failed."""
_POLL_SECONDS = 0.05


def said_of(rank: int, gone: Sequence[int], where: str = "in a collective") -> str:
    """What `rank` is told of ranks that are gone; `where`: in what, or when."""
    several = len(gone) > 1
    what = "those processes ended, are stopped, or have" if several else "that process ended, is stopped, or has"
    return (
        f"rank {rank} lost rank{'s' if several else ''} {', '.join(map(str, gone))} {where}: {what} not come to the "
        "same point. Look at the last lines that came from there, then start all ranks again."
    )


def find_gone(members: Sequence[int], own: int) -> list[int]:
    """Return the ranks that leave no word that they wait, too; [] if there is no store, or it is gone as well.

    `members`: of the group whose collective failed; where all of these wait, one of them waits for another process.
    """
    store, deadline = torch_private.default_store(), time.monotonic() + GRACE_SECONDS

    def silent() -> list[int]:
        store.set(f"autoshard/waits/{own}", "")
        return [rank for rank in range(dist.get_world_size()) if not store.check([f"autoshard/waits/{rank}"])]

    found: list[int] = []
    while store is not None:
        try:
            found = answered(silent) or []
        except RuntimeError:
            return []
        if not found or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    return [rank for rank in found if rank in members] or found


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

"""Where processes meet before a collective: in the store that torch.distributed was started with.

    ranks 0, 1, 2   each puts a word into the store  ──▶  each reads those of all, and decides alike

No device takes part, so processes can meet before each has chosen its own. Who does not come within the timeout of the
store, that of `init_process_group`, is named; a collective would only say that it waited.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from autoshard import torch_private
from autoshard.errors import RankError
from autoshard.runtime.collectives import ProcessRanks, lost
from autoshard.runtime.departed import Gone, Process, answered, find_gone, said_of, this_process

_FIRST_PAUSE, _LONGEST_PAUSE, _LOOK_SECONDS = 0.0005, 0.05, 0.5
_meetings: dict[str, int] = {}
"""Name of a group -> meetings of it that this process was at. It goes on after the group is destroyed: keys stay."""


def meet(ranks: ProcessRanks, word: bytes, failed: bool) -> dict[int, bytes]:
    """Return the words of all ranks of a group, by rank; where one `failed`, of those that have come; all call it.

    Raises `RankError` with the ranks that are missing.
    """
    store = torch_private.default_store()
    if store is None:
        raise RankError(
            "these processes have no store to meet in. Start them with torchrun and the gloo or NCCL backend."
        )
    number = _meetings[ranks.name] = _meetings.get(ranks.name, 0) + 1
    begin = f"autoshard/{ranks.name}/{number}/"
    try:
        answered(partial(_come, store, ranks, begin, word, failed))
        words = _wait(store, ranks, begin)
    except RuntimeError as error:  # the store is gone, with the process that keeps it
        raise lost(ranks, error) from error
    if ranks.rank == 0 and len(words) == ranks.size and number > 1:  # everybody has left the one before
        answered(lambda: [store.delete_key(f"autoshard/{ranks.name}/{number - 1}/{one}") for one in range(ranks.size)])
    return words


def _come(store: Any, ranks: ProcessRanks, begin: str, word: bytes, failed: bool) -> None:
    """Leave a word, and which process this is."""
    own = this_process()
    store.set(f"autoshard/process/{ranks.members[ranks.rank]}", f"{own.pid} {own.host}")
    store.set(f"{begin}{ranks.rank}", word)
    if failed:
        store.set(f"{begin}failed", b"1")


def _wait(store: Any, ranks: ProcessRanks, begin: str) -> dict[int, bytes]:
    """Wait for the words of the others. Raises `RankError`, and RuntimeError if the store is gone."""
    own, keys = ranks.members[ranks.rank], [f"{begin}{rank}" for rank in range(ranks.size)]
    seconds = max(1.0, timedelta.total_seconds(store.timeout))
    started = looked = time.monotonic()
    pause = _FIRST_PAUSE
    while True:
        words = answered(partial(_words, store, keys, f"{begin}failed"))
        if words:
            return words
        now = time.monotonic()
        late = now > started + seconds
        if late or words is None or now > looked + _LOOK_SECONDS:
            looked = now
            missing = answered(partial(_missing, store, ranks, keys)) or ranks.members
            gone = find_gone(ranks.peers, missing, own, use_store=False, wait=False)
            if late or (gone is not None and gone.how == "ended"):
                where = f"in {seconds:.0f} s" if late else "before all ranks had agreed"
                raise RankError(said_of(own, gone or Gone(ranks=missing, how="silent"), where))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)


def _words(store: Any, keys: Sequence[str], failed: str) -> dict[int, bytes]:
    """The words, if all are there or one has failed; else none."""
    if store.check(list(keys)):
        return dict(enumerate(store.multi_get(list(keys))))
    if not store.check([failed]):
        return {}
    return {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}


def _missing(store: Any, ranks: ProcessRanks, keys: Sequence[str]) -> list[int]:
    """Who has not come, by the ranks of all processes; notes which processes they are, where they ever met others."""
    found = []
    for rank, key in zip(ranks.members, keys, strict=True):
        if not store.check([key]):
            found.append(rank)
            process = f"autoshard/process/{rank}"
            if rank not in ranks.peers.processes and store.check([process]):
                pid, _, host = store.get(process).decode().partition(" ")
                ranks.peers.processes[rank] = Process(host, int(pid))
    return found

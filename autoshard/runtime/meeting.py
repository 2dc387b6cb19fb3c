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
from autoshard.runtime.departed import answered, said_of

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05
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
    """Leave a word."""
    store.set(f"{begin}{ranks.rank}", word)
    if failed:
        store.set(f"{begin}failed", b"1")


def _wait(store: Any, ranks: ProcessRanks, begin: str) -> dict[int, bytes]:
    """Wait for the words of the others. Raises `RankError`, and RuntimeError if the store is gone."""
    own, keys = ranks.members[ranks.rank], [f"{begin}{rank}" for rank in range(ranks.size)]
    seconds = max(1.0, timedelta.total_seconds(store.timeout))
    deadline, pause = time.monotonic() + seconds, _FIRST_PAUSE
    while not (words := answered(partial(_words, store, keys, f"{begin}failed"))):
        if time.monotonic() > deadline:
            there = answered(lambda: [store.check([key]) for key in keys]) or [rank == own for rank in ranks.members]
            missing = [rank for rank, came in zip(ranks.members, there, strict=True) if not came]
            raise RankError(said_of(own, missing or ranks.members, f"in {seconds:.0f} s"))
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return words


def _words(store: Any, keys: Sequence[str], failed: str) -> dict[int, bytes]:
    """The words, if all are there or one has failed; else none."""
    if store.check(list(keys)):
        return dict(enumerate(store.multi_get(list(keys))))
    if not store.check([failed]):
        return {}
    return {rank: store.get(key) for rank, key in enumerate(keys) if store.check([key])}

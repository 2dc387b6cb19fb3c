"""Where processes meet before a collective: in the store that torch.distributed was started with.

    ranks 0, 1, 2   each puts a word into the store  ──▶  rank 0 reads them and decides  ──▶  a verdict for all

No device takes part, so processes can meet before each has chosen its own. Who does not come within the timeout of the
store, that of `init_process_group`, is named; a collective would only say that it waited.
"""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from autoshard import torch_private
from autoshard.errors import RankError
from autoshard.runtime.departed import Gone, Process, find_gone, said_of

Decide = Callable[[dict[int, bytes]], bytes | None]
"""What rank 0 makes of the words that are there, by rank; None: more are needed."""

_FIRST_PAUSE, _LONGEST_PAUSE, _LOOK_SECONDS = 0.0005, 0.05, 0.5
_VERDICT_GRACE_SECONDS = 2.0
_meetings: dict[str, int] = {}
"""Name of a group -> meetings of it that this process was at. It goes on after the group is destroyed: keys stay."""


def meet(group: str, rank: int, size: int, word: bytes, decide: Decide, known: Sequence[Process] = ()) -> bytes:
    """Return the verdict of rank 0 on the words of all ranks of a group; all of them call it.

    `known`: the processes by rank, where they have met before. Raises `RankError` with the ranks that are missing.
    """
    store = torch_private.default_store()
    if store is None:
        raise RankError(
            "these processes have no store to meet in. Start them with torchrun and the gloo or NCCL backend."
        )
    number = _meetings[group] = _meetings.get(group, 0) + 1
    here = _Meeting(store, f"autoshard/{group}/{number}", rank, size, known)
    try:
        store.set(here.key(rank), word)
        verdict = here.decide(decide) if rank == 0 else here.wait()
    except RuntimeError as error:  # the store is gone, or does not answer
        raise here.lost(error) from error
    if rank == 0 and len(here.words) == size and number > 1:  # everybody has left the meeting before this one
        here.forget(f"autoshard/{group}/{number - 1}")
    return verdict


class _Meeting:
    """One meeting as one rank sees it. `words`: those that rank 0 has read."""

    def __init__(self, store: Any, name: str, rank: int, size: int, known: Sequence[Process]) -> None:
        self.store, self.name, self.rank, self.size, self.known = store, name, rank, size, known
        self.words: dict[int, bytes] = {}
        self.seconds = max(1.0, timedelta.total_seconds(store.timeout))
        self.begin = self.looked = time.monotonic()

    def key(self, who: int | str) -> str:
        return f"{self.name}/{who}"

    def decide(self, decide: Decide) -> bytes:
        """Read words as they come, until there is a verdict."""
        for _ in self._turns(0.0):
            for other in range(self.size):
                if other not in self.words and self.store.check([self.key(other)]):
                    self.words[other] = self.store.get(self.key(other))
            verdict = decide(self.words)
            if verdict is not None:
                self.store.set(self.key("verdict"), verdict)
                return verdict
        raise self._missing()

    def wait(self) -> bytes:
        """Wait for the verdict of rank 0."""
        for _ in self._turns(_VERDICT_GRACE_SECONDS):
            if self.store.check([self.key("verdict")]):
                return self.store.get(self.key("verdict"))
        raise self._missing()

    def _turns(self, grace: float) -> Any:
        """Yield until the time is over, with pauses. Raises `RankError` once a process has ended."""
        pause = _FIRST_PAUSE
        while True:
            ended = self._ended()
            yield
            if ended:  # it was gone before we looked for its word, or for the verdict
                raise RankError(said_of(self.rank, Gone(ranks=ended, how="ended"), "before all ranks had agreed"))
            if time.monotonic() > self.begin + self.seconds + grace:
                return
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _ended(self) -> list[int]:
        """The ranks whose processes ended without a word, looked for now and then."""
        now = time.monotonic()
        if now < self.looked + _LOOK_SECONDS:
            return []
        self.looked = now
        gone = [rank for rank, process in enumerate(self.known) if process.has_ended()]
        if self.rank == 0:
            return [rank for rank in gone if rank not in self.words]
        return [rank for rank in gone if rank == 0 or not self.store.check([self.key(rank)])]

    def _missing(self) -> RankError:
        there = self.words if self.rank == 0 else ()
        missing = [
            rank for rank in range(self.size) if rank not in there and not self.store.check([self.key(rank)])
        ] or [0]  # all are there, and rank 0 has not said so
        stopped = [rank for rank in missing if rank < len(self.known) and self.known[rank].state() == "stopped"]
        gone = Gone(ranks=stopped or missing, how="stopped" if stopped else "silent")
        return RankError(said_of(self.rank, gone, f"in {self.seconds:.0f} s"))

    def lost(self, error: RuntimeError) -> RankError:
        gone = find_gone(self.known, self.name, None)
        if gone is not None:
            return RankError(said_of(self.rank, gone, "before all ranks had agreed"))
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return RankError(
            f"rank {self.rank} lost the process that keeps the store of torch.distributed, mostly rank 0: it ended, or "
            f"does not answer ({reason}). Look at the first error among the ranks, then start them all again."
        )

    def forget(self, name: str) -> None:
        """Take an earlier meeting out of the store."""
        for who in (*range(self.size), "verdict"):
            self.store.delete_key(f"{name}/{who}")

"""Where processes meet before a collective: in the store that torch.distributed was started with.

    ranks 0, 1, 2   each puts a word into the store  ──▶  each reads those of all, and decides alike

No device takes part, so processes can meet before each has chosen its own. Who does not come within the timeout of the
store, that of `init_process_group`, is named; a collective would only say that it waited.
"""

import functools
import time
from datetime import timedelta
from typing import Any

from autoshard import torch_private
from autoshard.errors import RankError
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.departed import Gone, Process, answered, find_gone, read_gone, said_of, this_process, word_of

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
    here = _Meeting(store, ranks, number)
    try:
        answered(lambda: here.come(word, failed))
        words = here.wait()
    except RuntimeError as error:  # the store is gone
        raise here.lost(str(error)) from error
    if ranks.rank == 0 and len(words) == ranks.size and number > 1:
        answered(lambda: _Meeting(store, ranks, number - 1).forget())  # everybody has left it
    return words


class _Meeting:
    """One meeting as one rank sees it. `seconds`: how long it waits for others."""

    def __init__(self, store: Any, ranks: ProcessRanks, number: int) -> None:
        self.store, self.ranks, self.own = store, ranks, ranks.members[ranks.rank]
        self.begin = f"autoshard/{ranks.name}/{number}/"
        self.keys = [f"{self.begin}{rank}" for rank in range(ranks.size)]
        self.seconds = max(1.0, timedelta.total_seconds(store.timeout))

    def come(self, word: bytes, failed: bool) -> None:
        """Leave a word, and which process this is."""
        own = this_process()
        self.store.set(f"autoshard/process/{self.own}", f"{own.pid} {own.host}")
        self.store.set(self.keys[self.ranks.rank], word)
        if failed:
            self.store.set(f"{self.begin}failed", b"1")

    def wait(self) -> dict[int, bytes]:
        """Wait for the words of the others. Raises `RankError`, and RuntimeError if the store is gone."""
        begin = looked = time.monotonic()
        pause, ended = _FIRST_PAUSE, False
        while True:
            seen = answered(self.look)
            if isinstance(seen, dict):
                return seen
            if isinstance(seen, Gone):
                raise self.missing(seen)
            now = time.monotonic()
            late = now > begin + self.seconds
            if seen is None and late:
                raise self.lost("no answer")
            if seen is not None and (late or ended):
                said = answered(functools.partial(self.give_up, ended))
                raise self.missing(said or Gone(ranks=[self.own], how="silent"))
            if now > looked + _LOOK_SECONDS:
                looked = now
                gone = find_gone(self.ranks.peers, self.ranks.members, self.own, use_store=False, wait=False)
                ended = seen is not None and bool(answered(lambda: "ended" in self.states().values()))
                if seen is None and gone is not None and gone.how == "ended":
                    raise self.lost("no answer")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def look(self) -> dict[int, bytes] | Gone | bool:
        """The words, if all are there or one has failed; who is gone, if somebody has given up; else False."""
        if self.store.check(self.keys):
            return dict(enumerate(self.store.multi_get(self.keys)))
        if self.store.check([f"{self.begin}gone"]):
            return read_gone(self.store.get(f"{self.begin}gone").decode()) or False
        if not self.store.check([f"{self.begin}failed"]):
            return False
        there = [rank for rank, key in enumerate(self.keys) if self.store.check([key])]
        return {rank: self.store.get(self.keys[rank]) for rank in there}

    def states(self) -> dict[int, str]:
        """Ranks (of all processes) that have not come -> what is known of their processes."""
        found, known = {}, self.ranks.peers.processes
        for rank, key in zip(self.ranks.members, self.keys, strict=True):
            if self.store.check([key]):
                continue
            process = f"autoshard/process/{rank}"
            if rank not in known and self.store.check([process]):  # where we have not met
                pid, _, host = self.store.get(process).decode().partition(" ")
                known[rank] = Process(host, int(pid))
            found[rank] = known[rank].state() if rank in known else ""
        return found

    def give_up(self, ended: bool) -> Gone | None:
        """Say in the store who did not come, unless somebody has said so; returns what was said first."""
        states = self.states()
        how = "ended" if ended else "stopped" if "stopped" in states.values() else "silent"
        among = [rank for rank, state in states.items() if how == "silent" or state == how]
        word = word_of(Gone(ranks=among or list(states), how=how))
        return read_gone(self.store.compare_set(f"{self.begin}gone", "", word).decode())

    def missing(self, gone: Gone) -> RankError:
        """What this rank is told of those who did not come."""
        if self.own in gone.ranks:
            return RankError(
                f"rank {self.own} came too late: the others waited {self.seconds:.0f} s for it and have stopped. Start "
                "all ranks again; a longer wait is timeout= of torch.distributed.init_process_group."
            )
        when = "before all ranks had agreed" if gone.how == "ended" else f"in {self.seconds:.0f} s"
        return RankError(said_of(self.own, gone, when))

    def lost(self, reason: str) -> RankError:
        """What this rank is told where the store is gone, or does not answer."""
        gone = find_gone(self.ranks.peers, self.ranks.members, self.own, use_store=False)
        if gone is not None:
            return RankError(said_of(self.own, gone, "before all ranks had agreed"))
        first = (reason.strip().splitlines() or ["no reason given"])[0]
        return RankError(
            f"rank {self.own} lost the process that keeps the store of torch.distributed, mostly rank 0: it ended, or "
            f"does not answer ({first}). Look at the first error among the ranks, then start them all again."
        )

    def forget(self) -> None:
        """Take this meeting out of the store."""
        for key in self.keys:
            self.store.delete_key(key)

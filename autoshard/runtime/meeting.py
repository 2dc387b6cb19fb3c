"""Where processes meet before a collective: in the store that torch.distributed was started with.

    ranks 0, 1, 2   each puts a word into the store  ──▶  the first reads them and decides  ──▶  a verdict for all

No device takes part, so processes can meet before each has chosen its own. Who does not come within the timeout of the
store, that of `init_process_group`, is named; a collective would only say that it waited. The store is asked by a
thread of its own: one whose process is stopped never answers.
"""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from autoshard import torch_private
from autoshard.errors import RankError
from autoshard.runtime.collectives import ProcessRanks
from autoshard.runtime.departed import Gone, Process, find_gone, said_of, this_process

Decide = Callable[[dict[int, bytes]], bytes | None]
"""What the first rank makes of the words that are there, by rank; None: more are needed."""

_FIRST_PAUSE, _LONGEST_PAUSE, _LOOK_SECONDS = 0.0005, 0.05, 0.5
_GRACE_SECONDS = 2.0
_meetings: dict[str, int] = {}
"""Name of a group -> meetings of it that this process was at. It goes on after the group is destroyed: keys stay."""


def meet(ranks: ProcessRanks, word: bytes, decide: Decide) -> bytes:
    """Return the verdict of the first rank on the words of all ranks of a group; all of them call it.

    Raises `RankError` with the ranks that are missing.
    """
    store = torch_private.default_store()
    if store is None:
        raise RankError(
            "these processes have no store to meet in. Start them with torchrun and the gloo or NCCL backend."
        )
    here = _Meeting(store, ranks)
    thread = threading.Thread(target=here.run, args=(word, decide), daemon=True)
    thread.start()
    here.attend(thread)
    if here.error is not None:
        raise here.lost(here.error) from here.error
    if here.gone is not None and here.own in here.gone.ranks:
        raise RankError(
            f"rank {here.own} came too late: the others waited {here.seconds:.0f} s for it and have stopped. Start all "
            "ranks again; a longer wait is timeout= of torch.distributed.init_process_group."
        )
    if here.gone is not None:
        raise RankError(said_of(here.own, here.gone, here.when()))
    assert here.verdict is not None
    return here.verdict


class _Meeting:
    """One meeting as one rank sees it. `words`: those that the first rank has read; `over`: nobody waits any more.

    `answered`: when the store did so last; `leader_came`: when the first rank is known to have come.
    """

    def __init__(self, store: Any, ranks: ProcessRanks) -> None:
        self.store, self.ranks, self.own = store, ranks, ranks.members[ranks.rank]
        self.number = _meetings[ranks.name] = _meetings.get(ranks.name, 0) + 1
        self.words: dict[int, bytes] = {}
        self.seconds = max(1.0, timedelta.total_seconds(store.timeout))
        self.verdict: bytes | None = None
        self.gone: Gone | None = None
        self.error: RuntimeError | None = None
        self.over = False
        self.answered, self.leader_came = time.monotonic(), 0.0

    def key(self, who: int | str, number: int | None = None) -> str:
        return f"autoshard/{self.ranks.name}/{number or self.number}/{who}"

    def attend(self, thread: threading.Thread) -> None:
        """Wait for the verdict; give up once the first rank is gone, or does not say anything in time.

        The first rank looks for the others, and says who is missing.
        """
        first = self.ranks.members[0]
        begin = self.answered
        while True:
            leader = self.ranks.peers.processes.get(first)
            ended = first != self.own and leader is not None and leader.has_ended()
            thread.join(_GRACE_SECONDS if ended else _LOOK_SECONDS)  # it may have said so before it ended
            if not thread.is_alive():
                return
            now = time.monotonic()
            late = now > max(begin, self.leader_came) + self.seconds + 2 * _GRACE_SECONDS
            if not ended and not late:
                continue
            self.over = True
            how = "ended" if ended else self._how([first])
            if first == self.own or (how == "silent" and now > self.answered + _GRACE_SECONDS):
                self.error = RuntimeError("no answer")
            else:
                self.gone = Gone(ranks=[first], how=how)
            return

    def run(self, word: bytes, decide: Decide) -> None:
        """Everything that asks the store."""
        try:
            own = this_process()
            self.store.set(f"autoshard/process/{self.own}", f"{own.pid} {own.host}")
            self.store.set(self.key(self.ranks.rank), word)
            if self.ranks.rank == 0:
                said = self._decided(decide)
                self.store.set(self.key("verdict"), said)
                self._read(said)
                if len(self.words) == self.ranks.size and self.number > 1:
                    self._forget(self.number - 1)  # everybody has left it
                return
            for _ in self._turns():
                if self.store.check([self.key("verdict")]):
                    self._read(self.store.get(self.key("verdict")))
                    return
                if not self.leader_came and self.store.check([self.key(0)]):
                    self.leader_came = time.monotonic()
        except RuntimeError as error:  # the store is gone, or does not answer
            self.error = error

    def _read(self, said: bytes) -> None:
        if said.startswith(_GONE):
            how, _, listed = said.removeprefix(_GONE).decode().partition(":")
            self.gone = Gone(ranks=[int(one) for one in listed.split(",")], how=how)
        else:
            self.verdict = said.removeprefix(_DECIDED)

    def _decided(self, decide: Decide) -> bytes:
        """Read words as they come, until there is a verdict, or somebody is known to be missing."""
        begin = looked = time.monotonic()
        ended: list[int] = []
        members = self.ranks.members
        for _ in self._turns():
            for other in range(self.ranks.size):
                if other not in self.words and self.store.check([self.key(other)]):
                    self.words[other] = self.store.get(self.key(other))
            verdict = decide(self.words)
            if verdict is not None:
                return _DECIDED + verdict
            missing = [members[other] for other in range(self.ranks.size) if other not in self.words]
            if ended:  # they were gone before we looked for their words
                return _said(Gone(ranks=[rank for rank in ended if rank in missing] or ended, how="ended"))
            now = time.monotonic()
            if now > begin + self.seconds:
                how = self._how(missing)
                stopped = [rank for rank in missing if self._state(rank) == how]
                return _said(Gone(ranks=stopped if how == "stopped" else missing, how=how))
            if now > looked + _LOOK_SECONDS:
                looked = now
                ended = [rank for rank in missing if self._state(rank) == "ended"]
        raise RuntimeError("no answer in time")

    def _turns(self) -> Any:
        """Yield until the meeting is over, with pauses."""
        pause = _FIRST_PAUSE
        while not self.over:
            self.answered = time.monotonic()
            yield
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _state(self, rank: int) -> str:
        """Of a process; where we have not met, it may have said in the store which one it is."""
        processes, key = self.ranks.peers.processes, f"autoshard/process/{rank}"
        if rank not in processes and self.store.check([key]):
            pid, _, host = self.store.get(key).decode().partition(" ")
            processes[rank] = Process(host, int(pid))
        return processes[rank].state() if rank in processes else ""

    def _how(self, missing: list[int]) -> str:
        """Whether some of those who are missing are stopped."""
        known = self.ranks.peers.processes
        return "stopped" if any(rank in known and known[rank].state() == "stopped" for rank in missing) else "silent"

    def when(self) -> str:
        """When somebody was lost, for messages."""
        assert self.gone is not None
        return "before all ranks had agreed" if self.gone.how == "ended" else f"in {self.seconds:.0f} s"

    def lost(self, error: RuntimeError) -> RankError:
        gone = find_gone(self.ranks.peers, self.ranks.members, self.own, use_store=False)
        if gone is not None:
            return RankError(said_of(self.own, gone, "before all ranks had agreed"))
        reason = (str(error).strip().splitlines() or ["no reason given"])[0]
        return RankError(
            f"rank {self.own} lost the process that keeps the store of torch.distributed, mostly rank 0: it ended, or "
            f"does not answer ({reason}). Look at the first error among the ranks, then start them all again."
        )

    def _forget(self, number: int) -> None:
        """Take an earlier meeting out of the store."""
        for who in (*range(self.ranks.size), "verdict"):
            self.store.delete_key(self.key(who, number))


_DECIDED, _GONE = b"decided:", b"gone:"


def _said(gone: Gone) -> bytes:
    return _GONE + f"{gone.how}:{','.join(map(str, gone.ranks))}".encode()

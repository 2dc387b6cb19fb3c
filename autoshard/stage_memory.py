"""Bytes of every stage of a pipeline for one micro-batch, by the recorded lifetimes.

    always      parameters, buffers, inputs of the whole batch; in training optimizer state
    forward     most that lives while the stage runs it
    kept        what is there between its forward and its backward: what autograd saved, and what came in
    backward    most that lives while it runs; gradients of parameters stay behind
    lasting     what is there to the end of the pass: outputs, caches

`flow` says what lives when, with every stage as a device of its own, so that several stages can share one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.capture.graph import ModelGraph
from autoshard.capture.stages import Staged
from autoshard.cluster.cluster import Device
from autoshard.flow import Buffers, Copy, Flow, flow
from autoshard.joined_backward import JoinedBackward, JoinedBytes
from autoshard.plan import Stage
from autoshard.profile.part import joined_state
from autoshard.profile.profile import Profile
from autoshard.recomputed import held_again, run_again, segments_of
from autoshard.stage_exchange import exchange
from autoshard.workload import OPTIMIZER_STATE_TENSORS


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of one stage, in the terms of the module docstring. `gradient`: of all its parameters.

    `first_backward`: the most while the first backward runs, gradients it makes included; `backward`: while a later one
    does, beside the gradients that are there already. `outputs`: the part of `lasting` that is put together once all
    forwards are done, in steps of a schedule once all backwards are, in one process; `merged`: the part of it that is
    once everything is, in several; `released`: the part of these that nothing holds then; `returned`: what then goes to
    the home of the inputs, in one process, and `leaving`: from where; `lent`: copies of parameters that go before
    backward, in steps of a schedule after it. `joined`: where one backward goes through all micro-batches.
    """

    parameter: int = 0
    buffer: int = 0
    gradient: int = 0
    optimizer: int = 0
    inputs: int = 0
    forward: int = 0
    kept: int = 0
    first_backward: int = 0
    backward: int = 0
    lasting: int = 0
    outputs: int = 0
    merged: int = 0
    released: int = 0
    returned: int = 0
    leaving: int = 0
    lent: int = 0
    joined: JoinedBytes = field(default_factory=JoinedBytes)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageRows:
    """Which rows of the flow's buffers are what on one stage, as masks over them.

    Attributes:
        device, begin: index of the stage in `Flow.devices`, and of the first op of backward.
        here: all of the stage; passing: what lives and dies within a micro-batch; gradients: of parameters.
        kept, and masks["lasting"], ["outputs"], …: as in `StageBytes`.
    """

    device: int
    begin: int
    here: np.ndarray
    passing: np.ndarray
    gradients: np.ndarray
    kept: np.ndarray
    masks: dict[str, np.ndarray]


def _copies_of(moves: Flow, wanted: Callable[[Copy], bool]) -> np.ndarray:
    """Mask over the buffers of a flow: copies of which this holds."""
    return np.isin(np.arange(len(moves.buffers.storage)), [copy.buffer for copy in moves.copies if wanted(copy)])


def _beside_outputs(graph: ModelGraph) -> set[int]:
    """Storages of what the model keeps after a forward that are neither outputs nor state of decoding."""
    others = {graph.values[value].storage for value in (*graph.outputs, *graph.state)}
    return {graph.values[value].storage for value in graph.lasting} - others


def _on_the_last(graph: ModelGraph, moves: Flow, again: np.ndarray, last: str) -> tuple[Flow, np.ndarray]:
    """Bring outputs that are on several stages to the last one, as a step does; and the mask over those made elsewhere.

    What is brought is there from the end of the part's forward to that of the step.
    """
    rows, born = moves.buffers, np.array([storage.born for storage in graph.storages] or [0])
    away = np.isin(rows.storage, [graph.values[value].storage for value in graph.outputs]) & ~rows.copied & ~again
    away &= (rows.born >= np.maximum(born[rows.storage], 1)) & (rows.born < graph.backward_begin)
    if len(set(rows.device[away].tolist())) < 2 or last not in moves.devices:
        return moves, np.zeros(len(away), bool)
    there = moves.devices.index(last)
    away &= rows.device != there
    count, end = int(away.sum()), len(graph.ops)
    added = Buffers(
        storage=rows.storage[away], device=np.full(count, there), nbytes=rows.nbytes[away],
        born=np.full(count, graph.backward_begin - 1.0), died=np.full(count, end + 1.0), copied=np.zeros(count, bool),
    )  # fmt: skip
    both = {one.name: np.concatenate([getattr(rows, one.name), getattr(added, one.name)]) for one in fields(Buffers)}
    return replace(moves, buffers=Buffers(**both)), _as_long(away, len(away) + count)


def _as_long(mask: np.ndarray, length: int) -> np.ndarray:
    """The mask with rows added that it does not hold of."""
    return np.concatenate([mask, np.zeros(length - len(mask), bool)])


class StageMemory:
    """What lives on which stage in one pass of one micro-batch.

    Attributes:
        held: parameter or buffer -> the stages that have it. One process lends those that several stages read; with
            `processes` each of these stages has its own.
        steps: a schedule takes the parts one by one: outputs stay on the last stage, and objects (caches) go when
            their part goes back: `let_go`, a mask over the rows.
        runs_again: mask of the forward ops that run a second time.

    `schedule`: of a plan; processes hold what they exchange as it says. `batch`: of a plan for one process, whose parts
    may be put together beside the outputs, too: what forwards leave on attributes, and caches.
    """

    def __init__(
        self, whole: Profile, graph: ModelGraph, stages: Sequence[Stage], staged: Staged, *, processes: bool,
        schedule: str = "gpipe", batch: BatchAxis | None = None,
    ) -> None:  # fmt: skip
        self.whole, self.graph, self.last, self.processes = whole, graph, len(stages) - 1, processes
        placements = {path: str(i) for i, stage in enumerate(stages) for path in stage.paths}
        moves = flow(graph, placements)
        self.held: dict[str, tuple[int, ...]] = {name: (int(stage),) for name, stage in moves.tensor_device.items()}
        if processes:
            self.held = dict(staged.held)
            moves, clones = exchange(graph, staged, moves, len(stages), schedule)
        segments = segments_of(graph, staged, stages, processes=processes)
        self.runs_again = segments >= 0
        moves, again = run_again(graph, moves, segments, processes=processes)
        self.steps = steps = schedule == "1f1b" and whole.workload.training and not processes
        away = np.zeros(len(again), bool)
        if steps:
            moves, away = _on_the_last(graph, moves, again, str(self.last))
            again = _as_long(again, len(away))
        rows = moves.buffers
        kinds = {"parameter": 1, "buffer": 1, "input": 2}
        kind = np.array([kinds.get(storage.kind, 0) for storage in graph.storages] or [0])[rows.storage]
        first = np.array([storage.born for storage in graph.storages] or [0])[rows.storage]
        self.is_output = np.isin(rows.storage, [graph.values[value].storage for value in graph.outputs])
        self.is_output &= (rows.born >= first) & ~again & ~away  # not what the forward before left
        state = () if batch is None or processes else joined_state(whole.graph, batch)
        caches = np.isin(rows.storage, [graph.values[value].storage for value in state]) & ~rows.copied
        if batch is not None and not processes:
            beside = caches & (not steps)
            self.is_output |= beside & (rows.born >= first) & ~again & (kind == 0)
        self.freed = np.zeros(len(kind), bool)
        if processes:
            self.is_output = clones = _as_long(clones, len(kind))
        else:  # What was brought to a module goes with what it was made of, and is an output where that returned it.
            home, left = moves.homes.homes[""], {c.value: c.source for c in moves.copies if c.reason == "output"}
            self.freed = rows.copied & ~_copies_of(moves, lambda copy: copy.value in graph.held)
            self.is_output &= ~rows.copied | _copies_of(
                moves, lambda copy: copy.value in graph.outputs and copy.destination == left.get(copy.value, home)
            )
        self.returned = np.zeros(len(kind), bool)
        self.returned[[copy.buffer for copy in moves.copies if copy.reason == "output" and copy.buffer >= 0]] = True
        sent = {graph.values[copy.value].storage for copy in moves.copies if copy.reason == "output"}
        self.leaving = self.is_output & ~rows.copied & np.isin(rows.storage, list(sent))
        self.kept_copies = np.zeros(len(kind), bool)
        self.kept_copies[[copy.buffer for copy in moves.copies if copy.kept and copy.buffer >= 0]] = True
        gradients = np.isin(rows.storage, [graph.values[value].storage for _, value in graph.gradients])
        end, begin = len(graph.ops), graph.backward_begin
        made_last = (kind == 0) & (rows.born >= begin) & (rows.born < end) & (rows.died >= end) & ~again
        self.gradients = ~rows.copied & (gradients | made_last)
        # Outputs stay where they are made until those of all micro-batches are there; what goes home is put together.
        self.passing = ((kind == 0) | rows.copied) & ~self.gradients & ~self.kept_copies & ~self.returned
        # One copy of a parameter is enough for all micro-batches; each has a view of its own, and copies that.
        lent = rows.copied & _copies_of(moves, lambda copy: graph.values[copy.value].op < 0) & (kind == 1)
        self.passing &= ~lent
        self.lent = lent & (steps | (rows.died <= begin))
        self.kept_copies = self.kept_copies & ~lent if processes else self.kept_copies | lent
        stay = self.is_output & ~rows.copied & (kind == 0) & (rows.born < begin)
        # An op on another device saves its copy.
        saved = {(graph.values[save.value].storage, moves.op_device[save.op]) for save in graph.saves}
        kept = [at in saved for at in zip(rows.storage.tolist(), rows.device.tolist(), strict=True)]
        self.unsaved = clones if processes else stay & ~np.array(kept, bool)
        died = np.where(stay, end + 1, rows.died)
        self._keep_once(rows, died)
        self.lasts = died > end
        self.let_go = steps & caches & ~again
        if (gone := self.let_go | away).any():
            died = np.where(gone, np.minimum(died, self._held_by_autograd(moves, segments)), died)
            self.lasts &= ~gone
        elif caches.any() and self.runs_again.any() and any(self._has_rows()):  # parts of what is put together
            until = np.where(caches & stay, held_again(graph, segments, rows.born), 0)
            died = np.where(until > begin, until, died)
            self.unsaved = np.where(caches & stay, until <= begin, self.unsaved)
        self.moves = replace(moves, buffers=replace(rows, died=died))
        self.joined = None if processes or begin == end else JoinedBackward(graph, self.moves)

    def _held_by_autograd(self, moves: Flow, segments: np.ndarray) -> np.ndarray:
        """Until when autograd holds each row, or what runs again in backward does; at least to where that begins."""
        graph, rows, until = self.graph, moves.buffers, dict[tuple[int, int], int]()
        for save in graph.saves:
            if not self.runs_again[save.op]:
                place = graph.values[save.value].storage, moves.op_device[save.op]  # elsewhere a copy is saved
                until[place] = max(until.get(place, 0), save.released)
        found = [until.get(place, 0) for place in zip(rows.storage.tolist(), rows.device.tolist(), strict=True)]
        again = held_again(graph, segments, rows.born) if self.runs_again.any() else 0
        return np.maximum(np.maximum(found, again), graph.backward_begin)

    def _has_rows(self) -> list[bool]:
        """For each storage whether a part has less of it than the whole batch."""
        sizes = zip(self.whole.graph.storages, self.graph.storages, strict=True)
        return [one.nbytes != part.nbytes for one, part in sizes]

    def _keep_once(self, rows: Buffers, died: np.ndarray) -> None:
        """Count what the model keeps beside its outputs (tables) once: a micro-batch finds it, or makes it anew.

        What the forward before left on an attribute is that one, until it is replaced.
        """
        graph, begin = self.graph, self.graph.backward_begin
        storages = _beside_outputs(graph) - {graph.values[save.value].storage for save in graph.saves}
        mine = np.isin(rows.storage, list(storages)) & ~rows.copied & self.passing & (rows.born < begin)
        joined = mine & np.isin(rows.storage, rows.storage[mine & self.is_output])
        self.passing &= ~joined | self.is_output  # what the call before left goes when the first part is done
        mine &= ~joined
        carried = dict(graph.carried)
        left = mine & (rows.born == 0) & np.isin(rows.storage, list(carried))
        made = mine & ~left
        for row in np.flatnonzero(made).tolist():
            died[row] = max(carried.get(int(rows.storage[row]), 0), rows.born[row])
        once = np.where(np.isin(rows.storage, rows.storage[left]), left, made)
        self.kept_copies |= once
        self.passing &= ~once

    def of(self, stage: int, device: Device, trained: Sequence[tuple[str, int]]) -> StageBytes:
        """Return the bytes of one stage, rounded as its device's allocator does."""

        def rounded(nbytes: int) -> int:
            return -(-nbytes // device.block_bytes) * device.block_bytes

        parameter, buffer = self._static(stage, rounded)
        gradient = sum(rounded(nbytes) for _, nbytes in trained)
        workload = self.whole.workload
        found = StageBytes(
            parameter=parameter,
            buffer=buffer,
            gradient=gradient,
            optimizer=gradient * OPTIMIZER_STATE_TENSORS[workload.optimizer] if workload.training else 0,
            inputs=sum(rounded(row.nbytes) for row in self.whole.graph.storages if row.kind == "input")
            if stage == self.home or self.processes else 0,
        )  # fmt: skip
        rows = self.rows_of(stage)
        if rows is None:
            return found
        name, buffers, begin = str(stage), self.moves.buffers, rows.begin
        nbytes = -(-buffers.nbytes // device.block_bytes) * device.block_bytes
        live = self.moves.timeline(name, device.block_bytes, rows.passing)
        new = self.moves.timeline(name, device.block_bytes, rows.gradients)
        made_at = np.ceil(buffers.born[rows.gradients]).astype(np.int64)
        more = np.bincount(made_at, nbytes[rows.gradients], len(new))  # of gradients that are there already
        first, later = int((live + new)[begin:].max(initial=0)), int((live + more)[begin:].max(initial=0))
        joined = JoinedBytes()
        if self.joined is not None and self.steps:
            first, later = self.joined.apart(rows.device, rows.passing, device.block_bytes)
        elif self.joined is not None:
            joined = self.joined.of(rows.device, rows.passing, device.block_bytes)
        return replace(
            found,
            parameter=parameter + int(nbytes[rows.here & self.kept_copies].sum()),
            forward=int(live[:begin].max(initial=0)),
            kept=int(nbytes[rows.kept].sum()),
            first_backward=first,
            backward=later,
            joined=joined,
            **{kind: int(nbytes[mask].sum()) for kind, mask in rows.masks.items()},
        )

    def rows_of(self, stage: int) -> StageRows | None:
        """Return which buffers of the flow are what on a stage; None for a stage that has none."""
        if str(stage) not in self.moves.devices:
            return None
        rows, end, begin = self.moves.buffers, len(self.graph.ops), self.graph.backward_begin
        index = self.moves.devices.index(str(stage))
        here = rows.device == index
        passing, nothing = here & self.passing, np.zeros_like(here)
        lasting = passing & self.lasts & ~self.freed
        if self.joined is not None and not self.steps:
            lasting &= ~self.joined.waits & ~rows.copied  # copies of inputs are those of one micro-batch
        kept = passing & (rows.born <= begin - 1) & ((rows.died - 1 >= begin) | self.let_go) if begin < end else lasting
        return StageRows(
            device=index,
            begin=begin,
            here=here,
            passing=passing,
            gradients=here & self.gradients if begin < end else nothing,
            kept=kept,
            masks={
                "lasting": lasting,
                "outputs": nothing if self.processes else lasting & self.is_output,
                "merged": lasting & self.is_output if self.processes else nothing,
                "released": lasting & self.unsaved,
                "returned": nothing if self.processes or self.steps else here & self.returned,
                "leaving": nothing if self.processes else here & self.leaving,
                "lent": nothing if self.processes else here & self.lent,
            },
        )

    def _static(self, stage: int, rounded: Callable[[int], int]) -> tuple[int, int]:
        """Bytes of the parameters and of the buffers that a stage has, tied ones once."""
        found, seen = {"parameter": 0, "buffer": 0}, set[int]()
        for tensor in self.graph.tensors:
            if stage in self.held[tensor.name] and tensor.storage not in seen:
                seen.add(tensor.storage)
                found[tensor.kind] += rounded(self.graph.storages[tensor.storage].nbytes)
        return found["parameter"], found["buffer"]

    @property
    def home(self) -> int:
        """The stage where the root of the model, and so its inputs, are."""
        return int(self.moves.homes.homes[""])

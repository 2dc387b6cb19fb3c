"""What processes of a pipeline exchange for one micro-batch, and how long they have it: as torch's engine does.

    stage 0   makes x ── sent ──▶ kept until its backward, or to the end of the step
    stage 1   receives x          before its forward begins, until its backward is done
              hands x on          where a later stage reads it: the same tensor
              receives dy         before its backward begins, until it is done
    last      clones outputs      at the end of its forward; they are put together when all parts are done

Devices of one process copy what they need when they need it, which is what `flow` says; here its rows are changed.
"""

from dataclasses import replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.capture.stages import Staged, free_storages
from autoshard.flow import Buffers, Flow

SOON = 1e-3
"""Ops run at whole times; what autograd does between two of them is nearer to the first than this."""


def values_over(staged: Staged, border: int) -> list[int]:
    """The values that go over the border after a stage, from neighbour to neighbour."""
    return [one.value for one in staged.crossings if one.source <= border < one.readers[-1]]


class _Rows:
    """Rows of a flow's buffers in the making: some die at another time, some are added."""

    def __init__(self, graph: ModelGraph, moves: Flow) -> None:
        self.graph, self.moves, self.rows = graph, moves, moves.buffers
        self.died, self.nbytes = self.rows.died.copy(), self.rows.nbytes.copy()
        self.begin, self.end = graph.backward_begin, len(graph.ops)
        self.training = self.begin < self.end
        self.added: list[tuple[int, int, int, float, float]] = []

    def device(self, stage: int) -> int:
        return self.moves.devices.index(str(stage)) if str(stage) in self.moves.devices else -1

    def add(self, value: int, stage: int, born: float, died: float) -> None:
        row = self.graph.values[value]
        if self.device(stage) >= 0:
            self.added.append((row.storage, self.device(stage), row.nbytes, born, died))

    def add_held(self, value: int, stage: int) -> None:
        """Let one tensor be there whenever the stage does something, beside those of the micro-batches in flight."""
        self.add(value, stage, 0, self.begin)
        self.add(value, stage, self.begin, self.end)

    def found(self) -> Flow:
        rows, more = self.rows, list(zip(*self.added, strict=True)) or [()] * 5
        columns = zip((rows.storage, rows.device, self.nbytes, rows.born, self.died), more, strict=True)
        storage, device, nbytes, born, died = (
            np.concatenate([column, np.array(new, column.dtype)]) for column, new in columns
        )
        copied = np.concatenate([rows.copied, np.ones(len(self.added), bool)])
        buffers = Buffers(storage=storage, device=device, nbytes=nbytes, born=born, died=died, copied=copied)
        return replace(self.moves, buffers=buffers)


def exchange(graph: ModelGraph, staged: Staged, moves: Flow, stages: int, schedule: str) -> tuple[Flow, np.ndarray]:
    """Change the flow of stages on devices of one process to that of processes; and which of its rows clone outputs."""
    made, rows = _Rows(graph, moves), moves.buffers
    kind = np.array([{"input": 1, "activation": 2}.get(one.kind, 0) for one in graph.storages] or [0])[rows.storage]
    asked = stages > 1 or (rows.copied & (kind == 2)).any()  # of one stage nothing is sent
    free = free_storages(graph) if asked else frozenset()
    own = ~np.isin(rows.storage, list(free)) | (rows.born >= made.begin)
    made.nbytes[rows.copied & ((kind == 1) | ((kind == 2) & own))] = 0  # exchanged in another way, or by nobody
    for copy in moves.copies:  # two gradients are added up where they are made, so one arrives
        if copy.reason == "backward" and copy.buffer >= 0:
            at = rows.device == rows.device[copy.buffer]
            made.nbytes[at & ~rows.copied & (rows.born > copy.born) & (rows.born < copy.born + SOON)] = 0
    _part_with_outputs(made)
    for border in range(stages - 1):
        for value in values_over(staged, border):
            if graph.values[value].storage not in free:
                _send(made, staged, border, value, schedule)
    for value in graph.outputs:  # clones of them
        made.add(value, stages - 1, made.begin - 1, made.end + 1)
    found = made.found()
    clones = np.zeros(len(found.buffers.storage), bool)
    clones[len(clones) - len(graph.outputs) :] = True
    return found, clones


def _send(made: _Rows, staged: Staged, border: int, value: int, schedule: str) -> None:
    """Take a value over a border, and its gradient back.

    Torch's schedules hold what they send to the end of a step, but for 1F1B, which has the sends and receives of the
    action before in its hands; what has gone forward a backward needs in any case.
    """
    row, rows, begin, end = made.graph.values[value], made.rows, made.begin, made.end
    to_the_end = not made.training or schedule in ("interleaved", "zero-bubble")
    until = end + 1 if to_the_end else end
    source = row.op >= 0 and staged.op_stage[row.op] == border
    mine = (rows.storage == row.storage) & (rows.device == made.device(border)) & ~rows.copied
    if source and row.nbytes == made.graph.storages[row.storage].nbytes:
        made.died[mine] = np.maximum(made.died[mine], until)
    elif source:  # what is sent has memory of its own
        made.add(value, border, begin - 1, until)
    elif to_the_end:  # handed on
        made.add(value, border, begin, until)
    made.add(value, border + 1, 0, end if made.training else begin)
    if not made.training:
        made.add(value, border + 1, 0, 1)  # room for the next part is made while torch still waits for this one
        return
    if schedule == "1f1b":
        made.add_held(value, border)
    if not row.requires_grad:
        return
    made.add(value, border, begin, end)
    if to_the_end:
        made.add(value, border + 1, end - 1, until)
    if schedule == "1f1b":
        made.add(value, border, 0, begin)
        made.add(value, border, begin - 1, begin)  # the gradient of the next part, before that of the last is let go
        made.add_held(value, border + 1)


def _part_with_outputs(made: _Rows) -> None:
    """The last stage clones the outputs of a part; after the forward only autograd has the outputs themselves."""
    graph, rows = made.graph, made.rows
    saved = {graph.values[save.value].storage for save in graph.saves}
    storages = {graph.values[value].storage for value in graph.outputs}
    mine = np.isin(rows.storage, list(storages)) & ~rows.copied & (rows.born < made.begin)
    kept = np.isin(rows.storage, list(saved))
    made.died[mine & ~kept] = made.begin
    made.died[mine & kept] = np.clip(made.died[mine & kept], made.begin, made.end)

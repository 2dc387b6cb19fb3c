"""Stages whose modules run again in backward: which ops do together, and when their activations are there.

    forward      ██████░░░░░░░░░░░░░░      one module at a time: what it saves goes when it returns
    backward     ░░░░░░░░░░██████▒▒▒░      all at once when its backward first asks for some; each goes once it is used

While it runs again it also has what passes, as in forward.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.capture.stages import Staged
from autoshard.flow import Buffers, Flow
from autoshard.plan import Stage

Array = np.ndarray


def segments_of(graph: ModelGraph, staged: Staged, stages: Sequence[Stage], *, processes: bool) -> Array:
    """Return per op with what it runs again together, -1 for what does not run again.

    That is a call of a module of a stage; with `processes` the whole stage, as it is one function there.
    """
    found = np.full(len(graph.ops), -1, np.int64)
    if graph.backward_begin == len(graph.ops) or not any(stage.recompute for stage in stages):
        return found
    forward = graph.ops[: graph.backward_begin]
    if processes:
        own = np.array([number if stage.recompute else -1 for number, stage in enumerate(stages)])
        found[: len(forward)] = own[np.array(staged.op_stage[: len(forward)], np.int64)]
        return found
    modules = _called(graph, [path for stage in stages if stage.recompute for path in stage.paths])
    of_call: list[int] = []
    for call in graph.calls:
        around = of_call[call.parent] if call.parent >= 0 else -1
        of_call.append(call.index if around < 0 and call.path in modules else around)
    found[: len(forward)] = [of_call[op.call] for op in forward]
    return found


def run_again(graph: ModelGraph, moves: Flow, segments: Array, *, processes: bool) -> tuple[Flow, Array]:
    """Change what a flow keeps from forward to backward to what is computed again; and which of its rows are new."""
    rows = moves.buffers
    if not (segments >= 0).any():
        return moves, np.zeros(len(rows.storage), bool)
    dropped = _dropped(graph, segments)
    begin = graph.backward_begin
    of_storage = np.full(len(graph.storages), -1, np.int64)
    of_storage[list(dropped)] = list(dropped.values())
    mine = ~rows.copied & (rows.born < begin)
    of_row = np.where(mine, of_storage[rows.storage], -1)
    ends = {number: int(np.flatnonzero(segments == number)[-1]) + 1 for number in set(of_row.tolist()) - {-1}}
    died = rows.died.astype(np.float64)  # also of what nothing will go back through
    died[of_row >= 0] = np.minimum(died[of_row >= 0], [ends[number] for number in of_row[of_row >= 0].tolist()])
    of_row[rows.died - 1 < begin] = -1
    if not processes:  # there stages keep what they receive
        died = _hold_arguments(graph, moves, died, segments)
    if not (of_row >= 0).any():
        return replace(moves, buffers=replace(rows, died=died)), np.zeros(len(rows.storage), bool)
    first, twice = _first_use(graph, dropped), {} if processes else _made_twice(graph, segments)
    added: list[tuple[int, float, float]] = []
    for number in sorted(set(of_row.tolist()) - {-1}):
        at = first.get(number, begin)
        own = np.flatnonzero(of_row == number)
        passing, late = _while_running(rows, segments, number, own)
        added += [(int(row), at, at + 1) for row in passing]
        added += [(int(row), at + (row in late), float(rows.died[row])) for row in own.tolist()]
        for storage, released in twice.get(number, {}).items():
            both = np.flatnonzero(mine & (rows.storage == storage))
            added += [(row, at + (row in passing), float(released)) for row in both.tolist() if released > at]
    source, born, until = (np.array(column) for column in zip(*added, strict=True))
    buffers = Buffers(
        storage=np.concatenate([rows.storage, rows.storage[source]]),
        device=np.concatenate([rows.device, rows.device[source]]),
        nbytes=np.concatenate([rows.nbytes, rows.nbytes[source]]),
        born=np.concatenate([rows.born, born]),
        died=np.concatenate([died, until]),
        copied=np.concatenate([rows.copied, np.zeros(len(source), bool)]),
    )
    return replace(moves, buffers=buffers), np.arange(len(buffers.storage)) >= len(rows.storage)


def _called(graph: ModelGraph, paths: Sequence[str]) -> set[str]:
    """The modules that are called among these paths: of a list of modules, each in it."""
    callable_modules = {module.path: module.callable for module in graph.modules}
    found, waiting = set(), list(paths)
    while waiting:
        path = waiting.pop()
        if callable_modules.get(path, True):
            found.add(path)
        else:
            begin = f"{path}." if path else ""
            waiting += [one for one in callable_modules if one.startswith(begin) and one != path
                        and "." not in one[len(begin):]]  # fmt: skip
    return found


def _dropped(graph: ModelGraph, segments: Array) -> dict[int, int]:
    """Storage -> where it is made again, of those that nothing outside of that reads: they are not kept."""
    begin, of_op = graph.backward_begin, segments.tolist()
    found = {
        storage.index: of_op[storage.born]
        for storage in graph.storages
        if storage.kind == "activation" and 0 <= storage.born < begin and of_op[storage.born] >= 0
    }
    for op in graph.ops[:begin]:
        for value in op.inputs:
            storage = graph.values[value].storage
            if found.get(storage, of_op[op.index]) != of_op[op.index]:
                del found[storage]
    for value in graph.held:
        found.pop(graph.values[value].storage, None)
    return found


def _made_twice(graph: ModelGraph, segments: Array) -> dict[int, dict[int, int]]:
    """Segment -> storages made in it that the caller has, each with the time until which backward needs another one."""
    held = {graph.values[value].storage for value in graph.held}
    found: dict[int, dict[int, int]] = {}
    for save in graph.saves:
        storage = graph.storages[graph.values[save.value].storage]
        number = int(segments[save.op])
        made_here = 0 <= storage.born < graph.backward_begin and int(segments[storage.born]) == number
        if number >= 0 and made_here and storage.kind == "activation" and storage.index in held:
            until = found.setdefault(number, {})
            until[storage.index] = max(save.released, until.get(storage.index, 0))
    return found


def _first_use(graph: ModelGraph, dropped: dict[int, int]) -> dict[int, int]:
    """The first op of backward that reads what is made again in each segment."""
    found: dict[int, int] = {}
    for op in graph.ops[graph.backward_begin :]:
        for value in op.inputs:
            number = dropped.get(graph.values[value].storage, -1)
            if number >= 0:
                found.setdefault(number, op.index)
    return found


def _hold_arguments(graph: ModelGraph, moves: Flow, died: Array, segments: Array) -> Array:
    """Let what a call was given be there until it has gone back: to run again it needs its arguments."""
    rows = moves.buffers
    for number, time in _gone_back(graph, segments).items():
        call = graph.calls[number]
        given = {graph.values[value].storage for value in call.inputs}
        devices = {moves.op_device[op] for op in np.flatnonzero(segments == number).tolist()}
        there = np.isin(rows.device, list(devices)) & np.isin(rows.storage, list(given))
        there &= (rows.born <= call.begin) & (rows.died - 1 >= call.begin)
        died = np.where(there, np.maximum(died, time), died)
    return died


def _gone_back(graph: ModelGraph, segments: Array) -> dict[int, int]:
    """Segment -> the time when its backward is through, and what it was given goes."""
    until = dict[int, int]()
    for save in graph.saves:
        number = int(segments[save.op])
        if number >= 0:
            until[number] = max(save.released, until.get(number, 0))
    return until


def held_again(graph: ModelGraph, segments: Array, born: Array) -> Array:
    """When what was put into a cache at these times goes, if only what runs again has it: 0 if nothing does.

    A segment is given the cache as it was before, so what is put there is held by those after it, and they go back
    before: the next one is the last to let go.
    """
    until = sorted((int(np.flatnonzero(segments == number)[0]), time) for number, time in
                   _gone_back(graph, segments).items())  # fmt: skip
    begins, times = np.array([begin for begin, _ in until]), np.array([*(time for _, time in until), 0])
    return times[np.searchsorted(begins, born, side="right")]


def _while_running(rows: Buffers, segments: Array, number: int, own: Array) -> tuple[list[int], set[int]]:
    """What passes at the moment when a segment that runs again has most, and what of its own it makes later.

    Nothing if it has most when it is done.
    """
    times = np.flatnonzero(segments == number)
    begin, end = int(times[0]), int(times[-1])
    made = np.flatnonzero((rows.born >= begin) & (rows.born <= end) & (rows.device == rows.device[own[0]]))
    made = made[segments[np.ceil(rows.born[made]).astype(np.int64)] == number]
    there = (rows.born[made] <= times[:, None]) & (rows.died[made] - 1 >= times[:, None])
    live = there @ rows.nbytes[made]
    most = int(live.argmax())
    if live[most] <= rows.nbytes[own].sum():
        return [], set()
    mine = set(own.tolist())
    passing = [row for row in made[there[most]].tolist() if row not in mine]
    return passing, {row for row in mine if rows.born[row] > times[most]}

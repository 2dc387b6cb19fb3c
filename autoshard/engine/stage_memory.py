"""Bytes of every stage of a pipeline in one process.

    static      parameters, buffers, optimizer state, inputs of the whole batch: always there
    forward     the most activations while a micro-batch runs
    kept        activations of a micro-batch between its forward and its backward, outputs and caches included
    backward    the most activations and gradients while it goes back

`flow` says what lives when for one micro-batch. All of them run forward, one after the other; their outputs become one
tensor, through which one backward goes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.device import Device
from autoshard.flow import Copy, Flow
from autoshard.plan import Stage
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS, Workload

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of one stage for one micro-batch, in the terms of the module docstring.

    `gradient`: of all its parameters; `first_backward`: with the gradients made so far, `later_backward`: with those
    being made, which are added to sums of earlier micro-batches. `outputs`: the part of `kept` that is put together;
    `arriving`: outputs of another stage, which are copied to where the inputs were.
    """

    parameter: int
    buffer: int
    gradient: int
    optimizer: int
    inputs: int
    forward: int
    kept: int
    first_backward: int
    later_backward: int
    outputs: int
    arriving: int

    def peak(self, microbatches: int, step: int, *, training: bool) -> tuple[int, int]:
        """(gradients, activations) when both together are largest; `step`: bytes of the optimizer's step."""
        kept, others = microbatches * self.kept, (microbatches - 1) * self.kept
        merged = microbatches * (self.outputs * (microbatches > 1) + self.arriving)
        peaks = [(0, others + self.forward), (0, kept + merged)]
        if training:
            there = microbatches * self.arriving
            peaks += [(0, there + others + self.first_backward), (self.gradient, there + step)]
            if microbatches > 1:
                peaks.append((self.gradient, there + others - self.kept + self.later_backward))
        return max(peaks, key=sum)


def stage_bytes(
    graph: ModelGraph, moves: Flow, device: Device, trained: Sequence[int], workload: Workload, input_bytes: int
) -> StageBytes:
    """Bytes of the stage on a device, rounded as its allocator does.

    `graph`, `moves`: of one micro-batch; `trained`: sizes of the parameters that it trains; `input_bytes`: of the whole
    batch.
    """

    def rounded(nbytes: int) -> int:
        return -(-nbytes // device.block_bytes) * device.block_bytes

    rows, begin, end = moves.buffers, graph.backward_begin, len(graph.ops)
    here = rows.device == moves.devices.index(device.name)
    nbytes = -(-rows.nbytes // device.block_bytes) * device.block_bytes
    kind = np.array([str(storage.kind) for storage in graph.storages] or [""])[rows.storage]
    kept_copies = rows.copied & (np.isin(kind, ("parameter", "buffer")) | _rows_of(moves, lambda copy: copy.kept))
    outputs = {graph.values[value].storage for value in graph.outputs}
    arriving = _rows_of(moves, lambda copy: copy.reason == "output")
    made_in_backward = (rows.born >= begin) & (rows.born < end) & (rows.died >= end) & (kind == "activation")
    gradients = {graph.values[value].storage for _, value in graph.gradients}
    gradient = ~rows.copied & (np.isin(rows.storage, [*gradients]) | made_in_backward)
    own = ~rows.copied & np.isin(kind, ("parameter", "buffer", "input"))
    transient = here & ~own & ~gradient & ~arriving & ~kept_copies
    kept = transient & (rows.born < begin) & (rows.died > begin)

    def total(mask: Array) -> int:
        return int(nbytes[here & mask].sum())

    live = moves.timeline(device.name, device.block_bytes, transient)
    made = moves.timeline(device.name, device.block_bytes, here & gradient)
    new = np.bincount(np.ceil(rows.born[here & gradient]).astype(np.int64), nbytes[here & gradient], end + 1)
    new = new.astype(np.int64)
    later = np.maximum(live + new, np.minimum(live, np.append(live[1:], 0)) + 2 * new)  # a sum stands beside its terms
    sums = sum(map(rounded, trained))
    return StageBytes(
        parameter=total(own & (kind == "parameter")) + total(kept_copies),
        buffer=total(own & (kind == "buffer")),
        gradient=sums,
        optimizer=sums * OPTIMIZER_STATE_TENSORS[workload.optimizer] if workload.training else 0,
        inputs=rounded(input_bytes) if device.name == moves.execution_devices.devices[""] else 0,
        forward=int(live[:begin].max(initial=0)),
        kept=total(kept),
        first_backward=int((live + made)[begin:].max(initial=0)),
        later_backward=int(later[begin:].max(initial=0)),
        outputs=total(kept & ~rows.copied & np.isin(rows.storage, [*outputs])),
        arriving=total(arriving),
    )


def _rows_of(moves: Flow, wanted: Callable[[Copy], bool]) -> Array:
    """Mask over the buffers of a flow: copies of which this holds."""
    rows = [copy.buffer for copy in moves.copies if copy.buffer >= 0 and wanted(copy)]
    return np.isin(np.arange(len(moves.buffers.storage)), rows)


def segments_of(graph: ModelGraph, stages: Sequence[Stage]) -> Array:
    """Number per op of the call of a module of a stage that it is recomputed together with, -1 for what is not."""
    found = np.full(len(graph.ops), -1, np.int64)
    if graph.backward_begin == len(graph.ops) or not any(stage.recompute for stage in stages):
        return found
    forward = graph.ops[: graph.backward_begin]
    modules = _called(graph, [path for stage in stages if stage.recompute for path in stage.paths])
    of_call: list[int] = []
    for call in graph.calls:
        around = of_call[call.parent] if call.parent >= 0 else -1
        of_call.append(call.index if around < 0 and call.path in modules else around)
    found[: len(forward)] = [of_call[op.call] for op in forward]
    return found


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


def recomputed(graph: ModelGraph, moves: Flow, segments: Array) -> Flow:
    """Change a flow so that activations inside of segments go when these return, and come again in backward.

        forward      ██████░░░░░░░░░░░░░░      one segment at a time: its saved activations go when it returns
        backward     ░░░░░░░░░░██████▒▒▒░      all at once when its backward first reads some

    What a segment was given stays until its backward is done.
    """
    if not (segments >= 0).any():
        return moves
    rows, begin, of_op = moves.buffers, graph.backward_begin, segments.tolist()
    inner = {row.index: of_op[row.born] for row in graph.storages
             if row.kind == "activation" and 0 <= row.born < begin and of_op[row.born] >= 0}  # fmt: skip
    given: dict[int, set[int]] = {}
    for op in graph.ops[:begin]:
        for value in op.inputs:
            storage = graph.values[value].storage
            if inner.get(storage, of_op[op.index]) != of_op[op.index]:
                inner.pop(storage, None)
            if (
                of_op[op.index] >= 0
                and graph.values[value].op >= 0
                and of_op[graph.values[value].op] != of_op[op.index]
            ):
                given.setdefault(storage, set()).add(of_op[op.index])
    for value in graph.alive_at_end:
        inner.pop(graph.values[value].storage, None)
    first, until = dict[int, int](), dict[int, int]()  # op of backward that first reads what is recomputed; released
    for op in graph.ops[begin:]:
        for number in {inner.get(graph.values[value].storage, -1) for value in op.inputs} - {-1}:
            first.setdefault(number, op.index)
    for save in graph.saves:
        until[of_op[save.op]] = max(save.released, until.get(of_op[save.op], 0))
    ends = {number: int(np.flatnonzero(segments == number)[-1]) + 1 for number in set(of_op) - {-1}}
    died, again = rows.died.astype(np.float64), list[int]()
    for row in np.flatnonzero(rows.born < begin).tolist():
        storage = int(rows.storage[row])
        number = -1 if rows.copied[row] else inner.get(storage, -1)
        if number >= 0:
            died[row] = min(died[row], ends[number])
            if rows.died[row] - 1 >= begin:
                again.append(row)
        elif storage in given:
            died[row] = max([died[row], *(until.get(one, 0) for one in given[storage])])
    born = np.array([first.get(inner[int(rows.storage[row])], begin) for row in again], np.float64)
    columns = {name: getattr(rows, name) for name in ("storage", "device", "nbytes", "copied")}
    buffers = replace(
        rows, **{name: np.concatenate([column, column[again]]) for name, column in columns.items()},
        born=np.concatenate([rows.born, born]),
        died=np.concatenate([died, np.maximum(rows.died[again], born + 1)]),
    )  # fmt: skip
    return replace(moves, buffers=buffers)

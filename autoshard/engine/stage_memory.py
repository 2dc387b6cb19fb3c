"""Bytes of every stage of a pipeline for one micro-batch.

    static      parameters, buffers, inputs of the whole batch; in training optimizer state
    forward     the most activations while the stage runs it
    kept        saved activations between its forward and its backward, with what the stage received
    backward    the most activations while it runs, with the gradients that are being made
    outputs     what stays to the end of the pass: outputs

`flow` says what lives when, with every stage as a device of its own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.capture.graph import ModelGraph
from autoshard.cluster.device import Device
from autoshard.flow import Flow, flow
from autoshard.plan import Stage
from autoshard.plan.workload import OPTIMIZER_STATE_TENSORS
from autoshard.profile.profile import Profile

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """Bytes of one stage, in the terms of the module docstring. `gradient`: of all its parameters.

    `first_backward` has the gradients made so far, `backward` of a later micro-batch only those being made.
    `outputs_and_cache`: what stays to the end of the pass; `outputs`: the part of it that is put together, of all
    micro-batches; `unsaved`: the part of these that autograd does not hold, which goes then. `leaving`: outputs that
    are copied to the device of the inputs, and `arriving` there, `returning`: the part of both that a gradient
    comes back to.
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
    outputs_and_cache: int = 0
    outputs: int = 0
    unsaved: int = 0
    leaving: int = 0
    arriving: int = 0
    returning: int = 0


class StageMemory:
    """What lives on which stage in one pass of one micro-batch; `graph` is that of the micro-batch.

    Attributes:
        owner: parameter or buffer -> the stage that has it; others that read it get a copy.
        runs_again: mask of the forward ops that run a second time.
    """

    def __init__(self, whole: Profile, graph: ModelGraph, stages: Sequence[Stage]) -> None:
        self.whole, self.graph = whole, graph
        moves = flow(graph, {path: str(i) for i, one in enumerate(stages) for path in one.paths})
        self.owner = {name: int(stage) for name, stage in moves.tensor_device.items()}
        segments = segments_of(graph, stages)
        self.runs_again = segments >= 0
        self.moves = moves = _recomputed(graph, moves, segments)
        rows, begin, end = moves.buffers, graph.backward_begin, len(graph.ops)
        kinds = {"parameter": 1, "buffer": 1, "input": 2}
        kind = np.array([kinds.get(storage.kind, 0) for storage in graph.storages] or [0])[rows.storage]
        gradients = {graph.values[value].storage for _, value in graph.gradients}
        stays = (rows.born >= begin) & (rows.born < end) & (rows.died >= end)
        self.gradients = ~rows.copied & (_in_storages(rows.storage, gradients) | ((kind == 0) & stays))
        self.arriving = _rows_of(moves, lambda copy: copy.reason == "output")
        # One copy of a parameter is enough for all micro-batches.
        self.shared_copies = rows.copied & ((kind == 1) | _rows_of(moves, lambda copy: copy.kept))
        self.transient = ((kind == 0) | rows.copied) & ~self.gradients & ~self.arriving & ~self.shared_copies
        storages = {graph.values[value].storage for value in graph.outputs}
        self.outputs = _in_storages(rows.storage, storages) & ~rows.copied & (kind == 0) & (rows.born < begin)
        saved = {(graph.values[save.value].storage, moves.op_device[save.op]) for save in graph.saves}
        is_saved = [place in saved for place in zip(rows.storage.tolist(), rows.device.tolist(), strict=True)]
        self.unsaved = self.outputs & ~np.array(is_saved, bool)
        self.leaving = self.outputs & _in_storages(
            rows.storage, {graph.values[copy.value].storage for copy in moves.copies if copy.reason == "output"}
        )
        died = np.where(self.outputs, end + 1, rows.died)
        with_outputs = _rows_of(moves, lambda copy: copy.value in graph.alive_at_end)
        caches = _in_storages(rows.storage, {graph.values[value].storage for value in graph.state}) & ~rows.copied
        lasts = self.outputs | with_outputs | caches
        self.outputs_and_cache = self.outputs | (self.transient & (died > end) & lasts)
        self.graded = _in_storages(rows.storage, {graph.values[value].storage for value in graph.outputs
                                            if begin < end and graph.values[value].requires_grad})  # fmt: skip
        self.moves = replace(moves, buffers=replace(rows, died=died))

    def of(self, stage: int, device: Device, trained: Sequence[int]) -> StageBytes:
        """Return the bytes of one stage, rounded as its device's allocator does; `trained`: of its parameters."""

        def rounded(nbytes: int) -> int:
            return -(-nbytes // device.block_bytes) * device.block_bytes

        graph, workload = self.graph, self.whole.workload
        static = self._static(stage, rounded)
        gradient = sum(map(rounded, trained))
        inputs = sum(rounded(row.nbytes) for row in self.whole.graph.storages if row.kind == "input")
        found = StageBytes(
            parameter=static["parameter"],
            buffer=static["buffer"],
            gradient=gradient,
            optimizer=gradient * OPTIMIZER_STATE_TENSORS[workload.optimizer] if workload.training else 0,
            inputs=inputs if stage == int(self.moves.execution_devices.devices[""]) else 0,
        )
        if str(stage) not in self.moves.devices:
            return found
        rows, begin, end = self.moves.buffers, graph.backward_begin, len(graph.ops)
        here = rows.device == self.moves.devices.index(str(stage))
        nbytes = -(-rows.nbytes // device.block_bytes) * device.block_bytes
        transient, new = here & self.transient, here & self.gradients

        def total(mask: Array) -> int:
            return int(nbytes[here & mask].sum())

        live = self.moves.timeline(str(stage), device.block_bytes, transient)
        made = self.moves.timeline(str(stage), device.block_bytes, new)
        being_made = np.bincount(np.ceil(rows.born[new]).astype(np.int64), nbytes[new], end + 1).astype(np.int64)
        kept = transient & (rows.born <= begin - 1) & (rows.died - 1 >= begin)
        outputs = here & self.outputs
        # Gradients of micro-batches wait for the last one: after the op a sum stands beside its terms.
        later = np.maximum(live + being_made, np.minimum(live, np.append(live[1:], 0)) + 2 * being_made)
        return replace(
            found,
            parameter=found.parameter + total(self.shared_copies),
            forward=int(live[:begin].max(initial=0)),
            kept=total(kept),
            first_backward=int((live + made)[begin:].max(initial=0)),
            backward=int(later[begin:].max(initial=0)),
            outputs_and_cache=total(self.outputs_and_cache & ~self.outputs | outputs),
            outputs=total(outputs),
            unsaved=total(self.unsaved & outputs),
            leaving=total(self.leaving),
            arriving=total(self.arriving),
            returning=total((self.leaving | self.arriving) & self.graded),
        )

    def _static(self, stage: int, rounded: Callable[[int], int]) -> dict[str, int]:
        """Bytes of the parameters and of the buffers that a stage has, tied ones once."""
        found, seen = {"parameter": 0, "buffer": 0}, set[int]()
        for tensor in self.graph.tensors:
            if stage == self.owner[tensor.name] and tensor.storage not in seen:
                seen.add(tensor.storage)
                found[tensor.kind] += rounded(self.graph.storages[tensor.storage].nbytes)
        return found


def _in_storages(storage: Array, wanted: set[int]) -> Array:
    return np.isin(storage, list(wanted))


def _rows_of(moves: Flow, wanted: Callable[..., bool]) -> Array:
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


def _recomputed(graph: ModelGraph, moves: Flow, segments: Array) -> Flow:
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

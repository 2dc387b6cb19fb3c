"""Which stage of a pipeline runs every op of a recorded run, what crosses from stage to stage, and who holds what.

Stages are lists of module paths. Data only goes forward: an op runs on the stage of its module, or on a later one where
something it reads was made there.

    stage 0   embed, layers.0            op 0 … 30          x ──┐             embed.weight is on 0 and 2
    stage 1   layers.1                   op 31 … 60             └─▶ op 31     mask (made by op 4) is read by 1 and 2
    stage 2   norm, head (tied)          op 61 … 70
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from autoshard.capture.columns import columns_of
from autoshard.capture.graph import ModelGraph, Op
from autoshard.common.module_paths import above, parent
from autoshard.errors import PlanError
from autoshard.plan.placement import covering_entry, devices_below


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """A value that stage `source` makes and the stages `readers` (ascending, all later) read.

    What the model returns is read by the last stage.
    """

    value: int
    source: int
    readers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A recorded run divided into stages.

    Attributes:
        op_stage: per op; backward ops are on the stage of their forward op.
        stage_parameters: name of every parameter and buffer, tied ones under each name -> the stages that have it,
            ascending: those that read it, or its own if none does.
        crossings: in the order in which the values are made. Parameters, buffers, inputs of the model and constants
            don't cross: every stage takes its own.
        problems: why a run can't be cut there, in words: what one stage makes, a later one writes into.
    """

    op_stage: tuple[int, ...]
    stage_parameters: Mapping[str, tuple[int, ...]]
    crossings: tuple[Crossing, ...]
    problems: tuple[str, ...]


SMALL = 1 << 16
"""Elements of a buffer up to which every process of a pipeline has it."""


def free_storages(graph: ModelGraph) -> frozenset[int]:
    """Storages that depend on no parameter, no random numbers and nothing that only one process of a pipeline has.

    Processes make them for themselves (position embeddings, masks) instead of sending them. Backward is left out.
    """
    forward = graph.ops[: graph.backward_begin]
    written = {graph.values[value].storage for op in forward for value in op.mutates}
    bound = set()
    for tensor in graph.tensors:
        numel = graph.storages[tensor.storage].nbytes // max(1, tensor.dtype.itemsize)
        if tensor.kind == "parameter" or tensor.storage in written or numel > SMALL:
            bound.add(tensor.storage)
    random = {key for key, target in {id(op.target): op.target for op in forward}.items() if _is_random(target)}
    of, known, left = [value.storage for value in graph.values], -1, list(forward)
    while len(bound) > known:  # what is written later with something bound was bound from the start
        known, rest = len(bound), []
        for op in left:
            if id(op.target) in random or not bound.isdisjoint(map(of.__getitem__, op.inputs)):
                bound.update(map(of.__getitem__, op.outputs + op.mutates))
            else:
                rest.append(op)
        left = rest
    return frozenset(range(len(graph.storages))) - bound


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers."""
    return _is_random(op.target)


def _is_random(target: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in target.tags


def divide(graph: ModelGraph, stages: Sequence[Sequence[str]]) -> Staged:
    """Divide a recorded run; `stages`: per stage the paths of modules or tensors, which don't overlap.

    Raises `PlanError` if a parameter or buffer is in no stage.
    """
    found = _Division(graph, stages)
    return Staged(
        op_stage=tuple(found.op_stage),
        stage_parameters=found.stage_parameters(),
        crossings=found.crossings(),
        problems=tuple(found.problems),
    )


class _Division:
    """Stages of ops, found op by op.

    Attributes:
        written: storage -> the last stage that writes into it.
    """

    def __init__(self, graph: ModelGraph, stages: Sequence[Sequence[str]]) -> None:
        self.graph, self.count = graph, len(stages)
        self.tensor_stage = _tensor_stages(graph, stages)
        own = _module_stages(graph, self.tensor_stage)
        self.call_stage = [_stage_of_call(call.path, *own) for call in graph.calls]
        self.op_stage = [0] * len(graph.ops)
        self.written: dict[int, int] = {}
        self.problems: dict[str, None] = {}
        self._made = columns_of(graph).maker.tolist()
        forward = _forwards(graph)
        current, before = 0, -1
        for op in graph.ops if self.count > 1 else ():
            if forward[op.index] != before:  # it begins where its first module is
                before = forward[op.index]
                current = self._first_stage(op.index)
            if op.forward >= 0:
                current = self.op_stage[op.forward]
            elif self.call_stage[op.call] >= 0:
                current = self.call_stage[op.call]
            self.op_stage[op.index] = current if op.backward else self._after_inputs(op, current, forward)
            if op.mutates and not op.backward:
                self._write(op)

    def _first_stage(self, begin: int) -> int:
        """The stage of the first of the ops from here on whose module tells one."""
        return next((s for s in (self.call_stage[op.call] for op in self.graph.ops[begin:]) if s >= 0), 0)

    def _after_inputs(self, op: Op, stage: int, forward: Sequence[int]) -> int:
        if stage == self.count - 1:  # there is no later one
            return stage
        for value in op.inputs:
            made = self._made[value]
            if made >= 0 and self.op_stage[made] > stage and forward[made] == forward[op.index]:
                stage = self.op_stage[made]
            if self.written:
                stage = max(stage, self.written.get(self.graph.values[value].storage, 0))
        return stage

    def _write(self, op: Op) -> None:
        """Note what an op writes: of what several stages have, the others would not see it."""
        values, stage = self.graph.values, self.op_stage[op.index]
        for value in op.mutates:
            storage = self.graph.storages[values[value].storage]
            before = self.written.get(storage.index, stage)
            if storage.kind == "activation":
                before = self.op_stage[storage.born]
            if before != stage:
                where = self.graph.calls[op.call].path or "the model's own forward"
                what = storage.name or f"a tensor that stage {before} made"
                self.problems.setdefault(f"{where}, in stage {stage}, writes into {what}, which stage {before} has too")
            self.written[storage.index] = stage

    def _readers(self, mask: np.ndarray) -> set[tuple[int, int]]:
        """(value, stage that reads it) of these of all reads."""
        reads, of_op = columns_of(self.graph).inputs, np.array(self.op_stage, np.int64)
        return set(zip(reads.value[mask].tolist(), of_op[reads.op[mask]].tolist(), strict=True))

    def stage_parameters(self) -> dict[str, tuple[int, ...]]:
        """Stages that read each parameter and buffer."""
        graph = self.graph
        readers: dict[int, set[int]] = {tensor.storage: set() for tensor in graph.tensors}
        columns = columns_of(graph)
        for value, stage in self._readers(columns.maker[columns.inputs.value] < 0):
            if graph.values[value].storage in readers:
                readers[graph.values[value].storage].add(stage)
        first: dict[int, int] = {}
        for tensor in graph.tensors:
            first.setdefault(tensor.storage, self.tensor_stage[tensor.name])
        names = {graph.storages[storage].name: storage for storage in readers}
        for name, storage in names.items():
            if storage in self.written and len(readers[storage]) > 1:
                both = " and ".join(map(str, sorted(readers[storage])))
                self.problems.setdefault(f"{name} is written while the model runs, and stages {both} have it")
        return {t.name: tuple(sorted(readers[t.storage])) or (first[t.storage],) for t in graph.tensors}

    def crossings(self) -> tuple[Crossing, ...]:
        """Values that a later stage than their maker's reads in the forward."""
        graph, readers, reads = self.graph, dict[int, set[int]](), columns_of(self.graph).inputs
        forward, of_op = np.array([not op.backward for op in graph.ops], bool), np.array(self.op_stage, np.int64)
        made = columns_of(graph).maker[reads.value]
        for value, stage in self._readers(forward[reads.op] & (made >= 0) & (of_op[made] < of_op[reads.op])):
            readers.setdefault(value, set()).add(stage)
        for value in graph.outputs:
            if graph.values[value].op >= 0 and self.op_stage[graph.values[value].op] < self.count - 1:
                readers.setdefault(value, set()).add(self.count - 1)
        return tuple(
            Crossing(value=value, source=self.op_stage[graph.values[value].op], readers=tuple(sorted(readers[value])))
            for value in sorted(readers)
        )


def _tensor_stages(graph: ModelGraph, stages: Sequence[Sequence[str]]) -> dict[str, int]:
    """The stage whose paths cover each parameter and buffer."""
    of_path = {path: str(stage) for stage, paths in enumerate(stages) for path in paths}
    found = {}
    for tensor in graph.tensors:
        entry = covering_entry(of_path, tensor.name)
        if entry is None:
            raise PlanError(f"no stage of the plan has {tensor.name}. Plan this model again.")
        found[tensor.name] = int(of_path[entry])
    return found


def _module_stages(graph: ModelGraph, tensor_stage: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Stage of every module whose tensors are all on one; and stage of the first own tensor of the others."""
    own: dict[str, int] = {}
    for name, stage in tensor_stage.items():
        own.setdefault(parent(name), stage)
    whole = {path: next(iter(found)) for path, found in devices_below(tensor_stage).items() if len(found) == 1}
    return whole, {path: stage for path, stage in own.items() if path not in whole}


def _stage_of_call(path: str, whole: Mapping[str, int], own: Mapping[str, int]) -> int:
    """The stage of a module's own ops; -1 where it says nothing: they follow the op before them."""
    if path in own:
        return own[path]
    around: Iterable[str] = (path, *above(path))
    return next((whole[one] for one in around if one in whole), -1)


def _forwards(graph: ModelGraph) -> list[int]:
    """The forward that every op is of: the next token's finds what was made where it is, and lifts nothing."""
    found = [0] * len(graph.ops)
    outermost = [call for call in graph.calls if call.parent < 0 and not call.backward]
    for number, call in enumerate([call for call in outermost if call.path == outermost[-1].path][1:], 1):
        found[call.begin :] = [number] * (len(graph.ops) - call.begin)
    return found

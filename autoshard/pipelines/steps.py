"""A recorded forward as steps: whole calls of the user's own modules where they can be had, single ops between them.

    forward of the root           steps                               stage
      ids ──▶ embed               call embed(ids)                     0
      arange, rotary(x, pos)      op arange, call rotary(…)           none: no parameter in it, so all stages run it
      layers.0 … layers.3         call layers.0(x, mask=…), …         0 0 1 1
      x * scale                   op mul                              1
      head                        call head(x)                        1

A call is taken whole if all it ran is on one stage, all it read came through its arguments (or is its own), and all it
made that others read is in what it returned. A cache that layers hand on to each other fails that, so such layers are
taken apart, into their attention's projections and the ops between.
"""

import enum
import operator
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx
from torch import nn

from autoshard.capture.call_log import CallLog, LoggedCall, Ref, ValueGuard
from autoshard.capture.graph import ModelGraph, Op
from autoshard.capture.stages import Staged, free_storages, is_random
from autoshard.errors import PlanError
from autoshard.nested import leaves_in

PLAIN = (
    bool, int, float, complex, str, bytes, enum.Enum, slice, range, type(None), type(...), type, torch.dtype,
    torch.device, torch.layout, torch.memory_format, torch.Size, types.FunctionType, types.BuiltinFunctionType,
    nn.Module, Ref,
)  # fmt: skip
"""What a call may be given again in another run; other objects may have changed since."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageStep:
    """One thing that a stage does: a `call` of a module or function, an `op`, or to check a `guard`.

    `stage` is None for what depends on no parameter: every stage does it for itself. `reads` and `makes` are values.
    `blank`: values that a call is given and does not read, from elsewhere: tensors without content do.
    """

    begin: int
    end: int
    stage: int | None
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    writes: frozenset[int] = frozenset()
    blank: frozenset[int] = frozenset()
    call: LoggedCall | None = None
    op: Op | None = None
    guard: ValueGuard | None = None


@dataclass(slots=True, kw_only=True)
class RecordedCall:
    """A forward that was recorded and divided into steps.

    Attributes:
        steps: in order; `free`: storages that hold nothing that depends on a parameter.
        node_value: value of every node of the FX graph that is one.
    """

    graph: ModelGraph
    call_log: CallLog
    staged: Staged
    free: frozenset[int]
    node_value: dict[torch.fx.Node, int]
    steps: list[StageStep] = field(default_factory=list)


def find_steps(graph: ModelGraph, call_log: CallLog, staged: Staged) -> RecordedCall:
    """Divide a recorded forward into steps.

    Raises `PlanError` for what can't be run in stages: values that decide on the way, and writes across stages.
    """
    free = free_storages(graph)
    found = RecordedCall(graph=graph, call_log=call_log, staged=staged, free=free, node_value=_node_values(graph))
    _check_writes(found)
    found.steps = _with_blanks(_bound(_StepDivision(found).steps(), found))
    found.steps = sorted([*found.steps, *_checks(found)], key=lambda step: step.begin)
    return found


def is_inside(guard: ValueGuard, found: RecordedCall) -> bool:
    """Whether something was read inside of a call that is taken whole."""
    rows = {step.call.row for step in found.steps if step.call is not None and step.call.function is None}
    row = guard.row
    while row >= 0:
        if row in rows:
            return True
        row = found.graph.calls[row].parent
    return any(
        step.begin <= guard.begin < step.end for step in found.steps if step.call is not None and step.call.function
    )


def _checks(found: RecordedCall) -> Iterator[StageStep]:
    """Steps that check what Python read out of tensors that not every stage has; for others: `write_value_guards`."""
    maker = {value: step.stage for step in found.steps for value in step.makes}
    for guard in found.call_log.value_guards:
        values = _values(guard.args)
        if guard.function is None or is_inside(guard, found):
            continue
        if all(found.graph.values[value].storage in found.free for value in values):
            continue
        stages = [stage for value in values if (stage := maker.get(value)) is not None]
        yield StageStep(
            begin=guard.begin,
            end=guard.begin,
            stage=max(stages, default=0),
            reads=tuple(values),
            makes=(),
            guard=guard,
        )


def _bound(steps: list[StageStep], found: RecordedCall) -> list[StageStep]:
    """Give a stage to steps that depend on no parameter but use what a call made that is taken whole on one stage."""
    values = found.graph.values
    memory: set[int] = set()  # made or written by steps that have a stage
    made: list[StageStep] = []
    for step in steps:
        touched = {values[value].storage for value in (*step.reads, *step.makes) if value not in step.blank}
        if step.stage is None and (touched | step.writes) & memory:
            step = replace(step, stage=found.staged.op_stage[step.begin])
        if step.stage is not None:
            memory |= step.writes | {values[value].storage for value in step.makes}
        made.append(step)
    return made


def _with_blanks(steps: list[StageStep]) -> list[StageStep]:
    """Sort out which values calls are given without reading them: only those at hand are passed on.

    A rotary embedding wants to know the dtype and the device of the hidden states, which needs none of their values.
    """
    maker = {value: step.stage for step in steps for value in step.makes}

    def at_hand(value: int, step: StageStep) -> bool:
        return maker.get(value) is None or maker[value] == step.stage

    return [
        replace(
            step,
            reads=tuple(value for value in step.reads if value not in step.blank or at_hand(value, step)),
            blank=frozenset(value for value in step.blank if not at_hand(value, step)),
        )
        for step in steps
    ]


def _check_writes(found: RecordedCall) -> None:
    """Refuse writes into what another stage has, and into inputs, which all stages have."""
    if found.staged.problems:
        raise PlanError(f"the model can't be run in these stages: {found.staged.problems[0]}. Make the plan again.")
    for op in found.graph.ops:
        for value in op.mutates:
            if found.graph.storages[found.graph.values[value].storage].kind == "input":
                where = found.graph.calls[op.call].path or "the model's own forward"
                raise PlanError(
                    f"{where} writes into an input of the model, which other stages read. Give it a copy there."
                )


def _node_values(graph: ModelGraph) -> dict[torch.fx.Node, int]:
    """The value of every FX node that is one."""
    found = {node: node.meta["value"] for node in graph.fx_graph.nodes if node.op == "placeholder"}
    for op in graph.ops:
        new = [value for value in op.outputs if graph.values[value].op == op.index]
        assert op.node is not None
        items = item_nodes(op.node)
        for node, value in zip(items or [op.node], new, strict=False):
            found[node] = value
    return found


def item_nodes(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The nodes that take items out of the result of an op that returns several."""
    items = [user for user in node.users if user.target is operator.getitem]
    return sorted(items, key=lambda item: item.args[1])  # type: ignore[arg-type, return-value]


def step_of(graph: ModelGraph, op: Op, stage: int | None = None) -> StageStep:
    """The step that runs a single op."""
    return StageStep(
        begin=op.index,
        end=op.index + 1,
        stage=stage,
        reads=op.inputs,
        makes=tuple(value for value in op.outputs if graph.values[value].op == op.index),
        writes=frozenset(graph.values[value].storage for value in op.mutates),
        op=op,
    )


class _StepDivision:
    """Walks the tree of calls from the root and decides which are taken whole."""

    def __init__(self, found: RecordedCall) -> None:
        self.found, self.graph = found, found.graph
        graph = found.graph
        self.last_read = [-1] * len(graph.values)  # the last op, or len(ops) for the caller of the model
        for op in graph.ops:
            for value in op.inputs:
                self.last_read[value] = op.index
        for value in graph.outputs:
            self.last_read[value] = len(graph.ops)
        self.handed: dict[int, int] = {}  # value -> begin of the last call that is given it
        for call in (*found.call_log.calls.values(), *found.call_log.functions):
            for value in _values(call.args, call.kwargs):
                self.handed[value] = max(call.begin, self.handed.get(value, -1))
        self.inner: dict[int, list[LoggedCall]] = {}
        for row, call in found.call_log.calls.items():
            self.inner.setdefault(graph.calls[row].parent, []).append(call)
        for call in found.call_log.functions:
            self.inner.setdefault(call.row, []).append(call)

    def steps(self) -> list[StageStep]:
        root = next(row for row, call in self.found.call_log.calls.items() if not call.path)
        return list(self._inside(self.found.call_log.calls[root], root))

    def _inside(self, around: LoggedCall, row: int) -> Iterator[StageStep]:
        at = around.begin
        for call in sorted(self.inner.get(row, []), key=lambda one: (one.begin, -one.end)):
            if call.end <= call.begin or call.begin < at:  # it ran nothing, or is part of the one before
                continue
            yield from self._ops(at, call.begin)
            whole = self._whole(call)
            if whole is not None:
                yield whole
            elif call.function is None:
                yield from self._inside(call, call.row)
            else:
                raise PlanError(
                    f"{call.function.__name__}, a function with a backward of its own, is called in "
                    f"{self.graph.calls[call.row].path or 'the model itself'} with more than its arguments tell. "
                    "Call it inside of a module of its own."
                )
            at = call.end
        yield from self._ops(at, around.end)

    def _ops(self, begin: int, end: int) -> Iterator[StageStep]:
        for op in self.graph.ops[begin:end]:
            yield step_of(self.graph, op, None if self._is_free(op) else self.found.staged.op_stage[op.index])

    def _is_free(self, op: Op) -> bool:
        touched = {self.graph.values[value].storage for value in (*op.inputs, *op.outputs, *op.mutates)}
        return touched <= self.found.free and not is_random(op)

    def _whole(self, call: LoggedCall) -> StageStep | None:
        """The step that a call is, if it can be taken whole."""
        graph, found = self.graph, self.found
        ops = graph.ops[call.begin : call.end]
        stages = {found.staged.op_stage[op.index] for op in ops if not self._is_free(op)}
        if len(stages) > 1:
            return None
        stage = next(iter(stages), None)
        if any(not isinstance(leaf, PLAIN) for _, leaf in leaves_in((call.args, call.kwargs))):
            return None
        given = set(_values(call.args, call.kwargs))
        returned = set(_values(call.output))
        for op in ops:
            for value in op.inputs:
                if graph.values[value].op < call.begin and value not in given and not self._own(value, call):
                    return None
            for value in op.outputs:
                later = self.last_read[value] >= call.end or self.handed.get(value, -1) >= call.end
                if call.begin <= graph.values[value].op and later:
                    # what another stage may read must not come later than the division has it
                    early = stage is not None and found.staged.op_stage[op.index] != stage
                    if early or value not in returned:
                        return None
        made = [value for value in dict.fromkeys(_values(call.output)) if graph.values[value].op >= call.begin]
        return StageStep(
            begin=call.begin,
            end=call.end,
            stage=stage,
            reads=tuple(given),
            makes=tuple(made),
            blank=frozenset(given - self._touched(call, ops)),
            writes=frozenset(graph.values[value].storage for op in ops for value in op.mutates),
            call=call,
        )

    def _touched(self, call: LoggedCall, ops: Sequence[Op]) -> set[int]:
        """The values that a call does something with."""
        read = {value for op in ops for value in op.inputs}
        for guard in self.found.call_log.value_guards:
            if call.begin <= guard.begin <= call.end:
                read.update(_values(guard.args))
        return read

    def _own(self, value: int, call: LoggedCall) -> bool:
        """Whether a call has a value without being given it: a parameter, a buffer, or a constant it made itself."""
        storage = self.graph.storages[self.graph.values[value].storage]
        if storage.kind == "constant":
            return call.begin <= storage.born < call.end
        return storage.kind in ("parameter", "buffer") and self.graph.values[value].op < 0


def _values(*nested_refs: Any) -> list[int]:
    return [leaf.value for _, leaf in leaves_in(nested_refs) if isinstance(leaf, Ref)]

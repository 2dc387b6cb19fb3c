"""What every stage runs: its steps, one after the other, between what it receives and what it sends.

stage 1 of 3:   received                v31, v7             what stage 0 made and this stage or a later one reads
                inputs                  v2                  from the rank's own batch, not over the wire
                op      v40             of v2               what needs no parameter, every stage makes that reads it
                call    v58             of v31, mask=v40    of the user's own module
                sent                    v58, v7
"""

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from autoshard.capture.call_log import LoggedCall, Ref, ValueGuard
from autoshard.capture.graph import HOST, UNKNOWN, Op
from autoshard.errors import ApplyError
from autoshard.nested import join_leaves, leaves_in, tensor_at
from autoshard.pipelines.steps import RecordedCall, StageStep, item_nodes, step_of
from autoshard.runtime.cuts import cut_record
from autoshard.runtime.results import parts_of_tokens

_ALIAS = torch.ops.aten.alias.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What one stage does and exchanges.

    Attributes:
        run: `(received tensors, input tensors) -> tensors to send`; of the last stage, the outputs of the model.
        received, sent: values.
    """

    run: Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
    received: tuple[int, ...]
    sent: tuple[int, ...]


def find_traffic(found: RecordedCall, stages: int) -> list[tuple[int, ...]]:
    """Per boundary, the values that go over it: made before it, read after it; what is made early is handed on."""
    maker = {value: step.stage for step in found.steps for value in step.makes if step.stage is not None}
    reader: dict[int, int] = {}
    for step in found.steps:
        if step.stage is not None:
            for value in step.reads:
                reader[value] = max(step.stage, reader.get(value, 0))
    for value in found.graph.outputs:
        reader[value] = stages - 1
    return [
        tuple(sorted(value for value, stage in maker.items() if stage <= boundary < reader.get(value, -1)))
        for boundary in range(stages - 1)
    ]


def write_program(
    found: RecordedCall, stage: int, traffic: list[tuple[int, ...]], model: nn.Module, device: torch.device
) -> Program:
    """Write the program of a stage on the tensors that `model` has on `device` now."""
    last = stage == len(traffic)
    received = traffic[stage - 1] if stage else ()
    sent = tuple(found.graph.outputs) if last else traffic[stage]
    own = [step for step in found.steps if step.stage == stage]
    wanted = {value for step in own for value in step.reads} | set(sent)
    free = _closed(found, [step for step in found.steps if step.stage is None], wanted - set(received))
    steps = sorted([*own, *free], key=lambda step: step.begin)
    return _write(found, steps, received, sent, model, device)


def write_value_guards(found: RecordedCall, model: nn.Module, device: torch.device) -> tuple[Program, list[ValueGuard]]:
    """Write the program that makes what was read out of tensors when the model was recorded, and list the readings.

    Those of invented values are left out, and those that are the same in every run.
    """
    may_vary = _varying(found)
    value_guards = [
        one
        for one in found.call_log.value_guards
        if one.function is not None
        and found.free.issuperset(storages := _storages(found, one))
        and not may_vary.isdisjoint(storages)
    ]
    values = tuple(dict.fromkeys(ref.value for one in value_guards for ref in one.args if isinstance(ref, Ref)))
    of = [value.storage for value in found.graph.values]
    free = [op for op in found.graph.ops if {of[value] for value in (*op.inputs, *op.outputs)} <= found.free]
    steps = _closed(found, [step_of(found.graph, op) for op in free], set(values))
    return _write(found, steps, (), values, model, device), value_guards


def _varying(found: RecordedCall) -> set[int]:
    """Storages made from inputs or from tensors of the model: all others are the same whenever shapes are."""
    graph = found.graph
    of = [value.storage for value in graph.values]
    varying = {of[value] for value in graph.inputs} | {tensor.storage for tensor in graph.tensors}
    for op in graph.ops:
        if not varying.isdisjoint(of[value] for value in op.inputs):
            varying.update(of[value] for value in (*op.outputs, *op.mutates))
    return varying


def _storages(found: RecordedCall, guard: ValueGuard) -> list[int]:
    return [found.graph.values[ref.value].storage for ref in guard.args if isinstance(ref, Ref)]


def _closed(found: RecordedCall, free: list[StageStep], wanted: set[int]) -> list[StageStep]:
    """Those of some steps that are needed to make values, and to write into what these share their memory with."""
    values = found.graph.values
    wanted, memory = set(wanted), {values[value].storage for value in wanted}
    taken: set[int] = set()
    while True:
        before = len(taken)
        for step in reversed(free):
            if step.begin not in taken and (wanted.intersection(step.makes) or step.writes & memory):
                taken.add(step.begin)
                wanted.update(step.reads)
                memory.update(values[value].storage for value in (*step.reads, *step.makes))
        if len(taken) == before:
            return [step for step in free if step.begin in taken]


Instruction = Callable[[dict[int, Any]], None]
"""Runs a step on the values that are there, by their numbers."""


class _Writer:
    """Makes instructions of steps."""

    def __init__(self, found: RecordedCall, model: nn.Module, device: torch.device) -> None:
        self.found, self.device = found, device
        self.modules = dict(model.named_modules(remove_duplicate=False))
        record = cut_record(model)
        self.parts = parts_of_tokens(record.cuts) if record is not None else {}

    def instruction(self, step: StageStep) -> Instruction:
        """Carry out a step with gradients and autocast as they were when it was recorded."""
        call_log = self.found.call_log
        if step.op is not None:
            run, grad, autocast = self.op(step.op), call_log.op_grad[step.op.index], call_log.op_autocast[step.op.index]
        elif step.call is not None:
            run, grad, autocast = self.call(step), step.call.grad, step.call.autocast
        else:
            assert step.guard is not None
            run, grad, autocast = self.check(step.guard), False, call_log.calls[0].autocast
        if grad != call_log.grad:
            run = torch.set_grad_enabled(grad)(run)
        if autocast != call_log.calls[0].autocast:
            run = torch.autocast(self.device.type, enabled=autocast)(run)
        return run

    def op(self, op: Op) -> Instruction:
        """Run a single op."""
        node, target = op.node, op.target
        assert node is not None
        kwargs = dict(node.kwargs)
        new = [value for value in op.outputs if self.found.graph.values[value].op == op.index]
        if target is _ALIAS and op.device_source != UNKNOWN:  # a move that moved nothing when it was recorded
            kwargs = {"device": torch.device("cpu") if op.device_source == HOST else self.device}
            target = torch.Tensor.to
        elif kwargs.get("device") is not None and op.device_source != HOST:
            kwargs["device"] = self.device
        places = [item.args[1] for item in item_nodes(node)]
        node_value = self.found.node_value

        def run(values: dict[int, Any]) -> None:
            args, named = torch.fx.map_arg((node.args, kwargs), lambda one: values[node_value[one]])
            result = target(*args, **named)
            if places:
                values.update((value, result[place]) for value, place in zip(new, places, strict=False))
            elif new:
                values[new[0]] = result

        return run

    def call(self, step: StageStep) -> Instruction:
        """Call a module, or a function with a backward of its own."""
        call = step.call
        assert call is not None
        target = call.function.apply if call.function is not None else self.modules[call.path]
        rows = {value: self.found.graph.values[value] for value in step.blank}
        blank = {
            value: torch.empty((), dtype=row.dtype, device=self.device).expand(row.shape) for value, row in rows.items()
        }
        take = _Taker(self.found, call, step.makes, self.parts.get(call.path))

        def run(values: dict[int, Any]) -> None:
            args, kwargs = fill_refs((call.args, call.kwargs), values | blank)
            values.update(zip(step.makes, take(target(*args, **kwargs)), strict=True))

        return run

    def check(self, guard: ValueGuard) -> Instruction:
        """Raise `ApplyError` unless Python would read the same out of tensors as when the forward was recorded."""
        function = guard.function
        assert function is not None

        def run(values: dict[int, Any]) -> None:
            now = function(*fill_refs(guard.args, values))
            if not same_value(guard.result, now):
                raise ApplyError(
                    f"the forward reads {getattr(function, '__name__', function)} of a tensor that it computes: "
                    f"{guard.result!r} when the stages were made, {now!r} now, so it would run other ops. Use a plan "
                    "without a pipeline."
                )

        return run


def fill_refs(template: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Put tensors into a nested value in place of its refs."""

    def fill(_: str, leaves: list[Any]) -> Any:
        return tensors[leaves[0].value] if isinstance(leaves[0], Ref) else leaves[0]

    return join_leaves([template], fill)


def _write(
    found: RecordedCall, steps: list[StageStep], received: tuple[int, ...], sent: tuple[int, ...], model: nn.Module,
    device: torch.device,
) -> Program:  # fmt: skip
    writer = _Writer(found, model, device)
    begin = _bindings(writer, steps, received, sent)
    rows: list[tuple[Instruction, list[int]]] = [(writer.instruction(step), []) for step in steps]
    for value, place in _last_uses(steps, sent).items():
        rows[place][1].append(value)

    def run(given: tuple[torch.Tensor, ...], inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        values: dict[int, Any] = dict(zip(received, given, strict=True))
        values.update((value, get(inputs)) for value, get in begin)
        for instruction, over in rows:
            instruction(values)
            for value in over:
                values.pop(value, None)
        return tuple(values[value] for value in sent)

    return Program(run=run, received=received, sent=sent)


def _bindings(
    writer: _Writer, steps: list[StageStep], received: tuple[int, ...], sent: tuple[int, ...]
) -> list[tuple[int, Callable[[tuple[torch.Tensor, ...]], torch.Tensor]]]:
    """(value, how it is found at the start of a run) of what steps find: inputs, parameters, buffers, constants."""
    graph = writer.found.graph
    made = {value for step in steps for value in step.makes} | set(received)
    needed = {value for step in steps for value in step.reads if step.op is not None or step.call is not None}
    needed = (needed | set(sent)) - made
    written = {storage for step in steps for storage in step.writes}
    names = {info.value: info.name for info in reversed(graph.tensors)}
    places = {value: place for place, value in enumerate(graph.inputs)}
    contents = {node.meta["value"]: node.meta["content"] for node in graph.fx_graph.nodes if "content" in node.meta}

    def found(value: int) -> Callable[[tuple[torch.Tensor, ...]], torch.Tensor]:
        if value in names:
            path, _, name = names[value].rpartition(".")
            owner = writer.modules[path]
            return lambda inputs: getattr(owner, name)
        if value not in places and value not in contents:
            raise ApplyError(
                "the model reads a tensor in its forward that is no parameter, buffer or input and too large to keep. "
                "Register it as a buffer."
            )
        get = operator.itemgetter(places[value]) if value in places else lambda inputs: contents[value]
        copied = graph.values[value].storage in written
        return lambda inputs: get(inputs).clone() if copied else get(inputs)

    return [(value, found(value)) for value in sorted(needed)]


def _last_uses(steps: list[StageStep], sent: tuple[int, ...]) -> dict[int, int]:
    """Value -> the step after which nobody needs it."""
    last: dict[int, int] = {}
    for place, step in enumerate(steps):
        for value in (*step.makes, *step.reads):
            last[value] = place
    return {value: place for value, place in last.items() if value not in sent}


def same_value(before: Any, now: Any) -> bool:
    """Whether Python read the same twice: numbers, lists or arrays."""
    if hasattr(before, "shape") or hasattr(now, "shape"):
        return type(before) is type(now) and before.shape == now.shape and bool((before == now).all())
    return bool(before == now)


class _Taker:
    """Takes the tensors that a call made out of what it returned, and checks that they are as when it was recorded.

    `part`: the path of one of which a rank may give some tokens, their dimension, and of how many ranks.
    """

    def __init__(
        self, found: RecordedCall, call: LoggedCall, makes: tuple[int, ...], part: tuple[str, int, int] | None
    ) -> None:
        paths = {leaf.value: path for path, leaf in reversed([*leaves_in(call.output)]) if isinstance(leaf, Ref)}
        rows = [(value, found.graph.values[value]) for value in makes]
        self.wanted = [(paths[value], _shapes(paths[value], row.shape, part), row.dtype) for value, row in rows]
        self.where = call.path or getattr(call.function, "__name__", "")

    def __call__(self, output: Any) -> list[torch.Tensor]:
        found = []
        for path, shapes, dtype in self.wanted:
            tensor = tensor_at(output, path)
            if tensor is None or tensor.shape not in shapes or tensor.dtype != dtype:
                given = "no tensor" if tensor is None else f"{list(tensor.shape)} of {tensor.dtype}"
                raise ApplyError(
                    f"{self.where} returned {given} and {list(shapes[0])} of {dtype} when its stage was made: what it "
                    "does depends on values. It can't be run in stages; use a plan without a pipeline."
                )
            found.append(tensor)
        return found


def _shapes(path: str, shape: tuple[int, ...], part: tuple[str, int, int] | None) -> tuple[tuple[int, ...], ...]:
    """The shapes that a tensor may have: the recorded one and, where a rank may give some tokens, that of those."""
    if part is None or part[0] != path:
        return (shape,)
    _, dim, ranks = part
    return shape, (*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])

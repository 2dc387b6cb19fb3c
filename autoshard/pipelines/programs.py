"""What every stage runs: its steps, written as Python code, between what it receives and what it sends.

def stage_1(received, inputs):              stage 1 of 3
    v31, v7 = received                      what stage 0 made and this stage or a later one reads
    v2 = inputs[1]                          inputs come from the rank's own batch, not over the wire
    v40 = op_3(v2, 1)                       what needs no parameter is made anew by every stage that reads it
    v58 = module_4(v31, mask=v40)
    return (v58, v7)                        sent on
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx
from torch import nn

from autoshard.capture.graph import HOST, UNKNOWN, Op
from autoshard.capture.tape import Reading, Ref, TapedCall
from autoshard.errors import ApplyError
from autoshard.module_paths import parent
from autoshard.nested import join_leaves, leaves_in, tensor_at
from autoshard.pipelines.steps import Recorded, Step, item_nodes

_ALIAS = torch.ops.aten.alias.default


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The code of one stage and what it exchanges.

    Attributes:
        run: `(received tensors, input tensors) -> tensors to send`; of the last stage, the outputs of the model.
        received, sent: values.
        source: the code, for people.
    """

    run: Callable[[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    source: str


def find_traffic(found: Recorded, stages: int) -> list[tuple[int, ...]]:
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
        tuple(sorted(value for value, stage in maker.items() if stage <= border < reader.get(value, -1)))
        for border in range(stages - 1)
    ]


def write_program(
    found: Recorded, stage: int, traffic: list[tuple[int, ...]], model: nn.Module, device: torch.device
) -> Program:
    """Write the program of a stage on the tensors that `model` has on `device` now."""
    last = stage == len(traffic)
    received = traffic[stage - 1] if stage else ()
    sent = tuple(found.graph.outputs) if last else traffic[stage]
    own = [step for step in found.steps if step.stage == stage]
    wanted = {value for step in own for value in step.reads} | set(sent)
    return _write(found, _with_free(found, own, wanted - set(received)), received, sent, model, device)


def write_readings(found: Recorded, model: nn.Module, device: torch.device) -> tuple[Program, list[Reading]]:
    """Write the program that makes what was read out of tensors when the model was recorded, and list the readings.

    Those of invented values are left out, and those that are the same in every run.
    """
    may_vary = _varying(found)
    readings = [
        one
        for one in found.tape.readings
        if one.function is not None and _is_free(found, one) and not may_vary.isdisjoint(_storages(found, one))
    ]
    values = tuple(dict.fromkeys(ref.value for one in readings for ref in one.args if isinstance(ref, Ref)))
    steps = [
        Step(
            begin=op.index,
            end=op.index + 1,
            stage=None,
            reads=op.inputs,
            makes=tuple(value for value in op.outputs if found.graph.values[value].op == op.index),
            writes=frozenset(found.graph.values[value].storage for value in op.mutates),
            op=op,
        )
        for op in found.graph.ops
        if {found.graph.values[value].storage for value in (*op.inputs, *op.outputs)} <= found.free
    ]
    return _write(found, _closed(found, steps, set(values)), (), values, model, device), readings


def _varying(found: Recorded) -> set[int]:
    """Storages made from inputs or from tensors of the model: all others are the same whenever shapes are."""
    graph = found.graph
    of = [value.storage for value in graph.values]
    varying = {of[value] for value in graph.inputs} | {tensor.storage for tensor in graph.tensors}
    for op in graph.ops:
        if not varying.isdisjoint(of[value] for value in op.inputs):
            varying.update(of[value] for value in (*op.outputs, *op.mutates))
    return varying


def _storages(found: Recorded, reading: Reading) -> list[int]:
    return [found.graph.values[ref.value].storage for ref in reading.args if isinstance(ref, Ref)]


def _is_free(found: Recorded, reading: Reading) -> bool:
    return found.free.issuperset(_storages(found, reading))


def _with_free(found: Recorded, own: list[Step], wanted: set[int]) -> list[Step]:
    free = _closed(found, [step for step in found.steps if step.stage is None], wanted)
    return sorted([*own, *free], key=lambda step: step.begin)


def _closed(found: Recorded, free: list[Step], wanted: set[int]) -> list[Step]:
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


class _Code:
    """Lines of a function in the making, and the objects they name."""

    def __init__(self, found: Recorded, model: nn.Module, device: torch.device) -> None:
        self.found, self.device = found, device
        self.lines: list[str] = []
        self.objects: dict[str, Any] = {}
        self.blank: frozenset[int] = frozenset()
        self.modules = dict(model.named_modules(remove_duplicate=False))

    def name(self, thing: Any, kind: str) -> str:
        name = f"{kind}_{len(self.objects)}"
        self.objects[name] = thing
        return name

    def value(self, value: int) -> str:
        if value in self.blank:
            row = self.found.graph.values[value]
            return self.name(torch.empty((), dtype=row.dtype, device=self.device).expand(row.shape), "blank")
        return f"v{value}"

    def literal(self, item: Any) -> str:
        """An argument as code."""
        if isinstance(item, Ref):
            return self.value(item.value)
        if isinstance(item, torch.fx.Node):
            return self.value(self.found.node_value[item])
        if item is None or isinstance(item, bool) or (isinstance(item, (int, str)) and type(item) in (int, str)):
            return repr(item)
        if type(item) in (list, torch.fx.immutable_collections.immutable_list):
            return f"[{', '.join(map(self.literal, item))}]"
        if type(item) is tuple:
            return f"({''.join(self.literal(part) + ', ' for part in item)})"
        if type(item) in (dict, torch.fx.immutable_collections.immutable_dict) and all(
            isinstance(key, str) for key in item
        ):
            return f"{{{', '.join(f'{key!r}: {self.literal(part)}' for key, part in item.items())}}}"
        return self.nested(item)

    def nested(self, item: Any) -> str:
        """A container of a class of its own, made anew with the tensors of the run; other things are what they are."""
        refs = [leaf for _, leaf in leaves_in(item) if isinstance(leaf, Ref)]
        if not refs:
            return self.name(item, "constant")
        tensors = "".join(f"{one.value}: {self.value(one.value)}, " for one in refs)
        return f"{self.name(_Filled(item), 'filled')}({{{tensors}}})"

    def call(self, args: tuple, kwargs: Mapping[str, Any]) -> str:
        named = [f"{key}={self.literal(item)}" for key, item in kwargs.items() if key.isidentifier()]
        rest = {key: item for key, item in kwargs.items() if not key.isidentifier()}
        listed = [*map(self.literal, args), *named, *([f"**{self.literal(rest)}"] if rest else [])]
        return ", ".join(listed)


class _Filled:
    """Puts tensors into a nested value in place of its refs."""

    def __init__(self, template: Any) -> None:
        self.template = template

    def __call__(self, tensors: Mapping[int, torch.Tensor]) -> Any:
        def fill(_: str, leaves: list[Any]) -> Any:
            return tensors[leaves[0].value] if isinstance(leaves[0], Ref) else leaves[0]

        return join_leaves([self.template], fill)


def fill_refs(template: Any, tensors: Mapping[int, torch.Tensor]) -> Any:
    """Put tensors into a nested value in place of its refs."""
    return _Filled(template)(tensors)


def _write(
    found: Recorded, steps: list[Step], received: tuple[int, ...], sent: tuple[int, ...], model: nn.Module,
    device: torch.device,
) -> Program:  # fmt: skip
    code = _Code(found, model, device)
    _begin(code, steps, received, sent)
    alive = _last_uses(steps, sent)
    for place, step in enumerate(steps):
        lines, grad, autocast = _lines(code, step)
        indent = ""
        if grad != found.tape.grad:
            code.lines.append(f"{indent}with {code.name(torch.set_grad_enabled, 'grad')}({grad}):")
            indent += "    "
        if autocast != found.tape.calls[0].autocast:
            context = code.name(_Autocast(device.type, autocast), "autocast")
            code.lines.append(f"{indent}with {context}():")
            indent += "    "
        code.lines.extend(indent + line for line in lines)
        done = [value for value, end in alive.items() if end == place]
        if done:
            code.lines.append(f"del {', '.join(map(code.value, sorted(done)))}")
    code.lines.append(f"return ({''.join(code.value(value) + ', ' for value in sent)})")
    source = "def program(received, inputs):\n" + "".join(f"    {line}\n" for line in code.lines)
    scope = dict(code.objects)
    exec(compile(source, "<stage of a pipeline>", "exec"), scope)  # source is made here, from op and value numbers
    return Program(run=scope["program"], received=received, sent=sent, source=source)


class _Autocast:
    """Enters autocast as it was where an op was recorded."""

    def __init__(self, kind: str, enabled: bool) -> None:
        self.kind, self.enabled = kind, enabled

    def __call__(self) -> Any:
        return torch.autocast(self.kind, enabled=self.enabled)


def _begin(code: _Code, steps: list[Step], received: tuple[int, ...], sent: tuple[int, ...]) -> None:
    """Bind what the steps find: what is received, inputs, parameters, buffers, constants."""
    graph = code.found.graph
    if received:
        code.lines.append(f"{''.join(code.value(value) + ', ' for value in received)} = received")
    made = {value for step in steps for value in step.makes} | set(received)
    needed = {value for step in steps for value in step.reads if step.op is not None or step.call is not None}
    needed = (needed | set(sent)) - made
    written = {storage for step in steps for storage in step.writes}
    names = {info.value: info.name for info in reversed(graph.tensors)}
    places = {value: place for place, value in enumerate(graph.inputs)}
    contents = {node.meta["value"]: node.meta["content"] for node in graph.fx_graph.nodes if "content" in node.meta}
    for value in sorted(needed):
        if value in names:
            owner = code.name(code.modules[parent(names[value])], "owner")
            code.lines.append(f"{code.value(value)} = getattr({owner}, {names[value].rpartition('.')[2]!r})")
        elif value in places:
            copy = ".clone()" if graph.values[value].storage in written else ""
            code.lines.append(f"{code.value(value)} = inputs[{places[value]}]{copy}")
        elif value in contents:
            copy = ".clone()" if graph.values[value].storage in written else ""
            code.lines.append(f"{code.value(value)} = {code.name(contents[value], 'content')}{copy}")
        else:
            raise ApplyError(
                "the model reads a tensor in its forward that is no parameter, buffer or input and too large to keep. "
                "Register it as a buffer."
            )


def _last_uses(steps: list[Step], sent: tuple[int, ...]) -> dict[int, int]:
    """Value -> the step after which nobody needs it."""
    last: dict[int, int] = {}
    for place, step in enumerate(steps):
        for value in (*step.makes, *step.reads):
            last[value] = place
    return {value: place for value, place in last.items() if value not in sent}


def _lines(code: _Code, step: Step) -> tuple[list[str], bool, bool]:
    """The code of a step, and whether gradients and autocast are enabled there."""
    tape = code.found.tape
    if step.op is not None:
        return _op_lines(code, step.op), tape.op_grad[step.op.index], tape.op_autocast[step.op.index]
    if step.call is not None:
        return _call_lines(code, step), step.call.grad, step.call.autocast
    assert step.reading is not None
    args = ", ".join(map(code.literal, step.reading.args))
    return [f"{code.name(_Reads(step.reading), 'reading')}({args})"], False, tape.calls[0].autocast


class _Reads:
    """Checks that Python would read the same out of tensors as when the forward was recorded."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading

    def __call__(self, *args: Any) -> None:
        before, now = self.reading.result, self.reading.function(*args)
        if not same_reading(before, now):
            name = getattr(self.reading.function, "__name__", str(self.reading.function))
            raise ApplyError(
                f"the forward reads {name} of a tensor that it computes: {before!r} when the stages were made, {now!r} "
                "now, so it would run other ops. Use a plan without a pipeline."
            )


def same_reading(before: Any, now: Any) -> bool:
    """Whether Python read the same twice: numbers, lists or arrays."""
    if hasattr(before, "shape") or hasattr(now, "shape"):
        return type(before) is type(now) and before.shape == now.shape and bool((before == now).all())
    return bool(before == now)


def _op_lines(code: _Code, op: Op) -> list[str]:
    node = op.node
    assert node is not None
    args, kwargs = node.args, dict(node.kwargs)
    new = [value for value in op.outputs if code.found.graph.values[value].op == op.index]
    if op.target is _ALIAS and op.device_source != UNKNOWN:  # a move that moved nothing when it was recorded
        target = torch.device("cpu") if op.device_source == HOST else code.device
        return [f"{code.value(new[0])} = {code.literal(args[0])}.to({code.name(target, 'device')})"]
    if kwargs.get("device") is not None and op.device_source != HOST:
        kwargs["device"] = code.device
    text = f"{code.name(op.target, 'op')}({code.call(args, kwargs)})"
    items = item_nodes(node)
    if items:
        found = [f"{code.value(value)} = items[{item.args[1]}]" for item, value in zip(items, new, strict=True)]
        return [f"items = {text}", *found, "del items"]
    return [f"{code.value(new[0])} = {text}"] if new else [text]


def _call_lines(code: _Code, step: Step) -> list[str]:
    call = step.call
    assert call is not None
    target = call.function.apply if call.function is not None else code.modules[call.path]
    code.blank = step.blank
    text = f"{code.name(target, 'module')}({code.call(call.args, call.kwargs)})"
    code.blank = frozenset()
    if isinstance(call.output, Ref) and call.output.value in step.makes:
        check = code.name(_Shape(code.found, call, call.output.value), "check")
        return [f"{code.value(call.output.value)} = {text}", f"{check}({code.value(call.output.value)})"]
    if not step.makes:
        return [text]
    taker = code.name(_Taker(code.found, call, step.makes), "taker")
    return [f"{''.join(code.value(value) + ', ' for value in step.makes)} = {taker}({text})"]


class _Shape:
    """Checks that a call returned a tensor of the shape that it had when it was recorded."""

    def __init__(self, found: Recorded, call: TapedCall, value: int) -> None:
        self.shape, self.dtype = torch.Size(found.graph.values[value].shape), found.graph.values[value].dtype
        self.where = call.path or getattr(call.function, "__name__", "")

    def __call__(self, tensor: Any) -> None:
        if getattr(tensor, "shape", None) != self.shape or tensor.dtype != self.dtype:
            whole = f"{list(self.shape)} of {self.dtype}"
            raise ApplyError(
                f"{self.where} returned {_described(tensor)} and {whole} when its stage was made: what it "
                "does depends on values. It can't be run in stages; use a plan without a pipeline."
            )


class _Taker:
    """Takes the tensors that a call made out of what it returned."""

    def __init__(self, found: Recorded, call: TapedCall, makes: tuple[int, ...]) -> None:
        paths = {leaf.value: path for path, leaf in reversed([*leaves_in(call.output)]) if isinstance(leaf, Ref)}
        self.paths = [paths[value] for value in makes]
        self.shapes = [_Shape(found, call, value) for value in makes]

    def __call__(self, output: Any) -> list[torch.Tensor]:
        found = [tensor_at(output, path) for path in self.paths]
        for tensor, check in zip(found, self.shapes, strict=True):
            check(tensor)
        return found  # type: ignore[return-value]


def _described(tensor: Any) -> str:
    return (
        f"{list(tensor.shape)} of {tensor.dtype}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
    )

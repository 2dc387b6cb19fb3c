"""ModelGraph: what one run of a model did, op by op, without its weights.

The unit of time is the op index. Op `i` runs at time `i`; something that died with `died == i + 1` was last alive
while op `i` ran. A call with `begin == 7, end == 10` ran ops 7, 8 and 9 (its own and those of the calls inside it).

    storage 4   |        born 3 ████████████ died 9          bytes on a device
    value 11    |        born 3 ███░░░░░░░░░ died 6          the tensor object made by op 3
    value 12    |           born 4  ████████ died 9          a view of it, made by op 4

Only data here: tuples of frozen rows that point at each other by index, plus the FX graph for replay.
"""

import linecache
import weakref
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.fx
from torch import nn

from autoshard.capture.material import Storages, copied
from autoshard.common.packed import named_stored
from autoshard.errors import CaptureError

StorageKind = Literal["parameter", "buffer", "input", "constant", "activation"]
Level = Literal["fake", "real", "invented"]
HOST = -1
"""`Op.device_source` of a factory called without a device: its result is a plain CPU tensor wherever the module is."""
FOUND = "found"
"""In the `meta` of a node, the places that were found to be other than zero, where they are known."""
UNKNOWN = -2
"""`Op.device_source` of a factory whose device did not come from a tensor, and of ops that have tensor inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """One allocation. `name` is the first name of the parameter or buffer it holds, else None."""

    index: int
    nbytes: int
    kind: StorageKind
    born: int
    died: int
    name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """One tensor object: made by `op` (-1: parameter, buffer, input or constant), seen by Python until `died`.

    `nbytes` is numel * itemsize; the storage may be larger (it is a view) or smaller (expanded).
    """

    index: int
    storage: int
    op: int
    died: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    requires_grad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One ATen op as executed. Inputs and outputs are value indices in argument order; `mutates`: the inputs it writes.

    `forward` of a backward op is the forward op whose gradient it computes (any op of that node), -1 if unknown.
    `code`: (file, line, function) of the model's code that ran it, ("", 0, "") in backward.
    """

    index: int
    target: Any
    call: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutates: tuple[int, ...] = ()
    backward: bool = False
    forward: int = -1
    device_source: int = UNKNOWN
    flops: int = 0
    node: torch.fx.Node | None = None
    code: tuple[str, int, str] = ("", 0, "")


def name_of(op: Op) -> str:
    """The name of an op without its overload."""
    packet = getattr(op.target, "overloadpacket", None)
    return str(op.target) if packet is None else packet.__name__


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """One call of a torch function that ran ops `begin` to `end`; `inputs` are its tensor arguments in its own order.

    Devices that meet in the arguments are brought together for the whole call, before any of its ops. `attends`: it is
    attention that accelerators compute in one kernel.
    """

    begin: int
    end: int
    inputs: tuple[int, ...]
    attends: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a module. Call 0 is the root; `inputs`/`outputs` are the values found by `nested.tensors_in`.

    `contained` is those of `inputs` found only inside lists, dicts or dataclasses: hooks do not move them.
    `input_paths` and `output_paths` are where `tensors_in` found the values, in composite graphs; else empty.
    """

    index: int
    path: str
    parent: int
    begin: int
    end: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    backward: bool = False
    contained: tuple[int, ...] = ()
    input_paths: tuple[str, ...] = ()
    output_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteCall:
    """One call of a torch function as a torch function mode sees it: the outermost one, which ran ops `begin` to `end`.

    `function` is its `__name__`, `call` the innermost module call around it. It is the `occurrence`-th call of that
    name (from 0, functions that run no ops count) of `calls` while that module runs, its children included. `line`: as
    `source_lines.calling_line` has it. `inputs` and `outputs` are (path, value) as `nested.tensors_in` finds them in
    `(args, kwargs)` and in the result.
    """

    call: int
    function: str
    occurrence: int
    begin: int
    end: int
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    calls: int = 0
    line: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A tensor kept by autograd for backward: saved by `op`, let go at time `released` (len(ops) if never)."""

    value: int
    op: int
    released: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """A parameter or buffer under one of its names. Names that share storage share `value`'s storage: they are tied."""

    name: str
    module: str
    kind: Literal["parameter", "buffer"]
    value: int
    storage: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleInfo:
    """A module of the tree in registration order; the root has path "". One shared by several parents has `aliases`.

    Lists and dicts of modules are not `callable`: they have no forward. What is in lists and sequences is `numbered`.
    """

    path: str
    class_name: str
    aliases: tuple[str, ...] = ()
    callable: bool = True
    numbered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class ModelGraph:
    """One captured run: forward, or forward and backward. See the module docstring for the unit of time.

    Graphs are equal only to themselves, as their `fx_graph` is.

    Attributes:
        level: how it was captured; "fake" (floats had no values), "real" (ran with values) or "invented" (branches
            taken on made-up values: good for planning, never executed).
        notes: what stopped the levels above, with file:line, and every assumption made.
        outputs: values in the root's return; `state` those reachable only through opaque objects in it (a cache).
        backward_begin: index of the first backward op; len(ops) if forward only.
        gradients: (parameter name, value) of what backward left in `.grad`.
        functions: forward calls of torch functions with several tensor arguments, where ops alone don't tell them.
        sites: in composite graphs, where `linear`, `reshape` and their like are one op each: the torch functions that
            ran ops, in order. A composite graph is for analysis; it is never executed.
        measured: in composite graphs, (value, call) where Python asked how large a tensor is.
        exchanged: in composite graphs, lines that gave a tensor other memory (`tensor.data = …`), which no op tells.
        alive_after: values that ops made and that are there after the run, other than `gradients`: outputs, tables on
            attributes, the gradient of a leaf that the model made.
        kept: storages of what modules keep on attributes: in the long run there is one from the forward before.
        phases: (name, begin, end) ranges of ops, e.g. ("forward", 0, 900), ("backward", 900, 2100), ("decode", ...).
            "context" makes the state that "decode" finds, in place of all the steps before it: it counts nothing.
        plain: (path, number or text) of what else than tensors the root returned in a forward.
        sealed: (path, class) of objects among its outputs in which tensors are that nobody can replace.
        model: a weak reference to the model.
        added_ops: ops that ran where no torch function is overridden: what the runtime of a cut model adds.
    """

    fx_graph: torch.fx.Graph
    modules: tuple[ModuleInfo, ...]
    tensors: tuple[TensorInfo, ...]
    calls: tuple[Call, ...]
    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    storages: tuple[Storage, ...]
    saves: tuple[Save, ...]
    outputs: tuple[int, ...]
    state: tuple[int, ...]
    inputs: tuple[int, ...]
    level: Level
    notes: tuple[str, ...]
    phases: tuple[tuple[str, int, int], ...]
    backward_begin: int
    fingerprint: str
    training: bool = False
    gradients: tuple[tuple[str, int], ...] = ()
    functions: tuple[Function, ...] = ()
    sites: tuple[SiteCall, ...] = ()
    measured: frozenset[tuple[int, int]] = frozenset()
    exchanged: tuple[str, ...] = ()
    alive_after: tuple[int, ...] = ()
    kept: frozenset[int] = frozenset()
    plain: tuple[tuple[str, Any], ...] = ()
    sealed: tuple[tuple[str, str], ...] = ()
    added_ops: frozenset[int] = frozenset()
    model: weakref.ref[nn.Module] | None = None

    def __repr__(self) -> str:
        name = self.modules[0].class_name
        return f"<ModelGraph: {name}, {len(self.modules)} modules, {len(self.tensors)} tensors, {len(self.ops)} ops>"

    def copied_bytes(self, value: int) -> int:
        """What a copy of a value takes on another device: what is expanded is copied once."""
        row = self.values[value]
        return min(row.nbytes, self.storages[row.storage].nbytes)

    def module(self, model: nn.Module | None = None) -> torch.fx.GraphModule:
        """Make an `fx.GraphModule` of the run, with the parameters and buffers of a model, by default of its own.

        It takes the tensors of the inputs and returns (output tensors, gradients by parameter name). Nodes have
        `meta["val"]` (on meta), `meta["nn_module_stack"]`, `meta["stack_trace"]` (the line of the model's code) and
        `meta["seq_nr"]` (the index of the op).

        Raises:
            CaptureError: the model is gone, the graph took branches on invented values, or it reads a constant that was
                too large to keep.
        """
        own = model if model is not None or self.model is None else self.model()
        if own is None:
            raise CaptureError("the model that was recorded is gone: give one like it, graph.module(model).")
        return _graph_module(self, own)

    def with_notes(self, notes: tuple[str, ...]) -> "ModelGraph":
        """The same graph with notes added."""
        return replace(self, notes=self.notes + notes)

    @property
    def uncounted(self) -> range:
        """Ops of the phase "context": their bytes and seconds are not those of the workload."""
        return next((range(begin, end) for name, begin, end in self.phases if name == "context"), range(0))

    @property
    def alive_at_end(self) -> frozenset[int]:
        """Values that the caller has when the run is over: inputs, `alive_after`, outputs and state still alive."""
        end = len(self.ops)
        alive = (value for value in (*self.outputs, *self.state) if self.values[value].died >= end)
        return frozenset([*self.inputs, *alive, *self.alive_after])

    def lives(self) -> list[tuple[Storage, int, int]]:
        """(storage, born, died) of inputs and activations where nothing moves, in the long run.

        What the caller has dies after the last op; what modules keep is there from the start.
        """
        end, alive_at_end, kept = len(self.ops), {self.values[value].storage for value in self.alive_at_end}, self.kept
        return [
            (
                row,
                0 if row.index in kept else max(row.born, 0),
                end + 1 if row.index in alive_at_end else min(row.died, end + 1),
            )
            for row in self.storages
            if row.kind in ("activation", "input")
        ]

    def tied(self) -> tuple[tuple[str, ...], ...]:
        """Groups of two or more parameter or buffer names that share one storage, in first-name order."""
        groups: dict[int, list[str]] = {}
        for tensor in self.tensors:
            if tensor.nbytes:
                groups.setdefault(tensor.storage, []).append(tensor.name)
        return tuple(tuple(names) for names in groups.values() if len(names) > 1)


def maker_of(graph: ModelGraph, value: int) -> Op | None:
    """The op that makes a value; None of what comes from outside."""
    at = graph.values[value].op
    return graph.ops[at] if at >= 0 else None


def sole_maker(graph: ModelGraph, value: int) -> Op | None:
    """The op that alone decides what a value holds; None of what comes from outside, or is ever written into."""
    return None if graph.values[value].storage in written_storages(graph) else maker_of(graph, value)


# ---- as an `fx.GraphModule`


def _graph_module(graph: ModelGraph, model: nn.Module) -> torch.fx.GraphModule:
    """Make a `GraphModule` of a recorded run with the tensors of `model`, as `ModelGraph.module` says."""
    if graph.level == "invented":
        raise CaptureError("this graph took branches on invented values: it is good for planning and can't be run.")
    known, made, nodes = _known_values(graph, model), torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    places = {node.meta["value"]: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
    for value in dict.fromkeys(graph.inputs):
        nodes[places[value]] = made.placeholder(places[value].name)
    alive_at_end: dict[str, torch.Tensor] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder" and node not in nodes and node.users:
            if node.meta["value"] not in known:
                raise CaptureError(
                    f"the graph reads a constant ({node.name}) that was too large to keep; register it as a buffer."
                )
            alive_at_end[node.name] = known[node.meta["value"]]
            nodes[node] = made.get_attr(node.name)
        elif node.op != "placeholder":
            nodes[node] = made.node_copy(node, nodes.__getitem__)
    _describe(graph, nodes)
    return torch.fx.GraphModule(alive_at_end, made, f"{graph.modules[0].class_name}Graph")


def _describe(graph: ModelGraph, nodes: dict[torch.fx.Node, torch.fx.Node]) -> None:
    """Write the usual `meta` of nodes."""
    classes = {module.path: module.class_name for module in graph.modules}
    stacks: list[dict[str, tuple[str, str]]] = []
    for call in graph.calls:
        around = stacks[call.parent] if call.parent >= 0 else {}
        stacks.append({**around, f"{call.path}@{call.index}": (call.path, classes.get(call.path, ""))})

    def on_meta(value: int) -> torch.Tensor:
        return torch.empty(graph.values[value].shape, dtype=graph.values[value].dtype, device="meta")

    for node, copy in nodes.items():
        if node.op == "placeholder":
            copy.meta["val"] = on_meta(node.meta["value"])
    for op in graph.ops:
        if op.node in nodes:
            found = [on_meta(value) for value in op.outputs]
            nodes[op.node].meta.update(
                val=found[0] if len(found) == 1 else tuple(found), nn_module_stack=stacks[op.call], seq_nr=op.index,
                stack_trace=_trace_of(op),
            )  # fmt: skip


def _trace_of(op: Op) -> str | None:
    """The line that ran an op, as Python's tracebacks show it: what `print_readable` and torch's tools read."""
    file, line, function = op.code
    if not file:
        return None
    return f'  File "{file}", line {line}, in {function}\n    {linecache.getline(file, line).strip()}\n'


def written_storages(graph: ModelGraph) -> frozenset[int]:
    """The storages that any op writes into."""
    if graph not in _WRITTEN:
        _WRITTEN[graph] = frozenset(graph.values[value].storage for op in graph.ops for value in op.mutates)
    return _WRITTEN[graph]


_WRITTEN: weakref.WeakKeyDictionary[ModelGraph, frozenset[int]] = weakref.WeakKeyDictionary()


def _own(
    graph: ModelGraph, value: int, tensor: torch.Tensor, written: frozenset[int], storages: Storages
) -> torch.Tensor:  # fmt: skip
    return copied(tensor, storages) if graph.values[value].storage in written else tensor.detach()


def _known_values(graph: ModelGraph, model: nn.Module) -> dict[int, torch.Tensor]:
    """What the graph starts from but inputs, by value: parameters, buffers, constants; copies of what it writes."""
    written, storages = written_storages(graph), Storages()
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    stored = {f"{name}.{path}": part for name, tensor in tensors.items() for path, part in named_stored(tensor) if path}
    known = {info.value: _own(graph, info.value, tensors[info.name], written, storages) for info in graph.tensors[::-1]}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder":
            value = node.meta["value"]
            if node.meta["name"] in stored:
                known[value] = _own(graph, value, stored[node.meta["name"]], written, storages)
            if "content" in node.meta:
                known[value] = node.meta["content"].clone()
    return known

"""A recorded run as an `fx.GraphModule`, for other tools, and to run it again with real weights."""

import linecache

import torch
import torch.fx
from torch import nn

from autoshard.capture.graph import ModelGraph, Op
from autoshard.capture.material import Storages, copied
from autoshard.common.packed import named_stored
from autoshard.errors import CaptureError


def graph_module(graph: ModelGraph, model: nn.Module) -> torch.fx.GraphModule:
    """Make a `GraphModule` of a recorded run with the tensors of `model`, as `ModelGraph.module` says."""
    if graph.level == "invented":
        raise CaptureError("this graph took branches on invented values: it is good for planning and can't be run.")
    known, made, nodes = _known_values(graph, model), torch.fx.Graph(), dict[torch.fx.Node, torch.fx.Node]()
    places = {node.meta["value"]: node for node in graph.fx_graph.nodes if node.op == "placeholder"}
    for value in dict.fromkeys(graph.inputs):
        nodes[places[value]] = made.placeholder(places[value].name)
    held: dict[str, torch.Tensor] = {}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder" and node not in nodes and node.users:
            if node.meta["value"] not in known:
                raise CaptureError(
                    f"the graph reads a constant ({node.name}) that was too large to keep; register it as a buffer."
                )
            held[node.name] = known[node.meta["value"]]
            nodes[node] = made.get_attr(node.name)
        elif node.op != "placeholder":
            nodes[node] = made.node_copy(node, nodes.__getitem__)
    _describe(graph, nodes)
    return torch.fx.GraphModule(held, made, f"{graph.modules[0].class_name}Graph")


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


def _written(graph: ModelGraph) -> set[int]:
    return {graph.values[value].storage for op in graph.ops for value in op.mutates}


def _own(
    graph: ModelGraph, value: int, tensor: torch.Tensor, written: set[int], storages: Storages
) -> torch.Tensor:  # fmt: skip
    return copied(tensor, storages) if graph.values[value].storage in written else tensor.detach()


def _known_values(graph: ModelGraph, model: nn.Module) -> dict[int, torch.Tensor]:
    """What the graph starts from but inputs, by value: parameters, buffers, constants; copies of what it writes."""
    written, storages = _written(graph), Storages()
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

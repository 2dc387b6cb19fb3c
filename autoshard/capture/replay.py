"""Replay a recorded graph with real weights: which shows that the record is what the model does."""

from collections import Counter
from typing import Any

import torch
import torch.fx
from torch import nn

from autoshard import nested
from autoshard.capture.graph import ModelGraph
from autoshard.capture.inputs import as_call
from autoshard.capture.material import Storages, copied
from autoshard.errors import CaptureError
from autoshard.packed import named_stored


def replay(graph: ModelGraph, model: nn.Module, inputs: Any) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Run a graph's ops on `model`'s own values and return (output tensors in order, gradients by parameter name).

    Bitwise equal to the model for inputs that take the same branches, given the same random state. The model's tensors
    are not written: those that the graph writes are copied first.

    Raises:
        CaptureError: the graph took branches on invented values, or holds a constant too large to have been kept.
    """
    if graph.level == "invented":
        raise CaptureError("this graph took branches on invented values: it is good for planning and can't be run.")
    known = _known_values(graph, model, inputs)
    results: dict[torch.fx.Node, Any] = {}
    uses = Counter({node: len(node.users) for node in graph.fx_graph.nodes})
    # Some kernels ask whether gradients are enabled. In this order, because leaving inference mode enables them.
    with torch.inference_mode(False), torch.set_grad_enabled(graph.training):
        for node in graph.fx_graph.nodes:
            if node.op == "output":
                outputs, gradients = torch.fx.node.map_arg(node.args[0], results.__getitem__)
                return list(outputs), dict(gradients)
            if node.op == "placeholder":
                if node.meta["value"] not in known and uses[node]:
                    raise CaptureError(
                        f"the graph reads a constant ({node.name}) that was too large to keep; register it as a buffer."
                    )
                results[node] = known.get(node.meta["value"])
                continue
            args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), results.__getitem__)
            results[node] = _as_recorded(node, node.target(*args, **kwargs))
            for read in (node, *node.all_input_nodes):
                uses[read] -= read is not node
                if uses[read] <= 0:
                    results.pop(read, None)
    raise CaptureError("the graph has no output; capture the model again.")


def _known_values(graph: ModelGraph, model: nn.Module, inputs: Any) -> dict[int, torch.Tensor]:
    """What the graph starts from, by value: parameters, buffers, inputs, constants."""
    written = {graph.values[value].storage for op in graph.ops for value in op.mutates}
    storages: Storages = {}

    def given(tensor: torch.Tensor, value: int) -> torch.Tensor:
        return copied(tensor, storages) if graph.values[value].storage in written else tensor.detach()

    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    stored = {f"{name}.{path}": part for name, tensor in tensors.items() for path, part in named_stored(tensor) if path}
    known = {info.value: given(tensors[info.name], info.value) for info in reversed(graph.tensors)}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder" and node.meta["name"] in stored:
            known[node.meta["value"]] = given(stored[node.meta["name"]], node.meta["value"])
    found = [tensor for _, tensor in nested.tensors_in(as_call(inputs, model))]
    if len(found) != len(graph.inputs):
        raise CaptureError(f"the graph was captured with {len(graph.inputs)} input tensors, got {len(found)}.")
    known |= {value: given(tensor, value) for value, tensor in zip(graph.inputs, found, strict=True)}
    for node in graph.fx_graph.nodes:
        if node.op == "placeholder" and "content" in node.meta:
            known[node.meta["value"]] = node.meta["content"].clone()
    return known


def _as_recorded(node: torch.fx.Node, result: Any) -> Any:
    """Give a fresh result the strides it had in the record, where a fake kernel had promised others."""
    strides = node.meta.get("stride")
    if strides is None or not isinstance(result, torch.Tensor) or result.stride() == strides or result.numel() == 0:
        return result
    made = torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)
    return made.copy_(result)

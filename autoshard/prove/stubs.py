"""The outside of a model alone: what is around its repeated elements, for a proof where all of it is too large.

    embed ─▶ layer 0 ─▶ … ─▶ layer 79 ─▶ norm ─▶ head     ──▶     embed ─▶ stub ─▶ … ─▶ stub ─▶ norm ─▶ head

No cut of the outside reaches into an element: what goes in and what comes out is whole, and the same on all ranks. So
what an element computes does not matter. A stub hands on, for each result, an argument of the same shape, if there is
one, so that gradients go through.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autoshard.capture.graph import Call, ModelGraph
from autoshard.nested import tensor_at
from autoshard.prove.shapes import on_meta


def outside_of(model: nn.Module, graph: ModelGraph, elements: Iterable[str]) -> nn.Module:
    """Copy a model on meta with stubs in place of elements; their plain attributes stay, for code that asks them."""
    made = on_meta(model)
    put_stubs(made, graph, elements)
    return made


def put_stubs(model: nn.Module, graph: ModelGraph, elements: Iterable[str]) -> None:
    """Turn elements of a model, which is our own, into stubs, in place."""
    calls = {call.path: call for call in reversed(graph.calls)}  # the first of each
    for path in elements:
        element = model.get_submodule(path)
        call = calls.get(path)
        rows = [] if call is None else _rows(graph, call)
        kind = type(element)
        element.__class__ = type(kind.__name__, (kind,), {"forward": _forward(rows)})
        for table in (element._modules, element._parameters, element._buffers):
            table.clear()


def _rows(graph: ModelGraph, call: Call) -> list[tuple[str, str | None, torch.Tensor]]:
    """For each result: its path, the path of the argument to hand on, and what it is if there is none, on meta."""
    found = []
    for path, value in zip(call.output_paths, call.outputs, strict=True):
        row = graph.values[value]
        alike = [
            where
            for where, one in zip(call.input_paths, call.inputs, strict=True)
            if (graph.values[one].shape, graph.values[one].dtype) == (row.shape, row.dtype)
        ]
        found.append((path, alike[0] if alike else None, torch.empty(row.shape, dtype=row.dtype, device="meta")))
    return found


def _forward(rows: list[tuple[str, str | None, torch.Tensor]]) -> Any:
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        results = {
            path: torch.zeros_like(other, device="cpu") if where is None else tensor_at((args, kwargs), where)
            for path, where, other in rows
        }
        if set(results) <= {""}:
            return results.get("")
        if not all(path.isdecimal() for path in results):
            raise NotImplementedError("an element gives more than tensors and tuples of them")
        return tuple(results.get(str(index)) for index in range(1 + max(map(int, results))))

    return forward

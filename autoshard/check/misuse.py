"""What the runs of a model show to be wrong about a cut, without following a rank: who is given parts of tensors.

Function.apply(hidden)              its backward is in no graph, and may be right for the whole only
layer.register_full_backward_hook   it would see a part of the gradient
self.last = hidden                  it would be a part, for the next forward and for the caller
hidden.tolist()                     Python would read a part
"""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from autoshard.axes.walk import where
from autoshard.capture.call_log import CallLog, Ref
from autoshard.capture.graph import ModelGraph
from autoshard.check.follow import Differs, Required
from autoshard.nested import leaves_in
from autoshard.torch_private import backward_hooks

Local = Mapping[int, tuple[int, ...]]
"""Values that are cut, and their local shapes."""


def find_misuse(
    model: nn.Module, graph: ModelGraph, call_log: CallLog | None, required: Mapping[int, Required]
) -> None:
    """Raise `Differs` if somebody is given a part who may take it for the whole; `required`: what is cut, op by op."""
    cut = {value: shape for row in required.values() for value, shape in row.shapes.items()}
    for error in (
        *_hooked(model, graph, cut),
        *_kept(graph, cut),
        *(_on_log(graph, call_log, cut) if call_log else ()),
    ):
        raise error


def _hooked(model: nn.Module, graph: ModelGraph, cut: Local) -> Iterator[Differs]:
    hooked = {path for path, module in model.named_modules(remove_duplicate=False) if backward_hooks(module)}
    for call in graph.calls:
        if call.path in hooked and not cut.keys().isdisjoint((*call.inputs, *call.outputs)):
            yield Differs(
                call.begin, f"{call.path} has a backward hook, which would be given a part of the gradient on a rank"
            )


def _kept(graph: ModelGraph, cut: Local) -> Iterator[Differs]:
    """Parts that are still there after a forward, other than its results and their cache."""
    if any(name == "decode" for name, _, _ in graph.phases):  # its caller has the cache of the prompt, too
        return
    given = {*graph.outputs, *graph.state}
    for value in graph.alive_after:
        if value in cut and value not in given:
            op = graph.ops[graph.values[value].op]
            yield Differs(
                op.index, f"what {where(graph, op)} makes is kept after the forward, and a rank would keep a part of it"
            )


def _on_log(graph: ModelGraph, call_log: CallLog, cut: Local) -> Iterator[Differs]:
    for called in call_log.functions:
        inside = {value for op in graph.ops[called.begin : called.end] for value in (*op.inputs, *op.outputs)}
        if not cut.keys().isdisjoint(inside.union(_values(called.args, called.kwargs, called.output))):
            yield Differs(
                called.begin,
                f"{called.function.__name__} in {_module(graph, called.row)} is an autograd function on a part of a "
                "tensor, whose backward is not known",
            )
    for value, line in call_log.hooked.items():
        if value < 0 or value in cut:
            yield Differs(
                graph.values[value].op if value >= 0 else -1,
                f"{line} hangs a hook on a gradient, of which a rank may have a part",
            )
    for guard in call_log.value_guards:
        if not cut.keys().isdisjoint(_values(guard.args)):
            yield Differs(
                guard.begin,
                f"code of {_module(graph, guard.row)} reads values of what a rank has a part of",
            )


def _module(graph: ModelGraph, row: int) -> str:
    return graph.calls[row].path or "the model itself"


def _values(*logged: Any) -> list[int]:
    return [leaf.value for _, leaf in leaves_in(logged) if isinstance(leaf, Ref)]

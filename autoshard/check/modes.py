"""Modules in evaluation mode that do something else in training mode, beside dropping: they have to stay as they are.

eval     batch_norm(x, …, training=False)      dropout(x, 0.1, False)
train    batch_norm(x, …, training=True)       dropout(x, 0.1, True)
         another op: a mean of the batch       rows stay apart
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from autoshard.axes.given import with_tensors
from autoshard.capture.capture import Call, capture
from autoshard.capture.graph import ModelGraph, name_of
from autoshard.errors import CaptureError
from autoshard.plan.workload import Workload

_DROPPING = frozenset({"dropout", "dropout_", "feature_dropout", "alpha_dropout", "native_dropout",
                       "scaled_dot_product_attention"})  # fmt: skip
"""Ops that are told whether, or how often, to drop."""
_Done = dict[tuple[str, int], list[Any]]
"""(module path, how-manieth call of it) -> the modules that it calls, and the ops that it runs itself."""


def frozen_modules(model: nn.Module, given: Call, graph: ModelGraph, workload: Workload) -> tuple[str, ...]:
    """Paths of the modules in evaluation mode whose class does something else in training; all, if that is not seen.

    `graph`: a forward of the model as it is, with these arguments and composite ops.
    """
    still = {path: type(module) for path, module in model.named_modules() if not module.training}
    if not still:
        return ()
    everything = ("",) if "" in still else tuple(still)
    args, kwargs = given
    forward = replace(workload, mode="inference", new_tokens=0)
    before = _done(graph)
    try:
        with in_mode(model, True):
            after = _done(capture(model, kwargs or args, workload=forward, composite=True))
    except CaptureError:
        return everything
    changed = {
        path for path, time in before.keys() | after.keys() if before.get((path, time)) != after.get((path, time))
    }
    if not changed <= still.keys():
        return everything
    kinds = {still[path] for path in changed}
    return tuple(path for path, kind in still.items() if kind in kinds)


def _done(graph: ModelGraph) -> _Done:
    times: dict[str, int] = {}
    keys = []
    for call in graph.calls:
        keys.append((call.path, times.get(call.path, 0)))
        times[call.path] = keys[-1][1] + 1
    found: _Done = {key: [] for key in keys}
    for call in graph.calls[1:]:
        found[keys[call.parent]].append(call.path)
    for op in graph.ops:
        name = name_of(op)
        if name != "contiguous":  # what drops lays out its result in another way
            found[keys[op.call]].append((name, "" if name in _DROPPING else repr(with_tensors(op, lambda node: None))))
    return found


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode inside."""
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        yield
    finally:
        for module, own in before:
            module.training = own

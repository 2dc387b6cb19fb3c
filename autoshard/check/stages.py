"""What must hold of a recorded forward so that its stages answer on several ranks, found in the graph alone.

Between stages go arguments and results of the modules that they compute, and nothing else: what a layer leaves in an
object or an attribute is on the rank of its stage only.
"""

from collections.abc import Mapping

import torch

from autoshard.capture.graph import ModelGraph, Op
from autoshard.common.module_paths import is_below
from autoshard.errors import PlanError
from autoshard.runtime.stage_tensor import INSTEAD


def check_apart(graph: ModelGraph, modules: Mapping[str, int]) -> None:
    """Raise `PlanError` where a stage, or code between stages, uses what another one keeps, or writes into it.

    `modules`: path of each module that one stage computes -> its stage.
    """
    owner = _owners(graph, modules)
    stage = [None if call < 0 else modules[graph.calls[call].path] for call in owner]
    given_out = {value for call in graph.calls if call.path in modules for value in call.outputs}
    born = {value.storage: value.op for value in reversed(graph.values)}
    changed: dict[int, str] = {}  # storage that a stage wrote into, and others have, too -> who wrote
    between: dict[int, tuple[int, int]] = {}  # storage of a stage that code between wrote into -> the value, the op
    for op in graph.ops:
        own = owner[op.call]
        reader = graph.calls[own].path if own >= 0 else "the code between them"
        for value in op.inputs:
            row = graph.values[value]
            if row.storage in changed and reader != changed[row.storage]:
                raise PlanError(f"{changed[row.storage]} writes into a tensor that code around it reads. {INSTEAD}")
            written, when = between.get(row.storage, (value, -1))
            if value != written and row.op < when:  # a copy of it may have been sent before
                path = graph.calls[owner[graph.ops[born[row.storage]].call]].path
                raise PlanError(f"the code between stages writes into a part of what {path} gave. {INSTEAD}")
            maker = -1 if row.op < 0 else owner[graph.ops[row.op].call]
            if maker < 0 or stage[graph.ops[row.op].call] == stage[op.call]:
                continue
            if value not in (given_out if own < 0 else graph.calls[own].inputs):
                raise PlanError(
                    f"{reader} uses what {graph.calls[maker].path} keeps (a cache that layers share, an attribute), so "
                    f"they can't be in different stages. {INSTEAD}"
                )
        if own >= 0:
            _note_writes(graph, op, born, stage, changed, reader)
            continue
        for value in op.mutates:
            first = born[graph.values[value].storage]
            if first >= 0 and owner[graph.ops[first].call] >= 0:
                between[graph.values[value].storage] = value, op.index


def _note_writes(
    graph: ModelGraph, op: Op, born: Mapping[int, int], stage: list[int | None], changed: dict[int, str], path: str
) -> None:
    for value in op.mutates:
        storage = graph.values[value].storage
        first = born[storage]
        names = [info.name for info in graph.tensors if info.storage == storage]
        inside = any(is_below(name, path) for name in names)
        if not (inside if first < 0 else stage[graph.ops[first].call] == stage[op.call]):
            changed.setdefault(storage, path)


def _owners(graph: ModelGraph, modules: Mapping[str, int]) -> list[int]:
    """Per call, the call of a stage's module that it is in, -1 for the code between them."""
    owner: list[int] = []
    for call in graph.calls:
        owner.append(call.index if call.path in modules else owner[call.parent] if call.parent >= 0 else -1)
    return owner


def find_alike(graph: ModelGraph, modules: Mapping[str, int]) -> tuple[str, ...]:
    """Paths of modules whose shapes inside depend on values, and which give one tensor as large as what they are given.

    `modules`: those that a stage computes.
    """
    tags = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    calls = {op.call for op in graph.ops if tags.intersection(getattr(op.target, "tags", ()))}
    found: dict[str, bool] = {}
    for call in map(graph.calls.__getitem__, sorted(calls)):
        if any(is_below(call.path, path) and call.path != path for path in modules):
            given = [graph.values[value] for value in (*call.inputs[:1], *call.outputs)]
            alike = call.output_paths == ("",) and len({(value.shape, value.dtype) for value in given}) == 1
            found[call.path] = found.get(call.path, True) and alike
    return tuple(path for path, alike in found.items() if alike)

"""Weights of experts, and which part of them a run reads: only that of experts to which a token is sent.

Experts whose weights are one tensor [experts, in, out] are multiplied by a grouped product, which passes by those
without rows. Experts in a list are modules of their own, whose calls say which were used. A module that is given rows,
choices and weights has experts in any form.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from autoshard.capture.graph import Call, ModelGraph, Op, name_of
from autoshard.capture.latest import Latest
from autoshard.common.module_paths import above, is_below, parent, relative

_PRODUCTS = {"mm": 0, "addmm": 1, "linear": 0, "matmul": 0}
"""Products of tokens with a matrix, and which input has the tokens."""


def expert_weights(graph: ModelGraph, ops: Iterable[Op]) -> dict[int, int]:
    """Return storage -> number of experts, of the weights that grouped products among these ops read."""
    return {
        graph.values[op.inputs[1]].storage: graph.values[op.inputs[1]].shape[0]
        for op in ops
        if is_grouped(op) and len(graph.values[op.inputs[1]].shape) == 3
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatched:
    """How a module of experts is called: experts(rows [T, width], choices [T, k], weights [T, k]) -> [T, width].

    `paths`: of the three among its arguments; `each`: k; `masks`: experts in choices [T, k, experts], 0 where they are
    numbers.
    """

    paths: tuple[str, str, str]
    width: int
    each: int
    masks: int


def dispatched(graph: ModelGraph) -> dict[str, Dispatched]:
    """Path -> how it is called, of modules that are called as experts are; `graph`: with composite ops."""
    found = {call.path: asked for call in graph.calls if (asked := _dispatched(graph, call)) is not None}
    return {
        path: asked for path, asked in found.items() if not any(is_below(path, one) for one in found if one != path)
    }


def _dispatched(graph: ModelGraph, call: Call) -> Dispatched | None:
    if len(call.outputs) != 1 or len(call.inputs) < 3:
        return None
    given = [(path, graph.values[value]) for path, value in zip(call.input_paths, call.inputs, strict=True)]
    floats = [(path, value.shape) for path, value in given if value.dtype.is_floating_point]
    for path, value in given:
        if value.dtype.is_floating_point or len(value.shape) not in (2, 3):
            continue
        count, each = value.shape[:2]
        rows = next((one for one in floats if len(one[1]) > 1 and prod(one[1][:-1]) == count), None)
        weights = next((one for one in floats if one[1] == (count, each) and one is not rows), None)
        if rows is not None and weights is not None and graph.values[call.outputs[0]].shape == rows[1]:
            masks = value.shape[2] if len(value.shape) == 3 else 0
            return Dispatched(paths=(rows[0], path, weights[0]), width=rows[1][-1], each=each, masks=masks)
    return None


def dispatched_weights(graph: ModelGraph) -> dict[int, int]:
    """Return storage -> number of experts, of the parameters of modules that are called as experts are."""
    found: dict[int, int] = {}
    for path, asked in dispatched(graph).items():
        own = {
            relative(tensor.name, path): tensor for tensor in graph.tensors
            if tensor.kind == "parameter" and is_below(tensor.name, path)
        }  # fmt: skip
        count = asked.masks or _count(graph, {name: tensor.shape for name, tensor in own.items()},
                                      {tensor.value for tensor in own.values()})  # fmt: skip
        found |= {graph.values[tensor.value].storage: count for tensor in own.values() if count > 1}
    return found


def _count(graph: ModelGraph, shapes: Mapping[str, tuple[int, ...]], values: Container[int]) -> int:
    """How many experts parameters have by their names and shapes: modules of each, or the first of three dimensions."""
    for depth in (1, 2):
        members: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
        for name, shape in shapes.items():
            members.setdefault(".".join(name.split(".")[:depth]), []).append((name.split(".", depth)[-1], shape))
        if len(members) > 1 and all(own == next(iter(members.values())) for own in members.values()):
            return len(members)
    first = {shape[0] for shape in shapes.values() if len(shape) > 2}
    if len(first) == 1:
        return first.pop()
    views = (
        graph.values[op.outputs[0]].shape for op in graph.ops if op.inputs and op.inputs[0] in values and op.outputs
    )
    return next((shape[0] for shape in views if len(shape) == 3), 0)


def hit_part(chosen: float, tokens: float) -> float:
    """Return the part of the experts that is read for so many tokens, if each goes to `chosen` of all (k / E)."""
    return 1 - (1 - min(1.0, chosen)) ** tokens


def hit_parts(graph: ModelGraph) -> Iterator[float]:
    """Yield the part of its experts' weights that each op reads: 1 for what has none.

    A grouped product gets its rows from the tokens that the product before it read.
    """
    values, tokens = graph.values, 0
    for op in graph.ops:
        name, hit = name_of(op), 1.0
        if name in _PRODUCTS and op.inputs:
            tokens = prod(values[op.inputs[_PRODUCTS[name]]].shape[:-1])
        elif is_grouped(op):
            shape, rows = values[op.inputs[1]].shape, prod(values[op.inputs[0]].shape[:-1])
            if len(shape) == 3 and tokens:
                hit = hit_part(rows / tokens / max(1, shape[0]), tokens)
        yield hit


def is_grouped(op: Op) -> bool:
    return name_of(op).endswith("grouped_mm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Routed:
    """Modules side by side of which one part of a run called some: another token calls others of them.

    `members`: their paths; `ops`: those inside of the ones that were called.
    """

    members: tuple[str, ...]
    ops: np.ndarray


_LATEST = Latest[tuple[Routed, ...]]()


def routed_modules(graph: ModelGraph) -> tuple[Routed, ...]:
    """Return the lists of modules of which each phase of a run called some but not all."""
    return _LATEST.of(graph, None, lambda: tuple(_routed(graph)))


def _routed(graph: ModelGraph) -> Iterator[Routed]:
    lists: dict[str, list[str]] = {}
    containers = {module.path for module in graph.modules if not module.callable}
    for module in graph.modules:
        if parent(module.path) in containers and module.path:
            lists.setdefault(parent(module.path), []).append(module.path)
    member_of = {path: path for members in lists.values() for path in members if len(members) > 1}
    member = [
        next((member_of[path] for path in (call.path, *above(call.path)) if path in member_of), "")
        for call in graph.calls
    ]
    for _, begin, end in graph.phases or (("forward", 0, len(graph.ops)),):
        ops: dict[str, list[int]] = {}
        for op in graph.ops[begin:end]:
            if member[op.call] and op.index not in graph.uncounted:
                ops.setdefault(member[op.call], []).append(op.index)
        for outer in dict.fromkeys(parent(path) for path in ops):
            called = [path for path in lists[outer] if path in ops]
            if len(called) < len(lists[outer]):
                yield Routed(members=tuple(lists[outer]), ops=np.array([op for path in called for op in ops[path]]))

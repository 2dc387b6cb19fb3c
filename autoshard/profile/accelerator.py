"""What accelerators compute with fewer bytes than the CPU, on which models are recorded.

softmax(q k), dropout, times v    with weights of [heads, S, S], where some are dropped, and k and v may differ
attention                         on an accelerator it is one kernel, in the dtype of q: its FLOPs are the same
mask of dropout                   a number in the dtype of what is dropped; on an accelerator a byte
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from autoshard.capture.graph import Function, ModelGraph, Save, Value, name_of
from autoshard.cluster.cluster import Cluster
from autoshard.profile.measure import profile_graph
from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class _Attention:
    """An attention that was recorded in parts. `alone`: nothing else is computed between `begin` and its end."""

    begin: int
    dtype: str
    scores: int
    alone: bool


def on_devices(profile: Profile, cluster: Cluster) -> Profile:
    """The profile of the same run on these devices: smaller where one of them is an accelerator."""
    if all(device.name.startswith(("cpu", "disk")) for device in cluster.devices):
        return profile
    graph = profile.graph
    if graph not in _FOUND:
        _FOUND[graph] = _smaller(graph)
    smaller, dtypes = _FOUND[graph]
    if smaller is graph:
        return profile
    made = profile_graph(smaller, profile.workload)
    op_dtypes = tuple(dtypes.get(index, dtype) for index, dtype in enumerate(made.op_dtypes))
    return replace(made, op_dtypes=op_dtypes, further=profile.further, source=profile.source)


_Found = tuple[ModelGraph, dict[int, str]]
_FOUND: weakref.WeakKeyDictionary[ModelGraph, _Found] = weakref.WeakKeyDictionary()


def _smaller(graph: ModelGraph) -> _Found:
    """The graph with fewer bytes, itself where there are no fewer; op -> in which dtype it computes there."""
    parts = _attentions(graph)
    inside = _inside(graph, parts)
    sizes = {**dict(_masks(graph)), **dict.fromkeys(inside, 0)}
    if not sizes:
        return graph, {}
    saves = _saves(graph, parts, inside)
    until = {graph.values[save.value].storage: save.released for save in saves}
    storages = (
        replace(row, nbytes=sizes.get(row.index, row.nbytes), died=max(row.died, until.get(row.index, row.died)))
        for row in graph.storages
    )
    values = (replace(row, nbytes=min(row.nbytes, sizes.get(row.storage, row.nbytes))) for row in graph.values)
    made = replace(graph, storages=tuple(storages), values=tuple(values), saves=(*graph.saves, *saves))
    return made, {index: attention.dtype for index, attention in parts.items()}


def _saves(graph: ModelGraph, parts: dict[int, _Attention], inside: set[int]) -> list[Save]:
    """What the kernel keeps for its backward: all that it is given, where what was recorded keeps copies of it."""
    ends = {one: index + 1 for index, one in parts.items() if graph.ops[index].backward}
    found = []
    for index, one in parts.items():
        op = graph.ops[index]
        if (
            one in ends
            and not op.backward
            and not inside.isdisjoint(graph.values[value].storage for value in op.outputs)
        ):
            given = (value for value in op.inputs if graph.values[value].storage not in inside)
            found += [Save(value=value, op=index, released=ends[one]) for value in given]
    return found


def _masks(graph: ModelGraph) -> Iterator[tuple[int, int]]:
    """(storage, bytes) of the masks of dropout."""
    for op in graph.ops:
        if name_of(op) == "bernoulli_":
            row, numel = graph.storages[graph.values[op.outputs[0]].storage], _numel(graph, op.outputs[0])
            if numel < row.nbytes:
                yield row.index, numel


def _attentions(graph: ModelGraph) -> dict[int, _Attention]:
    """Op, also of backward -> the attention that it is a part of."""
    found: dict[int, _Attention] = {}
    for function in graph.functions:
        ops = graph.ops[function.begin : function.end] if function.attends else ()
        weights = next((op.outputs[0] for op in ops if "softmax" in name_of(op)), None)
        if weights is not None:  # else it is one kernel on the CPU, too
            found |= dict.fromkeys((op.index for op in ops), _attention(graph, function, weights))
    backward = {op.index: found[op.forward] for op in graph.ops if op.forward in found} if found else {}
    return found | backward


def _attention(graph: ModelGraph, function: Function, weights: int) -> _Attention:
    read = (graph.values[value].storage for op in graph.ops[function.begin : function.end] for value in op.inputs)
    return _Attention(
        begin=function.begin,
        dtype=_dtype(graph.values[function.inputs[0]]),
        scores=_numel(graph, weights),
        alone=all(graph.storages[row].kind != "parameter" for row in read),
    )


def _inside(graph: ModelGraph, parts: dict[int, _Attention]) -> set[int]:
    """Storages that a kernel for attention does not have: what is seen inside of it alone."""
    made: dict[int, _Attention] = {}
    for index, one in parts.items():
        op = graph.ops[index]
        scaled = name_of(op) == "mul" and len(op.inputs) == 1  # q and k, before they are multiplied
        for row in (graph.values[value] for value in op.outputs):
            of_kernel = one.alone or scaled or prod(row.shape) == one.scores or _dtype(row) != one.dtype
            if of_kernel and graph.storages[row.storage].born == index and graph.storages[row.storage].nbytes:
                made[row.storage] = one
    seen = {graph.values[value].storage for value in graph.alive_at_end}
    for op in graph.ops if made else ():
        rows = (graph.values[value].storage for value in op.inputs)
        seen |= {row for row in rows if row in made and made[row] is not parts.get(op.index)}
    return made.keys() - seen


def _dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")


def _numel(graph: ModelGraph, value: int) -> int:
    return prod(graph.values[value].shape)

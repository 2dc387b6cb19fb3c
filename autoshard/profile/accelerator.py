"""What accelerators compute with fewer bytes than the CPU, on which models are recorded.

softmax(q k), dropout, times v    with weights of [heads, S, S], where some are dropped, and k and v may differ
attention                         on an accelerator it is one kernel, in the dtype of q: its FLOPs are the same
mask of dropout                   a number in the dtype of what is dropped; on an accelerator a byte
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch

from autoshard.capture.graph import Function, ModelGraph, Save, name_of
from autoshard.capture.latest import Latest
from autoshard.cluster.cluster import Cluster
from autoshard.profile.measure import profile_graph
from autoshard.profile.profile import Profile


@dataclass(frozen=True, slots=True)
class _Attention:
    """An attention that was recorded in parts. `alone`: nothing else is computed between `begin` and its end."""

    begin: int
    dtype: torch.dtype
    scores: int
    alone: bool


def on_devices(profile: Profile, cluster: Cluster) -> Profile:
    """The profile of the same run on these devices: smaller where one of them is an accelerator."""
    if all(device.name.startswith(("cpu", "disk")) for device in cluster.devices):
        return profile
    smaller = _LATEST.of(profile.graph, profile.workload, lambda: _smaller(profile))
    return profile if smaller is None else replace(smaller, further=profile.further, source=profile.source)


_LATEST = Latest[Profile | None]()


def _smaller(profile: Profile) -> Profile | None:
    """The profile with fewer bytes, of attention in the dtype in which it is computed there; None where none are fewer.

    It refers neither to the model nor to the graph, which would stay with it.
    """
    graph = profile.graph
    parts = _attentions(graph)
    inside = _inside(graph, parts)
    sizes = {**dict(_masks(graph)), **dict.fromkeys(inside, 0)}
    if not sizes:
        return None
    saves = _saves(graph, parts, inside)
    until = {graph.values[save.value].storage: save.released for save in saves}
    storages = (
        replace(row, nbytes=sizes.get(row.index, row.nbytes), died=max(row.died, until.get(row.index, row.died)))
        for row in graph.storages
    )
    values = (replace(row, nbytes=min(row.nbytes, sizes.get(row.storage, row.nbytes))) for row in graph.values)
    made = profile_graph(
        replace(graph, storages=tuple(storages), values=tuple(values), saves=(*graph.saves, *saves)), profile.workload
    )
    dtypes = {index: str(attention.dtype).removeprefix("torch.") for index, attention in parts.items()}
    return replace(made, op_dtypes=tuple(dtypes.get(index, dtype) for index, dtype in enumerate(made.op_dtypes)))


def _saves(graph: ModelGraph, parts: dict[int, _Attention], inside: set[int]) -> list[Save]:
    """What the kernel keeps for its backward: all that it is given, where what was recorded keeps copies of it."""
    ends = {one: index + 1 for index, one in parts.items() if graph.ops[index].backward}
    found = []
    for op in (graph.ops[index] for index, one in parts.items() if one in ends):
        made = {graph.values[value].storage for value in op.outputs}
        if not op.backward and made & inside:
            given = (value for value in op.inputs if graph.values[value].storage not in inside)
            found += [Save(value=value, op=op.index, released=ends[parts[op.index]]) for value in given]
    return found


def _masks(graph: ModelGraph) -> Iterator[tuple[int, int]]:
    """(storage, bytes) of the masks of dropout."""
    for op in graph.ops:
        if name_of(op) == "bernoulli_":
            mask = graph.values[op.outputs[0]]
            numel = prod(mask.shape)
            if numel < graph.storages[mask.storage].nbytes:
                yield mask.storage, numel


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
    given = (graph.values[value].dtype for value in function.inputs)
    return _Attention(
        begin=function.begin,
        dtype=next(dtype for dtype in given if dtype.is_floating_point),  # masks may be booleans
        scores=prod(graph.values[weights].shape),
        alone=all(graph.storages[row].kind != "parameter" for row in read),
    )


def _inside(graph: ModelGraph, parts: dict[int, _Attention]) -> set[int]:
    """Storages that a kernel for attention does not have: what is seen inside of it alone."""
    made: dict[int, _Attention] = {}
    for index, one in parts.items():
        op = graph.ops[index]
        scaled = name_of(op) == "mul" and len(op.inputs) == 1  # q and k, before they are multiplied
        for row in (graph.values[value] for value in op.outputs):
            of_kernel = one.alone or scaled or prod(row.shape) == one.scores or row.dtype != one.dtype
            if of_kernel and graph.storages[row.storage].born == index and graph.storages[row.storage].nbytes:
                made[row.storage] = one
    seen = {graph.values[value].storage for value in graph.alive_at_end}
    for op in graph.ops if made else ():
        rows = (graph.values[value].storage for value in op.inputs)
        seen |= {row for row in rows if row in made and made[row] is not parts.get(op.index)}
    return made.keys() - seen

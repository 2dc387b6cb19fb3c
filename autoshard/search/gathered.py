"""Layers whose parameters `fully_shard` may gather as one, apart from the rest of the model."""

from collections.abc import Sequence

import numpy as np

from autoshard.axes.regions import element_of
from autoshard.capture.columns import columns_of
from autoshard.capture.graph import ModelGraph
from autoshard.common.module_paths import is_below, parent


def gathered_alone(graph: ModelGraph, layers: Sequence[str]) -> list[str]:
    """Those of some layers, in the order in which they run, whose parameters nobody else reads.

    Each must need what the one before it made: all ranks gather together, so none may run a layer that others skip, as
    experts side by side may.
    """
    elements = frozenset(layers)
    layer_of = {one.storage: element_of(one.name, elements) for one in graph.tensors if one.kind == "parameter"}
    foreign = _beside_one_another(graph, layers)
    columns = columns_of(graph)
    reads = columns.inputs
    for at in np.flatnonzero(np.isin(columns.storage[reads.value], list(layer_of))).tolist():
        op, layer = graph.ops[reads.op[at]], layer_of[columns.storage[reads.value[at]]]
        if layer and not op.backward and not is_below(graph.calls[op.call].path, layer):
            foreign.add(layer)
    for names in graph.tied():  # one that is registered in two places belongs to both
        layers_of_it = {element_of(name, elements) for name in names}
        foreign |= layers_of_it if len(layers_of_it) > 1 else set()
    return [path for path in layers if path not in foreign]


def _beside_one_another(graph: ModelGraph, paths: Sequence[str]) -> set[str]:
    """Repeated modules of lists in which one does not need what the one before it made."""
    place = {path: at for at, path in enumerate(paths)}
    of_call = [place.get(element_of(call.path, place), -1) for call in graph.calls]
    needs: dict[int, int] = {}  # value -> the modules it was made with, one bit each
    seen = dict.fromkeys(range(len(paths)), 0)
    for op in graph.ops:
        if op.backward:
            continue
        mask = 0
        for value in op.inputs:
            mask |= needs.get(value, 0)
        at = of_call[op.call]
        if at >= 0:
            seen[at] |= mask
            mask |= 1 << at
        for value in op.outputs:
            needs[value] = needs.get(value, 0) | mask
    apart: set[str] = set()
    for at in range(1, len(paths)):
        if parent(paths[at]) == parent(paths[at - 1]) and not seen[at] >> (at - 1) & 1:
            apart.add(parent(paths[at]))
    return {path for path in paths if parent(path) in apart}

"""Modules that code around the model calls by itself."""

import torch

from autoshard.capture.graph import ModelGraph
from autoshard.plan.placement import Homes

_LOOK_UP = torch.ops.aten.embedding.default


def lookup_tables(graph: ModelGraph, homes: Homes) -> list[str]:
    """Modules that look up rows of a tensor of their own, which are called from code around the model as well."""
    own = {(tensor.module, tensor.storage) for tensor in graph.tensors}
    looking = [op for op in graph.ops if op.target is _LOOK_UP and not op.backward]
    found = [(graph.calls[op.call].path, graph.values[op.inputs[0]].storage) for op in looking]
    return [path for path, storage in dict.fromkeys(found) if (path, storage) in own and path in homes.homes]

"""Which modules may be away from their device between calls, and how the model is divided into such modules.

A module may be offloaded if all that ever reads its parameters runs inside its own calls:

    block.up, block.down       read by their own matmuls            each may be offloaded, and so may the block
    block.scale                read by the block's own forward      only with the block
    embed, head (tied)         one tensor, two modules              only with a module that holds both

A division starts at repeated blocks, the outermost elements of lists; each further one splits its largest modules.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.capture.graph import ModelGraph
from autoshard.common.module_paths import above, is_below, parent

_MOST_MODULES = 2_000
_MOST_DIVISIONS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloadable:
    """A module that may be offloaded: its parameters' storages (tied ones once), and its calls as (begin, end) ops."""

    path: str
    storages: tuple[int, ...]
    nbytes: int
    calls: tuple[tuple[int, int], ...]


def divisions(graph: ModelGraph) -> list[tuple[Offloadable, ...]]:
    """Divide the model into modules that may be offloaded, coarsest first; empty if none may be."""
    able = _streamable(graph)
    children = _children(graph)
    lists = {module.path for module in graph.modules if not module.callable}
    inside_list = {path for path in able if parent(path) in lists}
    over_list = {outer for path in inside_list for outer in above(path)}

    def below(path: str) -> Iterator[Offloadable]:
        """The largest modules under a path that are elements of lists, or that hold no such element."""
        for child in children.get(path, ()):
            if child in able and (child in inside_list or child not in over_list):
                yield able[child]
            else:
                yield from below(child)

    found: list[tuple[Offloadable, ...]] = []
    division = _apart(list(below("")))
    while division and len(division) <= _MOST_MODULES and len(found) < _MOST_DIVISIONS:
        found.append(tuple(division))
        largest = max(module.nbytes for module in division)
        split = [
            part
            for module in division
            for part in (list(below(module.path)) or [module] if module.nbytes == largest else [module])
        ]
        split = _apart(split)
        if not split or max(module.nbytes for module in split) == largest:
            break
        division = split
    return found


def _streamable(graph: ModelGraph) -> dict[str, Offloadable]:
    """Every module that may be offloaded, by path."""
    readers, kept = _readers(graph)
    names: dict[int, list[str]] = {}
    for tensor in graph.tensors:  # a module in two places of the tree has its tensors under the names of the first
        names.setdefault(tensor.storage, []).append(tensor.module)
    parameters: dict[str, dict[int, None]] = {}
    barred: set[str] = {""}
    for tensor in graph.tensors:
        if tensor.kind != "parameter" or not tensor.nbytes:
            continue
        for path in (tensor.module, *above(tensor.module)):
            parameters.setdefault(path, {})[tensor.storage] = None
            outside = any(not is_below(module, path) for module in names[tensor.storage])
            read_outside = tensor.storage in readers and path not in readers[tensor.storage]
            if tensor.storage in kept or outside or read_outside:
                barred.add(path)
    calls: dict[str, list[tuple[int, int]]] = {}
    for call in graph.calls:
        calls.setdefault(call.path, []).append((call.begin, call.end))
    table = {module.path: module for module in graph.modules}
    chosen = _chosen_by_data(graph, set(calls))
    uncounted = graph.uncounted
    return {
        path: Offloadable(
            path=path,
            storages=tuple(storages),
            nbytes=sum(graph.storages[storage].nbytes for storage in storages),
            calls=tuple(sorted(call for call in calls.get(path, ()) if call[0] not in uncounted)),
        )
        for path, storages in parameters.items()
        if path not in barred and path in table and table[path].callable and path not in chosen
    }


def _readers(graph: ModelGraph) -> tuple[dict[int, frozenset[str]], set[int]]:
    """Per parameter storage the modules inside whose calls all its reads are; and storages that are written or kept."""
    stacks: list[frozenset[str]] = []
    for call in graph.calls:
        stacks.append((stacks[call.parent] if call.parent >= 0 else frozenset()) | {call.path})
    of_parameter = {tensor.storage for tensor in graph.tensors if tensor.kind == "parameter"}
    values = graph.values
    readers: dict[int, frozenset[str]] = {}
    kept = {values[value].storage for value in (*graph.outputs, *graph.state, *graph.alive_after)}
    for op in graph.ops:
        for value in op.inputs:
            storage = values[value].storage
            if storage in of_parameter:
                readers[storage] = readers.get(storage, stacks[op.call]) & stacks[op.call]
        kept.update(values[value].storage for value in op.mutates)
    return readers, kept


def _chosen_by_data(graph: ModelGraph, called: set[str]) -> set[str]:
    """Modules that differ in a number of their name, of which this run called some: another run may call others."""
    isomorphic: dict[tuple[str, str], list[str]] = {}
    for module in graph.modules:
        if module.path and module.callable:
            name = re.sub("[0-9]+", "0", module.path.rpartition(".")[2])
            isomorphic.setdefault((parent(module.path), name), []).append(module.path)
    outer = {
        path for paths in isomorphic.values() if 0 < len(called.intersection(paths)) < len(paths) for path in paths
    }
    return {
        module.path for module in graph.modules if any(path in outer for path in (module.path, *above(module.path)))
    }


def _children(graph: ModelGraph) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {}
    for module in graph.modules:
        if module.path:
            children.setdefault(parent(module.path), []).append(module.path)
    return children


def _apart(modules: Sequence[Offloadable]) -> list[Offloadable]:
    """Leave out modules during whose calls others of them are called, which would need a slot more."""
    spans = sorted((begin, -end, module.path) for module in modules for begin, end in module.calls if end > begin)
    around: set[str] = set()
    open_calls: list[tuple[int, str]] = []
    for begin, negative_end, path in spans:
        open_calls = [(end, outer) for end, outer in open_calls if end > begin]
        around.update(outer for _, outer in open_calls if outer != path)
        open_calls.append((-negative_end, path))
    return [module for module in modules if module.path not in around]

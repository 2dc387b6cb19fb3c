"""What modules of a model that is to be cut give in the recorded run: what of it the runtime need not look at."""

from collections.abc import Sequence

from autoshard.axes.axis import describe
from autoshard.axes.groups import AxisGroups
from autoshard.capture.graph import ModelGraph
from autoshard.common.module_paths import above, is_below
from autoshard.plan.sharding import Cut, Part, Results, result_of


def find_results(found: AxisGroups, cuts: Sequence[Cut]) -> tuple[Results, ...]:
    """What the blocks of some cuts and all modules around them gave; `found`: the groups that were chosen from.

    What modules between the root and the blocks gave may be cut, and be put together only behind them.
    """
    blocks = {block for cut in cuts for block in cut.blocks}
    paths = {path for block in blocks for path in (block, *above(block))}
    number = {(cut.blocks, cut.shards): index for index, cut in enumerate(cuts)}
    groups = [group for group in found.groups if (group.blocks, group.shards) in number and group.walk is not None]
    if not groups:
        return ()
    graph = groups[0].walk.graph
    tensors: dict[str, set[str]] = {path: set() for path in paths}
    parts: dict[str, set[Part]] = {path: set() for path in paths}
    inside = _cut_inside_alone(graph, cuts)
    for call in graph.calls:
        if call.path not in paths:
            continue
        inner = call.path and call.path not in blocks
        for path, value in zip(call.output_paths, call.outputs, strict=True):
            cut = [
                (group, dim)
                for group in (groups if inner else ())
                if _may_be_cut(call.path, inside.get((number[group.blocks, group.shards], value), set()))
                for dim in group.walk.cut_dims(value, group.factor)
            ]
            if not cut:
                tensors[call.path].add(result_of(path, len(graph.values[value].shape)))
            elif value not in graph.outputs:  # which may be put together inside already
                group, dim = cut[0]
                axis = describe(group.walk.axes[value][dim], group.factor)
                parts[call.path].add(Part(path=path, dim=dim, axis=axis, cut=number[group.blocks, group.shards]))
    isomorphic: dict[tuple[tuple[str, ...], tuple[Part, ...]], list[str]] = {}
    for path in sorted(paths):
        about = tuple(sorted(tensors[path])), tuple(sorted(parts[path], key=lambda part: part.path))
        isomorphic.setdefault(about, []).append(path)
    return tuple(
        Results(modules=tuple(modules), tensors=whole, parts=cut) for (whole, cut), modules in isomorphic.items()
    )


def _cut_inside_alone(graph: ModelGraph, cuts: Sequence[Cut]) -> dict[tuple[int, int], set[str]]:
    """(cut, value) -> blocks that slice the value where they begin, or put it together where they end."""
    found: dict[tuple[int, int], set[str]] = {}
    for number, cut in enumerate(cuts):
        edges = {(action.kind, action.argument) for action in cut.actions if not action.module and not action.function}
        for call in graph.calls:
            if call.path not in cut.blocks:
                continue
            given = zip(call.input_paths, call.inputs, strict=True)
            given_back = zip(call.output_paths, call.outputs, strict=True)
            for kind, tensors in (("slice", given), ("gather", given_back)):
                for value in (value for path, value in tensors if (kind, path) in edges):
                    found.setdefault((number, value), set()).add(call.path)
    return found


def _may_be_cut(path: str, blocks: set[str]) -> bool:
    """Whether a module may give a part of a value that these blocks slice or put together: those around give all."""
    return not blocks or any(is_below(path, block) for block in blocks)

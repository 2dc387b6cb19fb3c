"""What modules of a model that is to be cut give in the recorded run: what of it the runtime need not look at."""

from collections.abc import Sequence

from autoshard.axes.groups import AxisGroups
from autoshard.module_paths import above
from autoshard.sharding import Cut, Results, result_of


def find_results(found: AxisGroups, cuts: Sequence[Cut]) -> tuple[Results, ...]:
    """What the blocks of some cuts and all modules around them gave; `found`: the groups that were chosen from.

    Of what modules between the root and the blocks gave, only what is not cut: they may hand that to the next module.
    """
    blocks = {block for cut in cuts for block in cut.blocks}
    paths = {path for block in blocks for path in (block, *above(block))}
    chosen = {(cut.blocks, cut.shards) for cut in cuts}
    groups = [group for group in found.groups if (group.blocks, group.shards) in chosen and group.walk is not None]
    if not groups:
        return ()
    graph = groups[0].walk.graph
    tensors: dict[str, set[str]] = {}
    for call in graph.calls:
        if call.path in paths:
            names = tensors.setdefault(call.path, set())
            inner = call.path and call.path not in blocks
            for path, value in zip(call.output_paths, call.outputs, strict=True):
                if not inner or not any(group.walk.cut_dims(value, group.leaf) for group in groups):
                    names.add(result_of(path, len(graph.values[value].shape)))
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, names in tensors.items():
        alike.setdefault(tuple(sorted(names)), []).append(path)
    return tuple(Results(modules=tuple(modules), tensors=given) for given, modules in alike.items())

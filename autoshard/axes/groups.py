"""Axis groups: the factors that can be cut, what is cut with each, and where its cut and uncut tensors meet."""

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from autoshard.axes.axis import Factor, covers, describe, factors_of, local_size, times
from autoshard.axes.communication import CommunicationPoints, Lookup, Unplaceable
from autoshard.axes.regions import Region, element_of, find_regions, leaf_modules, leaf_regions, shared_tensors
from autoshard.axes.walk import AxisWalk, walk_over
from autoshard.capture.graph import Call, ModelGraph, TensorInfo
from autoshard.common.module_paths import is_below, join, relative
from autoshard.plan.sharding import Action, Cut, Shard, count_collectives


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroup:
    """Dimensions of parameters that can be cut together, in each of `blocks` alike (names are relative to them).

    Attributes:
        size: how many slices there are.
        shards: the dimensions that are cut.
        actions: what the runtime must do where cut and uncut tensors meet; see `sharding.Action`.
        summed: parameters that stay whole and are used inside the cut: every rank has a part of their gradient.
        nbytes: bytes of parameters that are cut, in one block.
        flops: of one forward of one block, those that are shared among the ranks.
        reduced_bytes, gathered_bytes: of whole tensors that are summed, or put together, in one forward of one block;
        added_bytes: of each rank, of what is gathered to be added up.
        conflicts: indices of groups of the same blocks that can't be cut at the same time: they share a tensor, or of
            one tensor gradients would be in parts for both, and summed twice.
        factor: the factor itself, and `walk` the analysis it is from; for checks made in the same process.
        partial: values that are cut, or whose gradient is in parts, in the block that was analysed.
        with_parts: modules inside that are given, or give, a part of a tensor.
        ops: the ops of every block, in the order of `walked`, which are those that `walk` has.
    """

    index: int
    blocks: tuple[str, ...]
    size: int
    shards: tuple[Shard, ...]
    actions: tuple[Action, ...]
    summed: tuple[str, ...]
    nbytes: int
    flops: int
    reduced_bytes: int
    gathered_bytes: int
    added_bytes: int = 0
    conflicts: tuple[int, ...] = ()
    factor: Factor
    walk: AxisWalk
    ops: tuple[tuple[int, ...], ...] = ()
    walked: tuple[int, ...] = ()
    partial: frozenset[int] = frozenset()
    with_parts: tuple[str, ...] = ()

    def within(self, blocks: Collection[str]) -> "AxisGroup | None":
        """The same of some blocks only; None where it has none of them."""
        kept = [place for place, block in enumerate(self.blocks) if block in blocks]
        if not kept:
            return None
        own = tuple(self.blocks[place] for place in kept)
        return dataclasses.replace(self, blocks=own, ops=tuple(self.ops[place] for place in kept))

    def as_cut(self, shares: tuple[int, ...]) -> Cut:
        """What the analysis says of the group, unchecked: neither its scales are known, nor whether it is all."""
        return Cut(
            blocks=self.blocks, size=self.size, shares=shares, shards=self.shards, actions=self.actions,
            summed=self.summed, with_parts=self.with_parts, training=True,  # the mode is that in which it was found
        )  # fmt: skip

    @property
    def sent_bytes(self) -> int:
        """Bytes that ranks send in one forward of one block: all-reduces send twice."""
        return 2 * self.reduced_bytes + self.gathered_bytes + self.added_bytes

    @property
    def reductions(self) -> int:
        """All-reduces of one forward of one block."""
        return count_collectives(self.actions)[0]

    @property
    def gathers(self) -> int:
        """All-gathers of one forward of one block, also of what is added up then."""
        return count_collectives(self.actions)[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unshardable:
    """A dimension of a parameter that can't be cut, and why: the op and the module that stand against it."""

    name: str
    dim: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisGroups:
    """What the axis analysis found in a model."""

    groups: tuple[AxisGroup, ...]
    unshardable: tuple[Unshardable, ...]
    regions: tuple[Region, ...]


def find_groups(graph: ModelGraph) -> AxisGroups:
    """Find what can be cut in a graph that was captured with `composite=True`.

    First in regions (`regions.find_regions`); then in every module that has parameters of its own, for itself: what
    such a module makes is gathered right behind it, so less can be in the way, and more is sent.
    """
    lookup = Lookup(graph)
    regions = find_regions(graph)
    shared = shared_tensors(graph, regions)
    groups: list[AxisGroup] = []
    unshardable: list[Unshardable] = []
    for region in regions:
        found, refused = _groups_of(lookup, region, shared, len(groups))
        groups += found
        unshardable += refused
    alone: list[AxisGroup] = []
    touching = _touching(graph, groups)
    modules = leaf_regions(graph, {path for path, indices in touching.items() if indices})
    shared = shared_tensors(graph, modules)
    for region in modules:
        alone += _groups_of(lookup, region, shared, len(groups) + len(alone))[0]
    return AxisGroups(groups=_excluding(groups, alone, touching), unshardable=tuple(unshardable), regions=regions)


def group_of(found: AxisGroups, cut: Cut) -> AxisGroup | None:
    """The group that a cut was made of."""
    names = {(shard.name, shard.dim) for shard in cut.shards}
    return next(
        (
            group for group in found.groups
            if group.blocks == cut.blocks and {(one.name, one.dim) for one in group.shards} == names
        ),
        None,
    )  # fmt: skip


def _excluding(
    groups: list[AxisGroup], alone: list[AxisGroup], touching: Mapping[str, Collection[int]]
) -> tuple[AxisGroup, ...]:
    """All groups; one of a module alone conflicts with those that have cut what the module reads or makes."""
    conflicts: dict[int, set[int]] = {group.index: set(group.conflicts) for group in (*groups, *alone)}
    for one in alone:
        for index in {index for path in one.blocks for index in touching[path]}:
            conflicts[one.index].add(index)
            conflicts[index].add(one.index)
    return tuple(
        dataclasses.replace(group, conflicts=tuple(sorted(conflicts[group.index]))) for group in (*groups, *alone)
    )


def _touching(graph: ModelGraph, groups: list[AxisGroup]) -> dict[str, frozenset[int]]:
    """For every module of `leaf_modules`, the groups that have cut what it reads or makes, or its gradient in parts.

    Only those of its region: what leaves a region is gathered before anything outside reads it. It is looked up in the
    first block of a group, which is the one that was analysed.
    """
    of_block: dict[str, list[AxisGroup]] = {}
    for group in groups:
        for block in group.blocks:
            of_block.setdefault(block, []).append(group)
    places: dict[str, tuple[str, str]] = {}  # module -> its block, and its path in the first block alike
    for path in leaf_modules(graph):
        block = element_of(path, of_block)
        first = of_block[block][0].blocks[0] if block in of_block else block
        places[path] = block, join(first, relative(path, block))
    calls: dict[str, list[Call]] = {}
    for call in graph.calls:
        calls.setdefault(call.path, []).append(call)
    found: dict[str, frozenset[int]] = {}
    for block, place in places.values():
        if place not in found:
            rows = [(call, set(_touched(graph, call))) for call in calls.get(place, ())]
            found[place] = frozenset(
                group.index
                for group in of_block.get(block, ())
                for call, values in rows
                if not group.walk.ops.isdisjoint(range(call.begin, call.end)) and not group.partial.isdisjoint(values)
            )
    return {path: found[place] for path, (_, place) in places.items()}


def _touched(graph: ModelGraph, call: Call) -> Iterator[int]:
    """The values that a call of a module is given, reads, makes and returns."""
    yield from (*call.inputs, *call.outputs)
    for op in graph.ops[call.begin : call.end]:
        yield from (*op.inputs, *op.outputs)


def _groups_of(
    lookup: Lookup, region: Region, shared: frozenset[int], first: int
) -> tuple[list[AxisGroup], list[Unshardable]]:
    """The groups of one region, numbered from `first`, and what can't be cut in it."""
    graph = lookup.graph
    walk = walk_over(graph, (graph.ops[index] for index in region.ops))
    named = [tensor for tensor in graph.tensors if tensor.value in walk.axes]
    own = {tensor.value for tensor in named if is_below(tensor.name, region.path)}
    tensors = [tensor for tensor in named if tensor.value not in own or is_below(tensor.name, region.path)]
    for tensor in tensors:
        handed_out = tensor.value in graph.outputs
        if tensor.value in shared or tensor.value not in own or handed_out:
            walk.why = f"{tensor.name} is {'an output of the model' if handed_out else 'used in several places'}"
            walk.block(walk.axes[tensor.value])
    places = CommunicationPoints(lookup, region, walk, shared)
    reasons: dict[Factor, str] = {}
    made: list[AxisGroup] = []
    for factor in dict.fromkeys(
        factor for tensor in tensors for axis in walk.axes[tensor.value] for factor in factors_of(axis)
    ):
        reasons[factor] = factor.unshardable or _refused(graph, walk, places, factor)
        if reasons[factor] or factor.size < 2:
            continue
        members = [tensor for tensor in tensors if walk.cut_dims(tensor.value, factor)]
        if not any(tensor.kind == "parameter" and len(tensor.shape) > 1 for tensor in members):
            continue
        try:
            actions, summed, with_parts = places.actions(factor)
        except Unplaceable as error:
            reasons[factor] = str(error)
            continue
        reduced, added, gathered = places.sent_bytes(factor)
        made.append(
            AxisGroup(
                index=first + len(made),
                blocks=region.paths,
                size=factor.size,
                shards=tuple(_shards(walk, region, members, factor)),
                actions=actions,
                summed=summed,
                nbytes=sum(_cut_bytes(walk, tensor, factor) for tensor in members if tensor.kind == "parameter"),
                flops=sum(graph.ops[op].flops for op in region.ops if walk.works_on(op, factor)),
                reduced_bytes=reduced,
                gathered_bytes=gathered,
                added_bytes=added,
                factor=factor,
                walk=walk,
                ops=region.each,
                walked=region.each[0],
                partial=places.partial(factor),
                with_parts=with_parts,
            )
        )
    return _with_conflicts(made), list(_unshardable(walk, tensors, reasons))


def _refused(graph: ModelGraph, walk: AxisWalk, places: CommunicationPoints, factor: Factor) -> str:
    """Why a factor that no op blocks can't be cut all the same; "" if it can."""
    for contraction in walk.contractions:
        if factor in factors_of(contraction.axis) and not covers(contraction.axis, factor):
            return f"{places.where(contraction.op)} sums over more than it"
    for value in sorted(walk.values_with(factor)):
        if sum(times(axis, factor) for axis in walk.axes[value]) > 1:
            return f"a tensor of {places.where(graph.values[value].op)} would be cut twice"
    if places.is_residual(factor):
        return "it runs through the block from its input to its output"
    return ""


def _shards(walk: AxisWalk, region: Region, members: list[TensorInfo], factor: Factor) -> Iterator[Shard]:
    for tensor in members:
        name = relative(tensor.name, region.path)
        for dim in walk.cut_dims(tensor.value, factor):
            yield Shard(name=name, dim=dim, axis=describe(walk.axes[tensor.value][dim], factor))


def _cut_bytes(walk: AxisWalk, tensor: TensorInfo, factor: Factor) -> int:
    (dim,) = walk.cut_dims(tensor.value, factor)
    axis = walk.axes[tensor.value][dim]
    part = tensor.shape[dim] - local_size(axis, {factor: 0})
    return tensor.nbytes * part // max(1, tensor.shape[dim])


def _with_conflicts(groups: list[AxisGroup]) -> list[AxisGroup]:
    """Two groups conflict where both would cut one tensor, or have parts of its gradient: each sums all of them."""
    return [
        dataclasses.replace(
            group,
            conflicts=tuple(
                other.index for other in groups if other is not group and not group.partial.isdisjoint(other.partial)
            ),
        )
        for group in groups
    ]


def _unshardable(walk: AxisWalk, tensors: list[TensorInfo], reasons: dict[Factor, str]) -> Iterator[Unshardable]:
    for tensor in tensors:
        if tensor.kind == "parameter" and len(tensor.shape) > 1:
            for dim, axis in enumerate(walk.axes[tensor.value]):
                why = [reasons[factor] for factor in factors_of(axis) if reasons[factor]]
                if why:
                    yield Unshardable(name=tensor.name, dim=dim, reason=why[0])

"""What a plan with cuts costs: the recorded run as one rank sees it, priced like any other, and the collectives.

A rank runs the ops of the whole model on smaller tensors. Which tensors of the run are smaller, and how much, is found
by following the axes of the cut parameters through it. What can't be followed counts whole, as does what a block hands
out, so memory and seconds are rather over- than underestimated; the estimate names what it could not follow.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, prod

import numpy as np

from autoshard.axes.axis import Factor, describe, factors_of, local_size
from autoshard.axes.decomposed import DECOMPOSED
from autoshard.axes.regions import OUTSIDE, element_of, outside_ops
from autoshard.axes.rules import RULES
from autoshard.axes.walk import AxisWalk
from autoshard.capture.graph import ModelGraph, TensorInfo, name_of
from autoshard.capture.replaced import changed
from autoshard.cluster.cluster import Cluster
from autoshard.common.module_paths import join, relative
from autoshard.engine.estimate import DeviceEstimate, Estimate
from autoshard.engine.links import Collective
from autoshard.engine.placed import check_devices, estimate_placed, of_every_device
from autoshard.errors import PlanError
from autoshard.flow import flow
from autoshard.plan import Plan
from autoshard.plan.sharding import Cut, coordinates_of, kept
from autoshard.profile.part import Sizes, smaller_sizes, with_sizes
from autoshard.profile.profile import Profile

Parts = tuple[float, ...]
"""Per rank, the part of a tensor that it has."""


@dataclass(slots=True, kw_only=True)
class CutTrace:
    """What cuts do to one recorded run.

    Attributes:
        parts: value -> the part of it that each rank has; values that all ranks have whole are absent.
        collectives: of a forward, block by block.
        unshardable: blocks in which a cut could not be followed.
    """

    parts: dict[int, Parts] = field(default_factory=dict)
    collectives: list[Collective] = field(default_factory=list)
    unshardable: list[str] = field(default_factory=list)

    def of_pass(self, training: bool) -> list[Collective]:
        """The collectives of a forward, and in training those of its backward."""
        return [*self.collectives, *(one.backward for one in self.collectives if training)]


def estimate_cuts(plan: Plan, profile: Profile, cluster: Cluster, *, tracer: "Tracer | None" = None) -> Estimate:
    """Compute the consequences of a plan with cuts: rank i is `plan.devices[i]`, all work on the same pass.

    `tracer`: of the profile's graph, if there is one already. Raises `PlanError` if the plan names a device that the
    cluster lacks, or cuts what the model does not have.
    """
    names = [device.name for device in plan.devices]
    check_devices(names, cluster, "cuts the model over")
    traced = (tracer or Tracer(profile.graph)).trace(plan.cuts)
    together = traced.of_pass(profile.workload.training)
    seconds = sum(collective.seconds(cluster, names) for collective in together)
    gathers = sum(collective.gathers for collective in together)
    ranks = _ranks(plan, profile, cluster, traced)
    ranks = {name: replace(row, transfer_seconds=seconds) for name, row in ranks.items()}
    devices = of_every_device(ranks, cluster)
    latency = max(device.compute_seconds for device in devices) + seconds
    notes = profile.graph.notes
    if traced.unshardable:
        shown = ", ".join(path or "the model itself" for path in traced.unshardable[:3])
        more = f" and {len(traced.unshardable) - 3} more" if len(traced.unshardable) > 3 else ""
        notes += (f"In {shown}{more} activations are counted whole and collectives not: the cut can't be followed.",)
    return Estimate(
        devices=devices,
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=latency,
        notes=notes,
        collective_seconds=seconds,
        all_reduces=len(together) - gathers,
        all_gathers=gathers,
    )


def _ranks(plan: Plan, profile: Profile, cluster: Cluster, traced: CutTrace) -> dict[str, DeviceEstimate]:
    """Every rank's bytes and seconds; ranks with equal shares on equal devices are computed once."""
    known: dict[object, DeviceEstimate] = {}
    found: dict[str, DeviceEstimate] = {}
    for rank, row in enumerate(plan.devices):
        device = cluster.device(row.name)
        shares = tuple(cut.shares[rank] for cut in plan.cuts)
        key = (shares, *device.speed, device.kind, device.memory_bytes, device.name.partition(":")[0])
        if key not in known:
            local = local_profile(profile, traced, rank)
            one = replace(cluster, devices=(device,))
            moves = flow(local.graph, {"": row.name})
            known[key] = estimate_placed(local, one, moves, plan.objective).devices[0]
        found[row.name] = replace(known[key], name=row.name)
    return found


def local_profile(profile: Profile, traced: CutTrace, rank: int) -> Profile:
    """The recorded run as one rank sees it: the same ops, with the sizes, FLOPs and bytes of its tensors."""
    sizes, tensors = local_sizes(profile, traced, rank)
    return with_sizes(profile, sizes, tensors=tensors)


def local_sizes(profile: Profile, traced: CutTrace, rank: int) -> tuple[Sizes, tuple[TensorInfo, ...]]:
    """The sizes of the recorded run as one rank sees it, and its parameters and buffers."""
    parts = np.ones(len(profile.graph.values))
    parts[list(traced.parts)] = [part[rank] for part in traced.parts.values()]
    tensors = profile.graph.tensors
    smaller = changed(tensors, nbytes=[ceil(tensor.nbytes * float(parts[tensor.value])) for tensor in tensors])
    return smaller_sizes(profile, parts), smaller


class Tracer:
    """Follows cuts through one recorded run; what does not depend on the shares is worked out once."""

    def __init__(self, graph: ModelGraph) -> None:
        self.graph = graph
        self.by_name = {tensor.name: tensor for tensor in graph.tensors}
        returned = (value for call in graph.calls if call.path == OUTSIDE for value in call.outputs)
        self._ends_once = set(graph.outputs).issuperset(returned)
        self._blocks: dict[frozenset[str], _Blocks] = {}
        self._walks: dict[tuple[frozenset[str], str], AxisWalk] = {}

    def trace(self, cuts: Sequence[Cut]) -> CutTrace:
        """Follow these cuts. Raises `PlanError` if they are of another model."""
        traced = CutTrace()
        together: dict[str, list[Cut]] = {}
        for cut in cuts:
            for block in cut.blocks:
                together.setdefault(block, []).append(cut)
                traced.parts |= self._parts(cut, block)
        names = self._known(frozenset(together))
        blocks = self._blocks[names]
        done: dict[object, _Pattern] = {}
        for block, here in together.items():
            values = [self.by_name[join(block, shard.name)].value for cut in here for shard in cut.shards]
            look, numbers = blocks.look(block), blocks.numbers[block]
            key = (tuple(map(id, here)), look, *(numbers.get(value, -1) for value in values))
            if key not in done:
                done[key] = _Pattern(blocks, block, self._trace_block(names, block, here))
            done[key].add_to(traced, block)
        return traced

    def _parts(self, cut: Cut, block: str) -> dict[int, Parts]:
        parts = {}
        for shard in cut.shards:
            name = join(block, shard.name)
            if name not in self.by_name or shard.dim >= len(self.by_name[name].shape):
                raise PlanError(f"the plan cuts {name}, which this model does not have. Plan this model again.")
            parts[self.by_name[name].value] = parts_of(shard.axis, cut.shares)
        return parts

    def _known(self, names: frozenset[str]) -> frozenset[str]:
        """The names by which the blocks of a trace are kept: what lies outside changes nothing inside."""
        if self._ends_once and names | {OUTSIDE} in self._blocks:
            names |= {OUTSIDE}
        if names not in self._blocks:
            self._blocks[names] = _Blocks(self.graph, names)
        return names

    def _trace_block(self, names: frozenset[str], block: str, here: Sequence[Cut]) -> CutTrace:
        blocks, traced = self._blocks[names], CutTrace()
        if (names, block) not in self._walks:
            walk = AxisWalk(self.graph, table=RULES | DECOMPOSED)
            for index in blocks.ops[block]:
                walk.run(self.graph.ops[index])
            walk.resolve_all()
            self._walks[names, block] = walk
        walk = self._walks[names, block]
        for cut in here:
            factor = _factor(walk, cut, [self.by_name[join(block, shard.name)].value for shard in cut.shards])
            if factor is None:
                traced.unshardable.append(block)
                continue
            _trace(self.graph, blocks, block, walk, factor, cut, traced)
        return traced


@cache
def parts_of(axis: str, shares: tuple[int, ...]) -> Parts:
    """The part of a dimension that each rank keeps."""
    size = len(coordinates_of(axis))
    return tuple(len(kept(axis, shares, rank)) / size for rank in range(len(shares)))


class _Blocks:
    """Which ops belong to which of some blocks.

    Attributes:
        leaving: values that others read, or that a block returns.
        numbers: per block that was looked at, its values in the order in which its ops touch them -> 0, 1, …
    """

    def __init__(self, graph: ModelGraph, blocks: Iterable[str]) -> None:
        self.graph = graph
        known = set(blocks)
        inner: set[int] = set()
        if OUTSIDE in known:
            inner.update(outside_ops(graph))
        paths = {call.path for call in graph.calls}
        of_path = {at: element_of(at, known) or None for at in paths}
        of_call = [of_path[call.path] for call in graph.calls]
        self.of_op: list[str | None] = [of_call[op.call] for op in graph.ops]
        self.ops: dict[str, list[int]] = {block: [] for block in known}
        for op in graph.ops:
            block = self.of_op[op.index]
            if block is None and (op.forward if op.backward else op.index) in inner:
                block = self.of_op[op.index] = OUTSIDE
            if block is not None:
                self.ops[block].append(op.index)
        self.leaving = {*graph.outputs}
        for op in graph.ops:
            here = self.of_op[op.index]
            self.leaving.update(v for v in op.inputs if graph.values[v].op >= 0 and self.maker(v) != here)
        for call in graph.calls:
            if call.path in known:  # what a block returns is put together, whether somebody reads it or not
                self.leaving.update(call.outputs)
        self.numbers: dict[str, dict[int, int]] = {}
        self._looks: dict[str, int] = {}
        self._known_looks: dict[tuple[object, ...], int] = {}

    def look(self, block: str) -> int:
        """The number of the ops of a block with their values numbered: blocks that look the same are cut alike."""
        if block not in self._looks:
            self._looks[block] = self._known_looks.setdefault(self._look(block), len(self._known_looks))
        return self._looks[block]

    def _look(self, block: str) -> tuple[object, ...]:
        graph, numbers, rows = self.graph, self.numbers.setdefault(block, {}), list[object]()
        for index in self.ops[block]:
            op = graph.ops[index]
            touched = tuple(numbers.setdefault(value, len(numbers)) for value in (*op.inputs, *op.outputs))
            rows.append(
                (id(op.target), len(op.inputs), touched, index < graph.backward_begin, index in graph.uncounted)
            )
        about = ((graph.values[value], value in self.leaving, self.maker(value) == block) for value in numbers)
        rows += [(row.shape, row.dtype, row.nbytes, leaves_block, inside) for row, leaves_block, inside in about]
        return tuple(rows)

    def maker(self, value: int) -> str | None:
        """The block that made a value."""
        op = self.graph.values[value].op
        return self.of_op[op] if op >= 0 else None


class _Pattern:
    """What was found in one block, for all that look the same: values by their place in it."""

    def __init__(self, blocks: _Blocks, block: str, found: CutTrace) -> None:
        self.blocks, self.found = blocks, found
        self.values = [blocks.numbers[block][value] for value in found.parts]

    def add_to(self, traced: CutTrace, block: str) -> None:
        """Note the same of a block."""
        values = list(self.blocks.numbers[block])
        traced.parts.update(zip(map(values.__getitem__, self.values), self.found.parts.values(), strict=True))
        traced.collectives += self.found.collectives
        traced.unshardable += [block] * len(self.found.unshardable)


def _factor(walk: AxisWalk, cut: Cut, values: list[int]) -> Factor | None:
    """The factor that the shards of a cut describe, if all of them have it in this run."""
    shard = cut.shards[0]
    for factor in factors_of(walk.of(values[0])[shard.dim]):
        good = (
            describe(walk.of(value)[shard.dim], factor) == shard.axis
            for shard, value in zip(cut.shards, values, strict=True)
        )
        if factor.size == cut.size and all(good):
            return factor
    return None


def _trace(
    graph: ModelGraph, blocks: _Blocks, block: str, walk: AxisWalk, factor: Factor, cut: Cut, traced: CutTrace
) -> None:
    """Note what one cut makes smaller in one block, what is summed and what is put together."""
    uncounted, begin = graph.uncounted, graph.backward_begin
    for value, axes in walk.axes.items():
        maker = graph.values[value].op
        if maker < 0 or blocks.of_op[maker] != block or not walk.cut_dims(value, factor):
            continue
        if value in blocks.leaving:
            if maker < begin and maker not in uncounted:
                traced.collectives.append(Collective(gathers=True, nbytes=graph.values[value].nbytes))
            continue
        whole = max(prod(graph.values[value].shape), 1)
        sizes = [prod(local_size(axis, {factor: share}) for axis in axes) / whole for share in cut.shares]
        known = traced.parts.get(value, (1.0,) * cut.degree)
        traced.parts[value] = tuple(min(one, other) for one, other in zip(known, sizes, strict=True))
    gathered = {value for value in blocks.leaving if blocks.maker(value) == block}
    summing = {contraction.op for contraction in walk.contractions if factor in factors_of(contraction.axis)}
    little = {(action.module, action.function) for action in cut.actions if action.gathered}
    for op in sorted(summing):
        partial = any(walk.cut_dims(value, factor) for value in graph.ops[op].inputs if value not in gathered)
        if partial and op < begin and op not in uncounted:
            place = relative(graph.calls[graph.ops[op].call].path, block), name_of(graph.ops[op])
            added = cut.degree if place in little else 0
            traced.collectives += [
                Collective(gathers=added > 0, nbytes=nbytes * max(added, 1), added=added)
                for nbytes in [graph.values[value].nbytes for value in graph.ops[op].outputs[:1]]
            ]

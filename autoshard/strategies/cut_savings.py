"""What cutting a group takes off a device: the ops of the recorded run that get smaller, as arrays.

    an op of which a rank has the part f:  max(FLOPs (1 - a (1 - f)) / rate, bytes (1 - b (1 - f)) / bandwidth) + launch

where a and b say how much of its FLOPs, and of the bytes it moves, is cut with the group: 1 for a product of cut
matrices, less for what also reads tensors that every rank has whole. They are those of the estimate (`engine.cuts`,
`profile.part`), so the sum over groups is what the estimate says, but for ops that two groups make smaller.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from autoshard.axes.groups import AxisGroup
from autoshard.axes.unchecked import as_cut
from autoshard.capture.columns import columns_of
from autoshard.capture.latest import Latest
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.common.module_paths import join
from autoshard.engine.cuts import Collective, CutTrace, Tracer
from autoshard.engine.timing import counted_flops, optimizer_seconds, roofline
from autoshard.plan.sharding import Cut, even_shares
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saving:
    """Of one group, in the first of its blocks.

    Attributes:
        flops, moved: [ops] of the ops that get smaller, whole. dtypes: theirs.
        flops_cut, moved_cut: [ops] how much of these is cut: a and b above.
        trained_bytes: parameters that an optimizer steps and that are cut.
        collectives: of one pass.
    """

    flops: Array
    moved: Array
    dtypes: tuple[str, ...]
    flops_cut: Array
    moved_cut: Array
    trained_bytes: int
    collectives: tuple[Collective, ...]

    def seconds(self, profile: Profile, device: Device, part: float) -> float:
        """Seconds that a device saves in one block if it has this part of the group."""
        gone = 1 - part
        flops = np.stack([self.flops, self.flops * (1 - gone * self.flops_cut)])
        moved = np.stack([self.moved, self.moved * (1 - gone * self.moved_cut)])
        whole, own = roofline(flops, moved, self.dtypes, device)
        return float((whole - own).sum()) + optimizer_seconds(gone * self.trained_bytes, profile.workload, device)

    def collective_seconds(self, cluster: Cluster, names: Sequence[str]) -> float:
        """Seconds of the all-reduces and gathers of one block over some devices."""
        return sum(one.over(len(names)).seconds(cluster, names) for one in self.collectives)


_LATEST = Latest[tuple[Saving, ...]]()


def savings_of(
    profile: Profile, groups: Sequence[AxisGroup], alone: Collection[int], tracer: Tracer | None = None
) -> tuple[Saving, ...]:
    """Work out what cutting each group saves. `alone`: indices of groups of single modules, which lie inside blocks.

    `tracer`: of the profile's graph, if there is one already.
    """
    halves = tuple(as_cut(group, even_shares(group.size, 2)) for group in groups)  # as much is cut over any number
    of_module = tuple(group.index in alone for group in groups)
    make = partial(_savings, profile, halves, of_module, tracer or Tracer(profile.graph))
    return _LATEST.of(profile.graph, (halves, of_module, profile.op_bytes), make)


def _savings(profile: Profile, halves: Sequence[Cut], of_module: Sequence[bool], tracer: Tracer) -> tuple[Saving, ...]:
    blocks = {block for cut, alone in zip(halves, of_module, strict=True) if not alone for block in cut.blocks}
    modules = {cut.blocks[0] for cut, alone in zip(halves, of_module, strict=True) if alone}
    flops, moved = counted_flops(profile), np.array(profile.op_bytes, np.float64)
    trained = dict(trained_sizes(profile.graph)) if profile.workload.training else {}
    return tuple(
        _saving(profile, cut, tracer.trace_first(cut, modules if alone else blocks), flops, moved, trained)
        for cut, alone in zip(halves, of_module, strict=True)
    )


def _saving(
    profile: Profile, half: Cut, traced: CutTrace, flops: Array, moved: Array, trained: Mapping[str, int]
) -> Saving:
    graph, columns = profile.graph, columns_of(profile.graph)
    gone = np.zeros(len(graph.values))
    gone[list(traced.parts)] = [1 - part[0] for part in traced.parts.values()]
    gone /= 1 - half.shares[0] / half.size
    touched = columns.touched
    smaller = np.flatnonzero(touched.has(gone > 0))
    nbytes, cut_bytes = (touched.sums(size)[smaller] for size in (columns.value_bytes, columns.value_bytes * gone))
    cut = {join(half.blocks[0], shard.name) for shard in half.shards}
    return Saving(
        flops=flops[smaller],
        moved=moved[smaller],
        dtypes=tuple(profile.op_dtypes[op] for op in smaller.tolist()),
        flops_cut=1 - touched.least(1 - gone)[smaller],
        moved_cut=cut_bytes / np.maximum(nbytes, 1),
        trained_bytes=sum(trained.get(name, 0) for name in cut),
        collectives=tuple(traced.of_pass(profile.workload.training)),
    )

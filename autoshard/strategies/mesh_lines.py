"""The line of units that a mesh is cut from, as one tensor-parallel rank sees it, with the all-reduces of its group.

    whole model     up.weight [4H, H]   hidden [B, S, 4H]   FLOPs
    rank 0 of 2     up.weight [2H, H]   hidden [B, S, 2H]   half of them       then one all-reduce of [B, S, H]

What a rank has of every tensor is traced once per set of cuts; everything else follows with arrays.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.capture.columns import columns_of
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cost import tensor_units
from autoshard.cut_collectives import Alike, count_alike
from autoshard.cut_cost import Traced
from autoshard.profile.measure import trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units
from autoshard.strategies.lines import Lines
from autoshard.strategies.stage_line import Array, Line
from autoshard.workload import OPTIMIZER_STATE_TENSORS

_FINE = 16
"""Stages up to which pieces are as fine as in a pipeline."""


class MeshLines(Lines):
    """Lines of the whole model; `cluster` has one device of each kind.

    Attributes:
        trained: [n] bytes of parameters that get a gradient.
        sums: unit -> the collectives of a forward of the whole batch there.
    """

    def __init__(self, profile: Profile, cluster: Cluster, batch: BatchAxis, units: Units) -> None:
        super().__init__(profile, cluster, batch, units)
        self.kinds = [device.speed for device in cluster.devices]
        self.columns = columns_of(self.graph)
        self.value_bytes, self.touched = self.columns.value_bytes, self.columns.touched
        self.parts = np.ones(len(self.value_bytes))
        self.sums: dict[int, list[Alike]] = {}
        self._weigh()
        self._known: dict[tuple[int, int], Line] = {}

    def _weigh(self) -> None:
        """Bytes of tensors, gradients and optimizer state per unit, tied ones at the first."""
        graph, workload = self.graph, self.profile.workload
        owner = tensor_units(graph, self.units)
        part = {tensor.name: float(self.parts[tensor.value]) for tensor in graph.tensors}
        self.held, self.trained, seen = np.zeros(self.count), np.zeros(self.count), set[int]()
        for tensor in graph.tensors:
            if tensor.storage not in seen:
                seen.add(tensor.storage)
                self.held[owner[tensor.name]] += graph.storages[tensor.storage].nbytes * part[tensor.name]
        if workload.training:
            for name, nbytes in trained_sizes(graph):
                self.trained[owner[name]] += nbytes * part[name]
            self.held += self.trained * (1 + OPTIMIZER_STATE_TENSORS[workload.optimizer])

    def cut(self, traced: Traced, rank: int, together: Array) -> "MeshLines":
        """The lines of one tensor-parallel rank; `together`: [n + 1] where no stage may begin."""
        made = object.__new__(MeshLines)
        made.__dict__.update(self.__dict__)
        parts = made.parts = np.ones(len(self.value_bytes))
        parts[list(traced.parts)] = [part[rank] for part in traced.parts.values()]
        own = self.value_bytes * parts
        whole, local, with_rows = map(self.touched.sums, (self.value_bytes, own, own * self.carries))
        made.flops = self.flops * self.touched.least(parts)
        made.moved = self.moved * np.divide(local, whole, out=np.ones(len(whole)), where=whole > 0)
        made.part = np.divide(with_rows, local, out=np.zeros(len(local)), where=local > 0)
        made.bytes = self.bytes * self.columns.of_storages(parts, 1.0)
        made.sums = count_alike(traced.collectives, self.graph, self.units.op_unit, self.carrying)
        made.forbidden = self.forbidden | together
        made._weigh()
        made._known = {}
        return made

    def begins(self, stages: int) -> Array:
        """As in `Lines`; for many stages one piece for each is enough, so that pieces are whole blocks."""
        if stages <= _FINE:
            return super().begins(stages)
        for depth in [*sorted(set(self.depths[1:].tolist())), int(self.depths.max(initial=0))]:
            allowed = (self.depths <= depth) & ~self.forbidden[: self.count]
            allowed[0] = True
            if allowed.sum() >= stages:
                break
        return np.append(np.flatnonzero(allowed), self.count)

    def _static(self) -> Array:
        return self.held

    def _links(self) -> tuple[Array, Array]:
        nothing = np.ones((len(self.kinds), len(self.kinds)))
        return nothing, nothing  # positions have links, kinds have none

    def of_kinds(self, rows: int, stages: int) -> Line:
        """The line for one micro-batch of so many rows; its devices are the kinds."""
        key = rows, stages
        if key not in self._known:
            self._known[key] = self.line(max(self.batch.size // rows, 1), stages)
        return self._known[key]

    def kind(self, device: Device) -> int:
        """The number of a device's kind."""
        return self.kinds.index(device.speed)

    def sum_seconds(self, cluster: Cluster, names: Sequence[str], part: float) -> Array:
        """[2, n] seconds of the collectives of a forward and of its backward, with a part of the batch."""
        found = np.zeros((2, self.count))
        known: dict[Alike, tuple[float, float]] = {}
        for unit, alike in self.sums.items() if len(names) > 1 else ():
            for one in alike:
                if one not in known:
                    known[one] = one.seconds(cluster, names, part)
                found[:, unit] += known[one]
        return found


def one_of_each_kind(cluster: Cluster) -> Cluster:
    """A cluster with the first device of every kind, without links."""
    first = {device.speed: device for device in reversed(cluster.devices)}
    return replace(cluster, devices=tuple(reversed(first.values())), links=())

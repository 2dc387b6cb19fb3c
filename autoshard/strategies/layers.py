"""The list of layers that stages are cut from, for any part of the batch and any tensor-parallel rank.

Ops and tensors that have rows of the batch shrink with the micro-batch, the others don't; launches stay. Sums over ops
are made with arrays, so that every further number of micro-batches is cheap.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.capture.columns import columns_of
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cost import tensor_units
from autoshard.engine.cut_collectives import Alike, count_alike
from autoshard.engine.cuts import Traced
from autoshard.engine.stages import weight_ops
from autoshard.module_paths import above
from autoshard.profile.measure import trained_sizes
from autoshard.profile.part import carriers_of_rows
from autoshard.profile.profile import Profile
from autoshard.profile.rows import by_rows
from autoshard.profile.units import Units
from autoshard.strategies.levels import cut_depths
from autoshard.strategies.stage_cuts import Array, Line
from autoshard.workload import OPTIMIZER_STATE_TENSORS

_CUTS_PER_STAGE = 4
"""Cuts between whole modules are enough where there are so many per stage; else smaller modules are cut, too.

Half as many in one process, where tensors that meet inside a cut module are watched, which costs time.
"""
_ENOUGH = 64
"""Cuts that are enough for any number of stages up to that."""


class Layers:
    """Units of a profiled model with their costs.

    Attributes:
        one_process: it launches the ops of all devices.
        segments: [n] number of the module that each unit is recomputed with.
        forbidden: [n + 1] where no stage may begin.
        trained: [n] bytes of parameters that get a gradient. held: [n] bytes of tensors, gradients, optimizer state.
        sums: unit -> the collectives of a forward of the whole batch there.
    """

    def __init__(self, profile: Profile, batch: BatchAxis, units: Units, *, one_process: bool = False) -> None:
        self.profile, self.batch, self.units, self.one_process = profile, batch, units, one_process
        self.graph = graph = profile.graph
        self.count = len(units.paths)
        self.training = graph.backward_begin < len(graph.ops)
        self.carrying = carriers_of_rows(graph, batch)
        self.carries = np.zeros(len(graph.values), bool)
        self.carries[list(self.carrying)] = True
        self.columns = columns_of(graph)
        rows = by_rows(profile, batch)
        self.flops, self.with_rows, self.moved, self.part = (
            rows.flops,
            rows.with_rows,
            rows.moved_bytes,
            rows.moved_part,
        )
        self.is_forward = np.arange(len(graph.ops)) < graph.backward_begin
        self.for_weights = weight_ops(graph)
        names = sorted(set(profile.op_dtypes))
        self.dtypes = names, np.array([names.index(name) for name in profile.op_dtypes], np.int64)
        self._storages()
        self.segments = _segments(graph, units.paths)
        self.depths = cut_depths(units.paths)
        self.forbidden = np.zeros(self.count + 1, bool) if one_process else self._written_across()
        self.sums: dict[int, list[Alike]] = {}
        self.parts = np.ones(len(graph.values))
        self._weigh()
        self._seconds: dict[object, Array] = {}

    def _storages(self) -> None:
        """Per storage: bytes, whether they shrink, when it lives, who makes it and who keeps it."""
        graph, end = self.graph, len(self.graph.ops)
        rows = graph.storages
        self.bytes = np.array([row.nbytes for row in rows], float)
        self.shrinks = self.columns.of_storages(self.carries, False)
        self.born = np.array([min(max(row.born, 0), end) for row in rows], np.int64)
        self.died = np.array([min(row.died, end) for row in rows], np.int64)
        activation = np.array([row.kind == "activation" for row in rows], bool)
        saver: dict[int, int] = {}
        for save in graph.saves:
            saver.setdefault(graph.values[save.value].storage, save.op)
        self.saved = np.array([index for index in saver if activation[index]], np.int64)
        self.saver = np.array([saver[index] for index in self.saved.tolist()], np.int64)
        stays = {graph.values[value].storage for value in (*graph.outputs, *graph.state)}
        self.stays = np.array(sorted(index for index in stays if activation[index]), np.int64)
        gradient = activation & (self.born >= graph.backward_begin) & (self.born < end)
        gradient &= np.array([row.died >= end for row in rows], bool)
        self.passing = activation & ~gradient
        self.passing[self.saved] = self.passing[self.stays] = False

    def _weigh(self) -> None:
        """Bytes of parameters, gradients and optimizer state per unit, tied ones at the first."""
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

    def _written_across(self) -> Array:
        """[n + 1] cuts between what makes a tensor and what writes into it."""
        found, unit_of, graph = np.zeros(self.count + 1, bool), self.units.op_unit, self.graph
        for op in graph.ops[: graph.backward_begin]:
            for value in op.mutates:
                row = graph.storages[graph.values[value].storage]
                if row.kind == "activation" and 0 <= row.born < len(graph.ops):
                    found[unit_of[row.born] + 1 : unit_of[op.index] + 1] = True
        return found

    def cut(self, traced: Traced, rank: int, together: Array) -> "Layers":
        """The same of one tensor-parallel rank; `together`: [n + 1] where no stage may begin."""
        made = object.__new__(Layers)
        made.__dict__.update(self.__dict__)
        parts = made.parts = np.ones(len(self.graph.values))
        parts[list(traced.parts)] = [part[rank] for part in traced.parts.values()]
        touched, nbytes = self.columns.touched, self.columns.value_bytes
        own = nbytes * parts
        whole, local, with_rows = map(touched.sums, (nbytes, own, own * self.carries))
        made.flops = self.flops * touched.least(parts)
        made.moved = self.moved * np.divide(local, whole, out=np.ones(len(whole)), where=whole > 0)
        made.part = np.divide(with_rows, local, out=np.zeros(len(local)), where=local > 0)
        made.bytes = self.bytes * self.columns.of_storages(parts, 1.0)
        made.sums = count_alike(traced.collectives, self.graph, self.units.op_unit, self.carrying)
        made.forbidden = self.forbidden | together
        made._weigh()
        made._seconds = {}
        return made

    def begins(self, stages: int) -> Array:
        """[layers + 1] the first unit of every layer: modules as large as leave enough of them; all where few."""
        enough = max(stages, min((_CUTS_PER_STAGE // (1 + self.one_process)) * stages, _ENOUGH))
        for depth in [*sorted(set(self.depths[1:].tolist())), int(self.depths.max(initial=0))]:
            allowed = (self.depths <= depth) & ~self.forbidden[: self.count]
            allowed[0] = True
            if allowed.sum() >= enough:
                break
        return np.append(np.flatnonzero(allowed), self.count)

    def unit_seconds(self, device: Device, part: float) -> Array:
        """[3, n] seconds of forward, backward, and its part for gradients of parameters, as `cost.op_seconds`."""
        key = device.speed, part
        if key not in self._seconds:
            names, code = self.dtypes
            rate = np.array([device.flops(name) for name in names] or [1.0])[code]
            flops = np.where(self.with_rows, self.flops * part, self.flops)
            moved = self.moved * (1.0 - self.part * (1.0 - part))
            busy = np.maximum(flops / rate, moved / device.bytes_per_second)
            each = np.where((flops > 0) | (moved > 0), busy + device.launch_seconds, 0.0)
            masks = (self.is_forward, ~self.is_forward, self.for_weights)
            self._seconds[key] = np.stack(
                [np.bincount(self.units.op_unit, np.where(mask, each, 0.0), self.count) for mask in masks]
            )
        return self._seconds[key]

    def launch_seconds(self, cluster: Cluster) -> float:
        """Seconds in which one thread launches all ops of a micro-batch."""
        launched = int(((self.flops > 0) | (self.moved > 0)).sum())
        return launched * min(device.launch_seconds for device in cluster.devices)

    def sum_seconds(self, cluster: Cluster, names: Sequence[str], part: float) -> Array:
        """[2, n] seconds of the collectives of a forward and of its backward, with a part of the batch."""
        found = np.zeros((2, self.count))
        for unit, alike in self.sums.items() if len(names) > 1 else ():
            for one in alike:
                found[:, unit] += one.seconds(cluster, names, part)
        return found

    def line(self, part: float, stages: int, *, on_accelerators: bool = True) -> Line:
        """Bytes of the layers for a micro-batch that is this part of the batch, small enough for so many stages.

        Devices and their seconds are left out.
        """
        op_unit, n, begins = self.units.op_unit, self.count, self.begins(stages)
        nbytes = np.where(self.shrinks, self.bytes * part, self.bytes)
        sends, returns, first_read = self._crossing(part)
        kept = np.bincount(op_unit[self.saver], nbytes[self.saved], n) if len(self.saved) else np.zeros(n)
        again = np.bincount(self.segments, kept, self.segments.max(initial=0) + 1)[self.segments]
        makers = op_unit[np.minimum(self.born[self.stays], len(op_unit) - 1)] if len(op_unit) else self.stays
        lasting = np.bincount(makers, nbytes[self.stays], n) if len(self.stays) else np.zeros(n)
        stepping = self.profile.workload.training and self.profile.workload.optimizer in ("adam", "adamw")

        def together(values: Array) -> Array:
            return np.add.reduceat(values, begins[:-1], axis=-1)

        nothing = np.zeros((1, len(begins) - 1))
        return Line(
            microbatches=1, begins=begins, forward=nothing, backward=nothing, weight=nothing, after=nothing,
            static=together(self.held), trained=together(self.trained),
            step=together(self.trained) * (stepping and on_accelerators),
            kept=together(kept) * self.training, kept_again=together(first_read),
            again=np.maximum.reduceat(again, begins[:-1]),
            transient=np.maximum.reduceat(self._transient(nbytes), begins[:-1]), lasting=together(lasting),
            sends=sends[:, begins], returns=returns[:, begins], capacity=np.zeros(1), latency=np.zeros((1, 1)),
            bandwidth=np.ones((1, 1)), training=self.training, one_process=self.one_process,
        )  # fmt: skip

    def _transient(self, nbytes: Array) -> Array:
        """[n] most bytes that live while a unit runs, without what is kept or stays."""
        end, op_unit = len(self.graph.ops), self.units.op_unit
        mine = np.where(self.passing, nbytes, 0.0)
        change = np.bincount(self.born, mine, end + 1) - np.bincount(self.died, mine, end + 1)
        most = np.zeros(self.count)
        if end:
            np.maximum.at(most, op_unit, np.cumsum(change)[:end])
        return most

    def _crossing(self, part: float) -> tuple[Array, Array, Array]:
        """Tensors and bytes over every cut, forwards and back; and [n] bytes first read by a module of each unit."""
        units, n = self.units, self.count
        last, reader = np.full(len(units.value), -1), np.full(len(units.value), n)
        inner = units.edge_unit < n
        rows, at = units.edge_value[inner], units.edge_unit[inner]
        np.maximum.at(last, rows, at)
        makers = units.maker
        other = self.segments[np.maximum(makers[rows], 0)] != self.segments[at] if len(rows) else np.zeros(0, bool)
        np.minimum.at(reader, rows[other], at[other])
        carried = self.carries[units.value]
        nbytes = np.where(carried, units.nbytes * part, units.nbytes) if len(carried) else np.zeros(0)
        made = np.array([self.graph.values[value].op >= 0 for value in units.value.tolist()], bool)
        crosses = made & (last > makers) & (makers >= 0) if len(made) else np.zeros(0, bool)
        sends, returns = np.zeros((2, n + 1)), np.zeros((2, n + 1))
        for table, mask in ((sends, crosses), (returns, crosses & (units.copies == 2))):
            for row, amount in ((0, np.ones(len(nbytes))), (1, nbytes)):
                begun, ended = (np.bincount(at[mask] + 1, amount[mask], n + 2) for at in (makers, last))
                table[row] = np.cumsum(begun - ended)[: n + 1]
        read = crosses & (reader < n)
        return sends, returns, np.bincount(reader[read], nbytes[read], n) if len(nbytes) else np.zeros(n)


def _segments(graph: ModelGraph, paths: Sequence[tuple[str, ...]]) -> Array:
    """[n] which units are recomputed together: those of one outermost element of a list of modules, else each alone."""
    numbered = {module.path for module in graph.modules if module.numbered}
    number: dict[str, int] = {}
    found = []
    for of_unit in paths:
        path = of_unit[0] if of_unit else ""
        around = [one for one in (path, *above(path)) if one in numbered]
        found.append(number.setdefault(around[-1] if around else path, len(number)))
    return np.array(found, np.int64)

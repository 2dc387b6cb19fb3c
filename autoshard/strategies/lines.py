"""From a profile to the `Line` that a pipeline is cut from, for any number of micro-batches.

Ops and tensors that have rows of the batch shrink with the micro-batch, the others don't; launches stay. Sums over ops
are made with arrays, so that every further number of micro-batches is cheap.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.batching import BatchAxis
from autoshard.capture.columns import columns_of
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cost import optimizer_seconds, tensor_units
from autoshard.module_paths import above
from autoshard.profile.measure import trained_sizes
from autoshard.profile.part import carriers_of_rows
from autoshard.profile.profile import Profile
from autoshard.profile.rows import by_rows
from autoshard.profile.units import Units
from autoshard.stage_cost import weight_ops
from autoshard.strategies.levels import cut_depths
from autoshard.strategies.stage_line import Array, Line
from autoshard.workload import OPTIMIZER_STATE_TENSORS

_CUTS_PER_STAGE = 4
"""Cuts between whole modules are enough where there are so many per stage; else smaller modules are cut, too.

Half as many in one process, where tensors that meet inside a cut module are watched, which costs time.
"""


class Lines:
    """Makes the line of a profiled model for any number of micro-batches and cuts.

    Attributes:
        one_thread: one process launches the ops of all devices.
        segments: [n] number of the module that each unit is recomputed with.
    """

    def __init__(
        self, profile: Profile, cluster: Cluster, batch: BatchAxis, units: Units, *, one_thread: bool = False
    ) -> None:
        self.one_thread = one_thread
        self.profile, self.cluster, self.batch, self.units = profile, cluster, batch, units
        self.graph = graph = profile.graph
        self.count = len(units.paths)
        self.training = graph.backward_begin < len(graph.ops)
        self.carrying = carriers_of_rows(graph, batch)
        self.carries = np.zeros(len(graph.values), bool)
        self.carries[list(self.carrying)] = True
        self._ops()
        self._storages()
        self.segments = _segments(graph, units.paths)
        self.depths = cut_depths(units.paths)
        self.forbidden = np.zeros(self.count + 1, bool) if one_thread else self._written_across()

    def _ops(self) -> None:
        """Per op: FLOPs and bytes, and the part of both that shrinks with the micro-batch."""
        graph, rows = self.graph, by_rows(self.profile, self.batch)
        self.flops, self.small = rows.flops, rows.with_rows
        self.moved, self.part = rows.moved_bytes, rows.moved_part
        self.is_forward = np.arange(len(graph.ops)) < graph.backward_begin
        self.for_weights = weight_ops(graph)
        names = sorted(set(self.profile.op_dtypes))
        self.dtypes = names, np.array([names.index(name) for name in self.profile.op_dtypes], np.int64)

    def _storages(self) -> None:
        """Per storage: bytes, whether they shrink, when it lives, who makes it and who keeps it."""
        graph = self.graph
        rows, end = graph.storages, len(graph.ops)
        self.bytes = np.array([row.nbytes for row in rows], float)
        self.shrinks = columns_of(graph).of_storages(self.carries, False)
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

    def _written_across(self) -> Array:
        """[n + 1] cuts between what makes a tensor and what writes into it."""
        found, unit_of, graph = np.zeros(self.count + 1, bool), self.units.op_unit, self.graph
        for op in graph.ops[: graph.backward_begin]:
            for value in op.mutates:
                row = graph.storages[graph.values[value].storage]
                if row.kind == "activation" and 0 <= row.born < len(graph.ops):
                    found[unit_of[row.born] + 1 : unit_of[op.index] + 1] = True
        return found

    def begins(self, stages: int) -> Array:
        """[pieces + 1] the first unit of every piece: modules as large as leave enough of them; all where few."""
        for depth in [*sorted(set(self.depths[1:].tolist())), int(self.depths.max(initial=0))]:
            allowed = (self.depths <= depth) & ~self.forbidden[: self.count]
            allowed[0] = True
            if allowed.sum() >= (_CUTS_PER_STAGE // 2 if self.one_thread else _CUTS_PER_STAGE) * stages:
                break
        return np.append(np.flatnonzero(allowed), self.count)

    def seconds(self, device: Device, part: float) -> Array:
        """[ops] seconds of every op on a device with this part of the batch, as in `cost.op_seconds`."""
        names, code = self.dtypes
        rate = np.array([device.flops(name) for name in names] or [1.0])[code]
        flops = np.where(self.small, self.flops * part, self.flops)
        moved = self.moved * (1.0 - self.part * (1.0 - part))
        busy = np.maximum(flops / rate, moved / device.bytes_per_second)
        return np.where((flops > 0) | (moved > 0), busy + device.launch_seconds, 0.0)

    def line(self, microbatches: int, stages: int) -> Line:
        """Make the line for so many micro-batches, in pieces small enough for so many stages."""
        size = self.batch.size
        part = -(-size // microbatches) / size
        op_unit, n = self.units.op_unit, self.count
        begins = self.begins(stages)
        first = begins[:-1]
        known: dict[object, Array] = {}
        per_device = []
        for device in self.cluster.devices:
            if device.speed not in known:
                known[device.speed] = self.seconds(device, part)
            per_device.append(known[device.speed])

        def together(values: Array) -> Array:
            return np.add.reduceat(values, first, axis=-1)

        def of_ops(mask: Array) -> Array:
            done = {key: np.bincount(op_unit, np.where(mask, row, 0.0), n) for key, row in known.items()}
            same = {id(known[key]): done[key] for key in known}
            return together(np.array([same[id(row)] for row in per_device]))

        nbytes = np.where(self.shrinks, self.bytes * part, self.bytes)
        sends, returns, first_read = self._crossing(part)
        kept = np.bincount(op_unit[self.saver], nbytes[self.saved], n) if len(self.saved) else np.zeros(n)
        again = np.bincount(self.segments, kept, self.segments.max(initial=0) + 1)[self.segments]
        makers = op_unit[np.minimum(self.born[self.stays], len(op_unit) - 1)] if len(op_unit) else self.stays
        lasting = np.bincount(makers, nbytes[self.stays], n) if len(self.stays) else np.zeros(n)
        latency, bandwidth = self._links()
        return Line(
            microbatches=microbatches,
            begins=begins,
            forward=of_ops(self.is_forward),
            backward=of_ops(~self.is_forward),
            weight=of_ops(self.for_weights),
            static=together(self._static()),
            kept=together(kept if self.training else np.zeros(n)),
            transient=np.maximum.reduceat(self._transient(nbytes), first),
            kept_again=together(first_read),
            again=np.maximum.reduceat(again, first),
            lasting=together(lasting),
            sends=sends[:, begins],
            returns=returns[:, begins],
            capacity=np.array([float(device.budget_bytes) for device in self.cluster.devices]),
            latency=latency,
            bandwidth=bandwidth,
            training=self.training,
            issue_seconds=self._issue_seconds() * microbatches if self.one_thread else 0.0,
            one_process=self.one_thread,
            step=together(self._step()),
            after=together(self._after()),
        )

    def _issue_seconds(self) -> float:
        """Seconds in which one thread launches all ops for a micro-batch."""
        launched = int(((self.flops > 0) | (self.moved > 0)).sum())
        return launched * min(device.launch_seconds for device in self.cluster.devices)

    def _transient(self, nbytes: Array) -> Array:
        """[n] most bytes that live while a unit runs, without what is kept or stays."""
        end, op_unit = len(self.graph.ops), self.units.op_unit
        mine = np.where(self.passing, nbytes, 0.0)
        change = np.bincount(self.born, mine, end + 1) - np.bincount(self.died, mine, end + 1)
        most = np.zeros(self.count)
        if end:
            np.maximum.at(most, op_unit, np.cumsum(change)[:end])
        return most

    def _static(self) -> Array:
        """[n] bytes of tensors, gradients and optimizer state; tied ones at the first unit."""
        graph, workload = self.graph, self.profile.workload
        owner = tensor_units(graph, self.units)
        held, seen = np.zeros(self.count), set[int]()
        for tensor in graph.tensors:
            if tensor.storage not in seen:
                seen.add(tensor.storage)
                held[owner[tensor.name]] += graph.storages[tensor.storage].nbytes
        if workload.training:
            for name, nbytes in trained_sizes(graph):
                held[owner[name]] += nbytes * (1 + OPTIMIZER_STATE_TENSORS[workload.optimizer])
        return held

    def _step(self) -> Array:
        """[n] bytes of the optimizer's step: accelerators hold a denominator of every parameter at once, a CPU few."""
        held, workload = np.zeros(self.count), self.profile.workload
        if workload.training and workload.optimizer in ("adam", "adamw"):
            owner = tensor_units(self.graph, self.units)
            if any(not device.name.startswith("cpu") for device in self.cluster.devices):
                for name, nbytes in trained_sizes(self.graph):
                    held[owner[name]] += nbytes
        return held

    def _after(self) -> Array:
        """[D, n] seconds of the optimizer's step on the parameters of a unit."""
        trained = np.zeros(self.count)
        if self.profile.workload.training:
            owner = tensor_units(self.graph, self.units)
            for name, nbytes in trained_sizes(self.graph):
                trained[owner[name]] += nbytes
        devices = self.cluster.devices
        return np.array([optimizer_seconds(1.0, self.profile.workload, device) * trained for device in devices])

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
                step = np.bincount(makers[mask] + 1, amount[mask], n + 2) - np.bincount(
                    last[mask] + 1, amount[mask], n + 2
                )
                table[row] = np.cumsum(step)[: n + 1]
        read = crosses & (reader < n)
        return sends, returns, np.bincount(reader[read], nbytes[read], n) if len(nbytes) else np.zeros(n)

    def _links(self) -> tuple[Array, Array]:
        return self.cluster.link_tables


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

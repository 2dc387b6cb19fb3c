"""What replicas of a model in one process cost: each device's part of the batch, and what is copied and summed.

    seconds of a pass   =  the slowest replica  +  copies of inputs and outputs  +  the sum of gradients

Gradients are summed after backward has made them, and parameters are copied anew for each step, along a tree. Inputs
come from the first device and outputs go back there, and one thread launches all there is.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, Transfer, gap_above
from autoshard.engine.lanes import Lanes, copied, timed, waiting
from autoshard.engine.links import all_reduce_seconds
from autoshard.engine.placed import bytes_at, lower_bound, moments, of_every_device, of_moments
from autoshard.engine.timing import counted_flops, optimizer_seconds, roofline
from autoshard.errors import PlanError
from autoshard.flow import INPUTS, OUTPUTS, Flow, flow
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import shares_of
from autoshard.profile.measure import trained_sizes
from autoshard.profile.part import Sizes, carriers_of_rows, parts_with_rows, smaller_sizes
from autoshard.profile.profile import Profile

SUMMED = "gradients are summed after backward; one process per device (torchrun) overlaps that with backward."


def estimate_replicas(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute what a plan of replicas costs. Raises `PlanError` if it does not say how the batch is divided."""
    run = run_replicas(plan, profile, cluster)
    by_name = {one.name: replace(one, transfer_seconds=run.sum_seconds) for one in run.replicas}
    bound = lower_bound(profile, cluster, divided=True)
    return Estimate(
        devices=of_every_device(by_name, cluster),
        transfers=run.transfers,
        objective=plan.objective,
        latency_seconds=run.seconds,
        bottleneck_seconds=run.seconds,
        lower_bound_seconds=bound,
        gap=gap_above(run.seconds, bound),
        notes=(*profile.graph.notes, *((SUMMED,) if run.sum_seconds else ())),
        collective_seconds=run.sum_seconds,
        all_reduces=int(run.sum_seconds > 0),
    )


def run_replicas(plan: Plan, profile: Profile, cluster: Cluster) -> "ReplicaPass":
    """Price the replicas of a plan. Raises `PlanError` if it does not say how the batch is divided."""
    mesh, batch = plan.mesh, plan.batch
    if mesh is None or batch is None:
        raise PlanError("this plan has no replicas, or does not say how to divide the batch. Make the plan again.")
    devices = [cluster.device(device.name) for device in plan.devices[: mesh.data]]
    pricer = ReplicaPricer(RowSizes(profile, batch), count=mesh.data)
    return pricer.run(cluster, devices, rows_per_replica(batch, mesh.shares, mesh.data))


def rows_per_replica(batch: BatchAxis, shares: Sequence[int], count: int) -> tuple[int, ...]:
    """How many rows of the planned batch each replica has; `shares` as in `Mesh`."""
    return shares_of(batch.size, count, shares)


class RowSizes:
    """The recorded run with some rows of the batch: what ops compute and move, and what lives when on one device."""

    def __init__(self, profile: Profile, batch: BatchAxis) -> None:
        graph = profile.graph
        self.profile, self.size, self._batch = profile, batch.size, batch
        carrying = carriers_of_rows(graph, batch)
        self.input_bytes, self.output_bytes = (
            sum(
                graph.storages[storage].nbytes
                for storage in {graph.values[value].storage for value in values if value in carrying}
            )
            for values in (graph.inputs, graph.outputs)
        )
        self._moves = flow(graph, {"": "replica"})
        self._known: dict[int, Sizes] = {}

    def part(self, rows: int) -> float:
        """Which part of the batch so many rows are."""
        return rows / self.size

    def sizes(self, rows: int) -> Sizes:
        """Sizes of values and storages, FLOPs and bytes moved with so many rows."""
        if rows not in self._known:
            self._known[rows] = smaller_sizes(self.profile, parts_with_rows(self.profile.graph, self._batch, rows))
        return self._known[rows]

    def seconds(self, device: Device, rows: int) -> float:
        """Seconds of the ops."""
        sizes, counted = self.sizes(rows), counted_flops(self.profile) > 0
        flops, moved = np.array(sizes.flops, np.float64) * counted, np.array(sizes.moved, np.float64)
        return float(roofline(flops, moved, self.profile.op_dtypes, device).sum())

    def moves(self, device: Device, rows: int) -> Flow:
        """What lives when on a device that has all of the model."""
        moves = self._moves
        nbytes = np.array(self.sizes(rows).storages, np.int64)[moves.buffers.storage]
        return replace(
            moves, devices=(device.name,), tensor_device=dict.fromkeys(moves.tensor_device, device.name),
            buffers=replace(moves.buffers, nbytes=nbytes),
        )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPass:
    """Replicas in a pass.

    `transfers`: what is copied to and from them; `sum_seconds`: of the sum of their gradients; `launch_seconds`: of the
    one thread that launches the ops of all.
    """

    replicas: tuple[DeviceEstimate, ...]
    transfers: tuple[Transfer, ...]
    sum_seconds: float
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        return self.lanes({one.name: {"forward": one.compute_seconds} for one in self.replicas}).seconds

    def lanes(self, computing: Mapping[str, Mapping[str, float]]) -> Lanes:
        """Parts of the batch go out, every replica computes, gradients are summed, results come back.

        `computing`: seconds of each device by kind. It takes as long as the slowest replica, or the one thread that
        launches what all of them do, and copies and sums.
        """
        lanes, first = Lanes(), self.replicas[0].name
        for one in self.transfers:
            if one.destination != first:
                lanes.add(copied(one, one.seconds), stream="copies")
        begin = lanes.ends()
        for name, kinds in computing.items():
            for kind, seconds in kinds.items():
                lanes.add(timed(name, kind, seconds), begin)
            waits = self.launch_seconds - sum(kinds.values())
            if waits > 0:
                lanes.add(waiting(name, waits), begin)
        computed = lanes.ends()
        for name in computing if self.sum_seconds else ():
            lanes.add(timed(name, "all-reduce", self.sum_seconds), computed)
        summed = lanes.ends()
        for one in self.transfers:
            if one.destination == first:
                lanes.add(copied(one, one.seconds), summed, stream="copies")
        return lanes


class ReplicaPricer:
    """Prices replicas; equal devices with equal shares are computed once."""

    def __init__(self, rows: RowSizes, *, count: int) -> None:
        self.rows, self.count = rows, count
        self.profile, self.workload = rows.profile, rows.profile.workload
        self.trained = [nbytes for _, nbytes in trained_sizes(self.profile.graph)] if self.workload.training else []
        self._known: dict[object, DeviceEstimate] = {}

    def run(self, cluster: Cluster, devices: Sequence[Device], rows: Sequence[int]) -> ReplicaPass:
        """A pass in which every device has so many rows.

        Gradients are added along a tree: 2 to 1, 4 to 3, …; then 3 to 1, …
        """
        replicas = tuple(
            self.of(device, share, first=not index, adds=index % 2 == 1 and index + 1 < len(devices))
            for index, (device, share) in enumerate(zip(devices, rows, strict=True))
        )
        names = [device.name for device in devices]
        summed = all_reduce_seconds(cluster, names, sum(self.trained)) if len(names) > 1 and self.trained else 0.0
        transfers = _transfers(cluster, names, rows, self.rows)
        launched = np.count_nonzero(self.rows.sizes(self.rows.size).moved)
        return ReplicaPass(
            replicas=replicas, transfers=transfers, sum_seconds=summed,
            launch_seconds=sum(float(launched) * device.launch_seconds for device in devices),
        )  # fmt: skip

    def of(self, device: Device, rows: int, *, first: bool = False, adds: bool = False) -> DeviceEstimate:
        """Bytes and seconds of a replica with so many rows.

        `first`: also of what is kept on its device; `adds`: gradients of another one are added there.
        """
        first = first and self.count > 1
        adds = adds and not first
        memory = device.memory_bytes, device.block_bytes, device.overhead_bytes, device.name.startswith("cpu")
        key = (*device.speed, *memory, rows, first, adds)
        if key not in self._known:
            seconds = self.rows.seconds(device, rows) + optimizer_seconds(sum(self.trained), self.workload, device)
            found = self._moments(device, rows, first, adds)
            self._known[key] = replace(of_moments(device, found), compute_seconds=seconds)
        return replace(self._known[key], name=device.name)

    def _moments(self, device: Device, rows: int, first: bool, adds: bool) -> list[Counter[str]]:
        """The fullest op, the sums of gradients once all replicas have gone back, and the optimizer's step.

        The model itself is on the first device, and only it has an optimizer; on the others are copies.
        """
        graph, table, training = self.profile.graph, self.rows, self.workload.training
        moves, several = table.moves(device, rows), self.count > 1
        found = moments(self.profile, moves, device)
        if training:
            ends = found[1]
            if (first or adds) and self.trained:
                found.append(Counter({**ends, "step": 2 * max(self.trained)}))
            if several and not first:
                del found[1]
                for row in found:
                    del row["optimizer"]
        if first:  # inputs and outputs of all replicas; those become one where they were made
            own = table.part(rows)
            found[0]["transfer"] += ceil((1 - own) * (table.input_bytes + table.output_bytes * training))
            merging = bytes_at(graph.backward_begin - 1, device, graph, moves)
            kept = max(0, merging["activation"] - ceil(own * (table.input_bytes + table.output_bytes)))
            merging["activation"] = kept * training + table.input_bytes + 2 * table.output_bytes
            found.append(Counter({**merging, "gradient": 0, "optimizer": found[0]["optimizer"]}))
        return found


def _transfers(cluster: Cluster, names: Sequence[str], shares: Sequence[int], rows: RowSizes) -> tuple[Transfer, ...]:
    """Inputs from the first device to the others, and outputs back."""
    made = []
    for name, share in zip(names[1:], shares[1:], strict=True):
        directions = (
            (names[0], name, rows.input_bytes, (INPUTS, "")),
            (name, names[0], rows.output_bytes, ("", OUTPUTS)),
        )
        for source, target, nbytes, (producer, consumer) in directions:
            size = round(nbytes * rows.part(share))
            if size:
                made.append(Transfer(
                    source=source, destination=target, nbytes=size, seconds=cluster.link(source, target).seconds(size),
                    producer=producer, consumer=consumer,
                ))  # fmt: skip
    return tuple(made)

"""What replicas of a model cost: each device's part of the batch, and what they exchange.

    seconds of a pass   =  the slowest replica  +  what of the exchange does not hide behind computing

    replicas   gradients are summed (all-reduce) while backward makes them; the last bucket of 25 MiB has nothing left
               to hide behind, nor has what takes longer than backward
    sharded    every block is gathered before its forward and before its backward, its gradients are reduced and
               scattered; the first gather has nothing to hide behind

as DistributedDataParallel and fully_shard do (Li et al., "PyTorch Distributed", 2020; Zhao et al., "PyTorch FSDP",
2023). One process with all devices sums gradients after backward has made them and copies parameters anew for each
step, along a tree; it also brings inputs from the first device and outputs back, and one thread launches all there is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from autoshard.axes.regions import element_of
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, Transfer, gap_above
from autoshard.engine.links import all_gather_seconds, all_reduce_seconds
from autoshard.engine.placed import (
    bytes_at,
    check_devices,
    lower_bound,
    moments,
    of_every_device,
    of_moments,
)
from autoshard.engine.programs import Layer, pass_seconds
from autoshard.engine.timing import counted_flops, optimizer_seconds, roofline
from autoshard.errors import PlanError
from autoshard.flow import INPUTS, OUTPUTS, Flow, flow
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import shares_of
from autoshard.profile.measure import trained_sizes
from autoshard.profile.part import Sizes, carriers_of_rows, parts_with_rows, smaller_sizes
from autoshard.profile.profile import Profile

BUCKET_BYTES = 25 << 20
"""DistributedDataParallel sums gradients in buckets of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBlock:
    """What `fully_shard` gathers as one: bytes of its parameters, and of those that get a gradient."""

    path: str
    parameter_bytes: int
    gradient_bytes: int


def blocks_of(graph: ModelGraph, paths: Sequence[str]) -> tuple[ReplicaBlock, ...]:
    """Bytes of the blocks at some module paths, in order, and last those of what lies outside of them."""
    trained = {name for name, _ in graph.gradients}
    rows = {path: [0, 0] for path in (*paths, "")}
    for tensor in {tensor.storage: tensor for tensor in reversed(graph.tensors)}.values():
        if tensor.kind == "parameter":
            path = element_of(tensor.name, rows)
            rows[path][0] += tensor.nbytes
            rows[path][1] += tensor.nbytes * (tensor.name in trained or (not trained and tensor.trainable))
    return tuple(ReplicaBlock(path=path, parameter_bytes=row[0], gradient_bytes=row[1]) for path, row in rows.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Seconds of what replicas exchange in a pass; `exposed_seconds`: the part that does not hide behind computing."""

    seconds: float
    exposed_seconds: float
    all_reduces: int = 0
    all_gathers: int = 0


def estimate_replicas(plan: Plan, profile: Profile, cluster: Cluster, *, processes: bool | None = None) -> Estimate:
    """Compute what a plan of replicas costs.

    `processes`: one process per device; None: if parameters are sharded or devices are in several hosts. Raises
    `PlanError` if the plan names what the cluster lacks.
    """
    mesh, batch = plan.mesh, plan.batch
    if mesh is None or batch is None:
        raise PlanError("this plan has no replicas, or does not say how to divide the batch. Make the plan again.")
    names = [device.name for device in plan.devices][: mesh.data]
    check_devices(names, cluster, "puts replicas on")
    devices = [cluster.device(name) for name in names]
    if processes is None:
        processes = mesh.sharded or len({device.host for device in devices}) > 1
    blocks = blocks_of(profile.graph, [path for stage in plan.stages for path in stage.paths]) if mesh.sharded else ()
    figures = ReplicaPricer(RowSizes(profile, batch), blocks=blocks, count=mesh.data, processes=processes)
    run = figures.run(cluster, devices, rows_per_replica(batch, mesh.shares, mesh.data))
    exchange, latency = run.exchange, run.seconds
    by_name = {one.name: replace(one, transfer_seconds=exchange.exposed_seconds) for one in run.replicas}
    bound = lower_bound(profile, cluster, divided=True)
    return Estimate(
        devices=of_every_device(by_name, cluster),
        transfers=run.transfers,
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=latency,
        lower_bound_seconds=bound,
        gap=gap_above(latency, bound),
        notes=(*profile.graph.notes, *_notes(figures, exchange)),
        collective_seconds=exchange.exposed_seconds,
        all_reduces=exchange.all_reduces,
        all_gathers=exchange.all_gathers,
    )


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
    """Replicas in a pass: each of them, what is copied to and from them, what they exchange, and the seconds of all."""

    replicas: tuple[DeviceEstimate, ...]
    transfers: tuple[Transfer, ...]
    exchange: Exchange
    seconds: float


class ReplicaPricer:
    """Prices replicas; equal devices with equal shares are computed once.

    `blocks`: what is gathered as one, where replicas are sharded; last what lies outside of them.
    """

    def __init__(self, rows: RowSizes, *, blocks: tuple[ReplicaBlock, ...], count: int, processes: bool) -> None:
        self.rows, self.blocks, self.count, self.processes = rows, blocks, count, processes
        self.profile, self.workload = rows.profile, rows.profile.workload
        self.trained = [nbytes for _, nbytes in trained_sizes(self.profile.graph)] if self.workload.training else []
        self._known: dict[object, DeviceEstimate] = {}

    @property
    def sharded(self) -> bool:
        return bool(self.blocks)

    def run(self, cluster: Cluster, devices: Sequence[Device], rows: Sequence[int]) -> ReplicaPass:
        """A pass in which every device has so many rows.

        It takes as long as the slowest replica, or the one thread that launches what all of them do, and what is not
        hidden of copies and sums. Gradients are added along a tree: 2 to 1, 4 to 3, …; then 3 to 1, …
        """
        replicas = tuple(
            self.of(device, share, first=not index, adds=index % 2 == 1 and index + 1 < len(devices))
            for index, (device, share) in enumerate(zip(devices, rows, strict=True))
        )
        names = [device.name for device in devices]
        exchange = exchange_of(cluster, names, self, min(one.compute_seconds for one in replicas))
        transfers = () if self.processes else _transfers(cluster, names, rows, self.rows)
        slowest = max(one.compute_seconds for one in replicas)
        if not self.processes:
            launched = np.count_nonzero(self.rows.sizes(self.rows.size).moved)
            slowest = max(slowest, sum(float(launched) * device.launch_seconds for device in devices))
        return ReplicaPass(
            replicas=replicas, transfers=transfers, exchange=exchange,
            seconds=slowest + exchange.exposed_seconds + sum(transfer.seconds for transfer in transfers),
        )  # fmt: skip

    def of(self, device: Device, rows: int, *, first: bool = False, adds: bool = False) -> DeviceEstimate:
        """Bytes and seconds of a replica with so many rows.

        In one process, `first`: also of what is kept on its device; `adds`: gradients of another one are added there.
        """
        first = first and not self.processes and self.count > 1
        adds = adds and not first and not self.processes
        memory = device.memory_bytes, device.block_bytes, device.overhead_bytes, device.name.startswith("cpu")
        key = (*device.speed, *memory, rows, first, adds)
        if key not in self._known:
            steps = sum(self.trained) / (self.count if self.sharded else 1)
            seconds = self.rows.seconds(device, rows) + optimizer_seconds(steps, self.workload, device)
            found = self._moments(device, rows, first, adds)
            self._known[key] = replace(of_moments(device, found), compute_seconds=seconds)
        return replace(self._known[key], name=device.name)

    def backward_part(self) -> float:
        """The part of the FLOPs that are those of backward."""
        flops = counted_flops(self.profile)
        return float(flops[self.profile.graph.backward_begin :].sum() / flops.sum()) if flops.any() else 0.5

    def _moments(self, device: Device, rows: int, first: bool, adds: bool) -> list[Counter[str]]:
        """The fullest op, the sums of gradients once all replicas have gone back, and the optimizer's step.

        In one process the model itself is on the first device, and only it has an optimizer; on the others copies.
        """
        graph, table, training = self.profile.graph, self.rows, self.workload.training
        moves, several = table.moves(device, rows), self.count > 1
        found = moments(self.profile, moves, device)
        if training:
            ends = found[1]
            if several and self.processes:  # views of buckets, which stay, or a part of all
                found[0]["gradient"] = ends["gradient"]
            if (first or adds) and self.trained:
                found.append(Counter({**ends, "step": 2 * max(self.trained)}))
            if several and not first and not self.processes:
                del found[1]
                for row in found:
                    del row["optimizer"]
        if self.sharded:
            for row in found:
                for kind in ("parameter", "gradient", "optimizer", "step"):
                    row[kind] = ceil(row[kind] / self.count)
            found[0]["transfer"] += self._unsharded_bytes()
        if first:  # inputs and outputs of all replicas; those become one where they were made
            own = table.part(rows)
            found[0]["transfer"] += ceil((1 - own) * (table.input_bytes + table.output_bytes * training))
            merging = bytes_at(graph.backward_begin - 1, device, graph, moves)
            kept = max(0, merging["activation"] - ceil(own * (table.input_bytes + table.output_bytes)))
            merging["activation"] = kept * training + table.input_bytes + 2 * table.output_bytes
            found.append(Counter({**merging, "gradient": 0, "optimizer": found[0]["optimizer"]}))
        return found

    def _unsharded_bytes(self) -> int:
        """What `fully_shard` has whole: what is outside of blocks, the block that runs, and the one that is gathered.

        In backward also the gradients of a block, the copy that they are scattered from, and the gradients of what is
        outside, which are scattered last.
        """
        inside = max((block.parameter_bytes for block in self.blocks[:-1]), default=0)
        gradients = max((block.gradient_bytes for block in self.blocks[:-1]), default=0) * self.workload.training
        outside = self.blocks[-1].parameter_bytes + self.blocks[-1].gradient_bytes * self.workload.training
        return outside + 2 * inside + 2 * gradients


def exchange_of(cluster: Cluster, names: Sequence[str], figures: ReplicaPricer, compute_seconds: float) -> Exchange:
    """Price what replicas exchange in a pass, as programs beside computing; `compute_seconds`: of the fastest."""
    training, sharded = figures.workload.training, figures.sharded
    nbytes = sum(figures.trained)
    if len(names) < 2 or not (sharded or nbytes):
        return Exchange(seconds=0.0, exposed_seconds=0.0)
    back = figures.backward_part() * compute_seconds if training else 0.0
    if sharded:  # what is outside of blocks is gathered first, stays until backward, and is scattered last
        blocks = [figures.blocks[-1], *figures.blocks[:-1]]
        size = sum(block.parameter_bytes for block in blocks) or 1
        gathers = [all_gather_seconds(cluster, names, block.parameter_bytes) for block in blocks]
        parts = [block.parameter_bytes / size for block in blocks]
        passes = [[
            Layer(name="", compute=part * (compute_seconds - back), gather=gather)
            for part, gather in zip(parts, gathers, strict=True)
        ]]  # fmt: skip
        if training:
            passes.append([
                Layer(
                    name="", compute=part * back, gather=gather if block.path else 0.0,
                    reduce=all_gather_seconds(cluster, names, block.gradient_bytes),
                )
                for part, gather, block in zip(parts[::-1], gathers[::-1], blocks[::-1], strict=True)
            ])  # fmt: skip
        counts = {"all_gathers": len(blocks) * len(passes), "all_reduces": len(blocks) if training else 0}
    else:  # in one process gradients are summed after backward has made them
        buckets = max(1, ceil(nbytes / BUCKET_BYTES)) if figures.processes else 1
        own = back / buckets if figures.processes else 0.0
        passes = [[Layer(name="", compute=own, reduce=all_reduce_seconds(cluster, names, nbytes / buckets))] * buckets]
        counts = {"all_reduces": buckets}
    layers = [layer for one in passes for layer in one]
    seconds = sum(layer.gather + layer.reduce for layer in layers)
    played = sum(pass_seconds([(layer, 1) for layer in one]) for one in passes)
    exposed = played - sum(layer.compute for layer in layers)
    return Exchange(seconds=seconds, exposed_seconds=exposed, **counts)


def _transfers(cluster: Cluster, names: Sequence[str], shares: Sequence[int], rows: RowSizes) -> tuple[Transfer, ...]:
    """Inputs from the first device to the others, and outputs back."""
    made = []
    for name, share in zip(names[1:], shares[1:], strict=True):
        ways = ((names[0], name, rows.input_bytes, (INPUTS, "")), (name, names[0], rows.output_bytes, ("", OUTPUTS)))
        for source, target, nbytes, (producer, consumer) in ways:
            size = round(nbytes * rows.part(share))
            if size:
                made.append(Transfer(
                    source=source, destination=target, nbytes=size, seconds=cluster.link(source, target).seconds(size),
                    producer=producer, consumer=consumer,
                ))  # fmt: skip
    return tuple(made)


def _notes(figures: ReplicaPricer, exchange: Exchange) -> tuple[str, ...]:
    if not exchange.seconds:
        return ()
    if figures.sharded:
        how = "gathering parameters and scattering gradients is taken to overlap with computing, as fully_shard does"
    elif figures.processes:
        how = "summing gradients is taken to overlap with backward, as DistributedDataParallel does"
    else:
        how = "gradients are summed after backward; one process per device (torchrun) overlaps that with backward"
    return (f"{how}.",)

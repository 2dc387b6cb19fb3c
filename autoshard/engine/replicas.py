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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from autoshard.axes.regions import element_of
from autoshard.batching import BatchAxis
from autoshard.capture.graph import ModelGraph
from autoshard.cluster.cluster import Cluster, Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, Transfer, gap_above
from autoshard.engine.links import all_gather_seconds, all_reduce_seconds
from autoshard.engine.placed import check_devices, lower_bound, of_every_device
from autoshard.engine.timing import optimizer_seconds, roofline
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.profile.measure import optimizer_step_bytes
from autoshard.profile.profile import Profile
from autoshard.profile.rows import Rows, by_rows
from autoshard.sharding import shares_of
from autoshard.workload import OPTIMIZER_STATE_TENSORS, Workload

BUCKET_BYTES = 25 << 20
"""DistributedDataParallel sums gradients in buckets of this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What `fully_shard` gathers as one: bytes of its parameters, and of those that get a gradient."""

    path: str
    parameter_bytes: int
    gradient_bytes: int


def blocks_of(graph: ModelGraph, paths: Sequence[str]) -> tuple[Block, ...]:
    """Bytes of the blocks at some module paths, in order, and last those of what lies outside of them."""
    trained = {name for name, _ in graph.gradients}
    rows = {path: [0, 0] for path in (*paths, "")}
    for tensor in {tensor.storage: tensor for tensor in reversed(graph.tensors)}.values():
        if tensor.kind == "parameter":
            path = element_of(tensor.name, rows)
            rows[path][0] += tensor.nbytes
            rows[path][1] += tensor.nbytes * (tensor.name in trained or (not trained and tensor.trainable))
    return tuple(Block(path=path, parameter_bytes=row[0], gradient_bytes=row[1]) for path, row in rows.items())


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
    rows = by_rows(profile, batch)
    blocks = blocks_of(profile.graph, [path for stage in plan.stages for path in stage.paths]) if mesh.sharded else ()
    shares = rows_per_replica(batch, mesh.shares, mesh.data)
    figures = Figures(rows=rows, workload=profile.workload, blocks=blocks, count=mesh.data, processes=processes)
    replicas = figures.all(devices, shares)
    exchange = exchange_of(cluster, names, figures, [one.compute_seconds for one in replicas])
    transfers = () if processes else _transfers(cluster, names, shares, rows)
    moving = sum(transfer.seconds for transfer in transfers)
    by_name = {one.name: replace(one, transfer_seconds=exchange.exposed_seconds) for one in replicas}
    latency = pass_seconds(figures, devices, replicas) + exchange.exposed_seconds + moving
    bound = lower_bound(profile, cluster, divided=True)
    every = of_every_device(by_name, cluster)
    return Estimate(
        devices=every,
        transfers=transfers,
        objective=plan.objective,
        latency_seconds=latency,
        bottleneck_seconds=latency,
        lower_bound_seconds=bound,
        gap=gap_above(latency, bound),
        notes=(*profile.graph.notes, *_notes(figures, exchange, cluster, names)),
        collective_seconds=exchange.exposed_seconds,
        all_reduces=exchange.all_reduces,
        all_gathers=exchange.all_gathers,
    )


def pass_seconds(figures: "Figures", devices: Sequence[Device], replicas: Sequence[DeviceEstimate]) -> float:
    """Seconds until all replicas are done: the slowest, or the one thread that launches what all of them do."""
    slowest = max(one.compute_seconds for one in replicas)
    return slowest if figures.processes else max(slowest, sum(map(figures.launching_seconds, devices)))


def rows_per_replica(batch: BatchAxis, shares: Sequence[int], count: int) -> tuple[int, ...]:
    """How many rows of the planned batch each replica has; `shares` as in `Mesh`."""
    return shares_of(batch.size, count, shares)


@dataclass(slots=True, kw_only=True)
class Figures:
    """Prices one replica on a device; equal devices with equal shares are computed once.

    `blocks`: what is gathered as one, where replicas are sharded; last what lies outside of them.
    """

    rows: Rows
    workload: Workload
    blocks: tuple[Block, ...]
    count: int
    processes: bool
    known: "dict[object, DeviceEstimate] | None" = None

    @property
    def sharded(self) -> bool:
        return bool(self.blocks)

    @property
    def gradient_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.rows.trained)

    def all(self, devices: Sequence[Device], rows: Sequence[int]) -> list[DeviceEstimate]:
        """Bytes and seconds of all replicas. Gradients are added along a tree: 2 to 1, 4 to 3, …; then 3 to 1, …"""
        return [self.of(device, share, first=not index, adds=index % 2 == 1 and index + 1 < len(devices))
                for index, (device, share) in enumerate(zip(devices, rows, strict=True))]  # fmt: skip

    def of(self, device: Device, rows: int, *, first: bool = False, adds: bool = False) -> DeviceEstimate:
        """Bytes and seconds of a replica with so many rows.

        In one process, `first`: also of what is kept on its device; `adds`: gradients of another one are added there.
        """
        first = first and not self.processes and self.count > 1
        adds = adds and not first and not self.processes
        memory = device.memory_bytes, device.block_bytes, device.overhead_bytes, device.name.startswith("cpu")
        key = (*device.speed, *memory, rows, first, self.count)
        self.known = {} if self.known is None else self.known
        if key not in self.known:
            self.known[key] = self._of(device, rows, first, adds)
        return replace(self.known[key], name=device.name)

    def seconds(self, device: Device, rows: int) -> float:
        """Roofline seconds of a pass with so many rows, and of the optimizer step."""
        table, part = self.rows, self.rows.part(rows)
        flops = np.where(table.with_rows, table.flops * part, table.flops)
        moved = table.moved_bytes * (1.0 - table.moved_part * (1.0 - part))
        ops = float(roofline(flops, moved, table.dtypes, device).sum())
        own = self.gradient_bytes / (self.count if self.sharded else 1)
        return ops + optimizer_seconds(own, self.workload, device)

    def launching_seconds(self, device: Device) -> float:
        """Seconds that the host needs to launch the ops of a replica."""
        return float(((self.rows.flops > 0) | (self.rows.moved_bytes > 0)).sum()) * device.launch_seconds

    def backward_part(self) -> float:
        """The part of the FLOPs that are those of backward."""
        total = float(self.rows.flops.sum())
        return float(self.rows.flops[self.rows.backward_begin :].sum()) / total if total else 0.5

    def _of(self, device: Device, rows: int, first: bool, adds: bool) -> DeviceEstimate:
        """Parameters, gradients and optimizer state, and beside them the most of three moments.

        These are the fullest op, the sums of gradients once all replicas have gone back, and the optimizer's step.
        In one process the model itself is on the first device, and only it has an optimizer; on the others copies.
        """
        table, block, training = self.rows, device.block_bytes, self.workload.training
        copy = not first and not self.processes and self.count > 1
        died, live = table.died, table.live_bytes(rows, block)
        nbytes = table.bytes_of(rows, block)
        alive = (table.born <= live.argmax()) & (live.argmax() < died)
        cache, gradient = (float((nbytes * alive)[mask].sum()) for mask in
                           (table.cache, table.gradient & ~table.cache))  # fmt: skip
        activation = float(live.max(initial=0)) - cache - gradient
        left = float(nbytes[(table.born <= table.end) & (table.end < died) & ~table.gradient].sum())
        trained = [-(-size // block) * block for _, size in table.trained]
        parameter, buffer = (float((np.ceil(sizes / block) * block).sum())
                             for sizes in (table.parameter_sizes, table.buffer_sizes))  # fmt: skip
        state = OPTIMIZER_STATE_TENSORS[self.workload.optimizer] if training and not copy else 0
        optimizer, whole, transfer = float(sum(trained) * state), float(sum(trained)), 0.0
        accelerator = not device.name.startswith("cpu")
        step = float(optimizer_step_bytes(trained, self.workload.optimizer, fused_list=accelerator)) if trained else 0.0
        if self.sharded:
            parameter, optimizer, whole, step = (part / self.count for part in (parameter, optimizer, whole, step))
            transfer = self._unsharded_bytes()
        if training and self.count > 1 and self.processes:
            gradient = whole  # views of buckets, which stay, or a part of all
        if first:  # inputs and outputs of all replicas; those become one where they were made
            part = table.part(rows)
            transfer = (1 - part) * (table.input_bytes + (table.output_bytes if training else 0))
            kept = float(live[table.backward_begin - 1]) - part * (table.input_bytes + table.output_bytes) - cache
            merging = max(0.0, kept) * training + table.input_bytes + 2 * table.output_bytes
            if merging > activation + gradient + transfer:
                activation, gradient, transfer = merging, 0.0, 0.0
        moments = [left + step] if training and not copy else []
        moments += [left + 2 * max(trained)] if (first or adds) and trained else []
        if moments and whole + max(moments) > gradient + activation + cache + transfer:
            gradient, activation, transfer = whole, max(moments) - cache, 0.0
        used = parameter + buffer + gradient + optimizer + activation + cache + transfer
        overhead = device.overhead_bytes if used else 0
        return DeviceEstimate(
            name=device.name, memory_bytes=device.memory_bytes, parameter_bytes=round(parameter),
            buffer_bytes=round(buffer), gradient_bytes=round(gradient), optimizer_bytes=round(optimizer),
            activation_bytes=round(activation), cache_bytes=round(cache), transfer_bytes=round(transfer),
            overhead_bytes=overhead, peak_bytes=round(used) + overhead, compute_seconds=self.seconds(device, rows),
            transfer_seconds=0.0,
        )  # fmt: skip

    def _unsharded_bytes(self) -> float:
        """What `fully_shard` has whole: what is outside of blocks, the block that runs, and the one that is gathered.

        In backward also the gradients of a block, the copy that they are scattered from, and the gradients of what is
        outside, which are scattered last.
        """
        inside = max((block.parameter_bytes for block in self.blocks[:-1]), default=0)
        gradients = max((block.gradient_bytes for block in self.blocks[:-1]), default=0) * self.workload.training
        outside = self.blocks[-1].parameter_bytes + self.blocks[-1].gradient_bytes * self.workload.training
        return outside + 2 * inside + 2 * gradients


def exchange_of(cluster: Cluster, names: Sequence[str], figures: Figures, compute_seconds: Sequence[float]) -> Exchange:
    """Price what replicas exchange in a pass; `compute_seconds` of each."""
    training, fastest = figures.workload.training, min(compute_seconds)
    if figures.sharded:
        return sharded_exchange(cluster, names, figures.blocks, fastest, training=training)
    if not training:
        return Exchange(seconds=0.0, exposed_seconds=0.0)
    hidden = figures.backward_part() * fastest if figures.processes else 0.0
    return gradient_exchange(cluster, names, figures.gradient_bytes, hidden)


def gradient_exchange(cluster: Cluster, names: Sequence[str], nbytes: float, backward_seconds: float) -> Exchange:
    """Price the sums of gradients of so many bytes over replicas while a backward of so many seconds makes them.

    With 0 seconds nothing hides, and one sum is made of all.
    """
    if len(names) < 2 or not nbytes:
        return Exchange(seconds=0.0, exposed_seconds=0.0)
    buckets = max(1, ceil(nbytes / BUCKET_BYTES)) if backward_seconds else 1
    seconds = buckets * all_reduce_seconds(cluster, names, nbytes / buckets)
    last = seconds / buckets
    exposed = last + max(0.0, seconds - last - backward_seconds)
    return Exchange(seconds=seconds, exposed_seconds=exposed, all_reduces=buckets)


def sharded_exchange(
    cluster: Cluster, names: Sequence[str], blocks: Sequence[Block], compute_seconds: float, *, training: bool
) -> Exchange:
    """Price gathering the parameters of blocks, and scattering their gradients, over replicas that compute so long."""
    if len(names) < 2:
        return Exchange(seconds=0.0, exposed_seconds=0.0)
    seconds, first = 0.0, 0.0
    for block in reversed(blocks):  # what is outside of blocks comes first
        gather = all_gather_seconds(cluster, names, block.parameter_bytes)
        first = first or gather
        again = 1 if training and block.path else 0  # what is outside of blocks stays until backward
        seconds += gather * (1 + again)
        seconds += all_gather_seconds(cluster, names, block.gradient_bytes) if training else 0.0  # and back
    exposed = first + max(0.0, seconds - first - compute_seconds)
    gathers = len(blocks) * (2 if training else 1)
    return Exchange(
        seconds=seconds, exposed_seconds=exposed, all_gathers=gathers, all_reduces=len(blocks) if training else 0
    )


def _transfers(cluster: Cluster, names: Sequence[str], shares: Sequence[int], rows: Rows) -> tuple[Transfer, ...]:
    """Inputs from the first device to the others, and outputs back."""
    made = []
    for name, share in zip(names[1:], shares[1:], strict=True):
        for source, target, nbytes in ((names[0], name, rows.input_bytes), (name, names[0], rows.output_bytes)):
            size = round(nbytes * rows.part(share))
            if size:
                made.append(Transfer(
                    source=source, destination=target, nbytes=size, seconds=cluster.link(source, target).seconds(size),
                    producer="", consumer="",
                ))  # fmt: skip
    return tuple(made)


def _notes(figures: Figures, exchange: Exchange, cluster: Cluster, names: Sequence[str]) -> tuple[str, ...]:
    if not exchange.seconds:
        return ()
    if figures.sharded:
        how = "gathering parameters and scattering gradients is taken to overlap with computing, as fully_shard does"
    elif figures.processes:
        how = "summing gradients is taken to overlap with backward, as DistributedDataParallel does"
    else:
        how = "gradients are summed after backward; one process per device (torchrun) overlaps that with backward"
    return (f"{how}.",)

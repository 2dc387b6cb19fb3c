"""What replicas of a model in one process cost: each device's part of the batch, and what is copied and summed.

    seconds of a pass   =  the slowest replica  +  copies of inputs and outputs  +  the sum of gradients

Gradients are summed after backward has made them, and parameters are copied anew for each step. Inputs come from the
first device, which has the model itself, and outputs go back there. One thread launches all there is.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.engine.estimate import DeviceEstimate, Estimate, Transfer, gap_above
from autoshard.engine.links import all_reduce_seconds
from autoshard.engine.placed import bytes_at, lower_bound, moments, of_every_device, of_moments
from autoshard.engine.timing import op_seconds, optimizer_seconds
from autoshard.errors import PlanError
from autoshard.flow import INPUTS, OUTPUTS, Flow, flow
from autoshard.plan import Plan
from autoshard.plan.batching import BatchAxis
from autoshard.plan.sharding import shares_of
from autoshard.profile.measure import trained_sizes
from autoshard.profile.part import carriers_of_rows, part_of_batch
from autoshard.profile.profile import Profile

SUMMED = "gradients are summed after backward; one process per device (torchrun) overlaps that with backward."


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPass:
    """Replicas in a pass.

    `rows`: of the batch, per replica; `transfers`: what is copied to and from them; `sum_seconds`: of the sum of their
    gradients; `launch_seconds`: of the one thread that launches the ops of all.
    """

    rows: tuple[int, ...]
    replicas: tuple[DeviceEstimate, ...]
    transfers: tuple[Transfer, ...]
    sum_seconds: float
    launch_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds of the pass."""
        copies = sum(one.seconds for one in self.transfers)
        return copies + max(self.launch_seconds, *(one.compute_seconds for one in self.replicas)) + self.sum_seconds

    @property
    def lacking(self) -> DeviceEstimate:
        """The device that lacks most."""
        return min(self.replicas, key=lambda one: one.free_bytes)

    def value(self, objective: str) -> float:
        """Seconds of the pass, or for "memory" the part of its memory that the fullest device uses."""
        if objective != "memory":
            return self.seconds
        return max(one.peak_bytes / max(one.memory_bytes, 1) for one in self.replicas)


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


def run_replicas(plan: Plan, profile: Profile, cluster: Cluster) -> ReplicaPass:
    """Price the replicas of a plan. Raises `PlanError` if it does not say how the batch is divided."""
    mesh, batch = plan.mesh, plan.batch
    if mesh is None or batch is None:
        raise PlanError("this plan has no replicas, or does not say how to divide the batch. Make the plan again.")
    devices = [cluster.device(device.name) for device in plan.devices[: mesh.data]]
    return Replicas(profile, batch).run(cluster, devices, shares_of(batch.size, mesh.data, mesh.shares))


class Replicas:
    """Prices replicas of one model; equal devices with equal rows are computed once."""

    def __init__(self, profile: Profile, batch: BatchAxis) -> None:
        self.profile, self.batch = profile, batch
        self.trained = sum(nbytes for _, nbytes in trained_sizes(profile.graph)) if profile.workload.training else 0
        self._parts: dict[int, Profile] = {}
        self._known: dict[object, DeviceEstimate] = {}

    @cached_property
    def _flow(self) -> Flow:
        return flow(self.profile.graph, {"": "replica"})

    @cached_property
    def _given_bytes(self) -> tuple[int, int]:
        """Bytes of inputs and of outputs that have rows."""
        graph = self.profile.graph
        carrying = carriers_of_rows(graph, self.batch)
        storages = ({graph.values[value].storage for value in values if value in carrying}
                    for values in (graph.inputs, graph.outputs))  # fmt: skip
        inputs, outputs = (sum(graph.storages[storage].nbytes for storage in some) for some in storages)
        return inputs, outputs

    def part(self, rows: int) -> Profile:
        """The run with so many rows."""
        if rows not in self._parts:
            self._parts[rows] = part_of_batch(self.profile, self.batch, rows)
        return self._parts[rows]

    def seconds(self, device: Device, rows: int) -> float:
        """Seconds of the ops of a replica."""
        return float(op_seconds(self.part(rows), device).sum())

    def of(self, device: Device, rows: int, *, first: bool) -> DeviceEstimate:
        """Bytes and seconds of a replica; `first`: what all replicas are given and give is there, too."""
        memory = device.memory_bytes, device.block_bytes, device.overhead_bytes, device.name.startswith("cpu")
        key = (*device.speed, *memory, rows, first)
        if key not in self._known:
            seconds = self.seconds(device, rows) + optimizer_seconds(self.trained, self.profile.workload, device)
            found = of_moments(device, self._moments(device, rows, first))
            self._known[key] = replace(found, compute_seconds=seconds)
        return replace(self._known[key], name=device.name)

    def _moments(self, device: Device, rows: int, first: bool) -> list[Counter[str]]:
        """The fullest op, the optimizer's step, which copies have not, and outputs of all replicas that become one."""
        part, own = self.part(rows), rows / self.batch.size
        if not first:
            part = replace(part, workload=replace(part.workload, optimizer="none"))
        moves, nbytes = self._flow, np.array([storage.nbytes for storage in part.graph.storages], np.int64)
        moves = replace(
            moves, devices=(device.name,), tensor_device=dict.fromkeys(moves.tensor_device, device.name),
            buffers=replace(moves.buffers, nbytes=nbytes[moves.buffers.storage]),
        )  # fmt: skip
        found = moments(part, moves, device)
        if first and own < 1:
            inputs, outputs = self._given_bytes
            found[0]["transfer"] += ceil((1 - own) * (inputs + outputs * part.workload.training))
            merging = bytes_at(part.graph.backward_begin - 1, device, part.graph, moves)
            merging["activation"] += ceil((1 - own) * inputs + (2 - own) * outputs)
            found.append(Counter({**merging, "optimizer": found[0]["optimizer"]}))
        return found

    def run(self, cluster: Cluster, devices: Sequence[Device], rows: Sequence[int]) -> ReplicaPass:
        """A pass in which every device has so many rows."""
        replicas = tuple(
            self.of(device, share, first=not index)
            for index, (device, share) in enumerate(zip(devices, rows, strict=True))
        )
        names = [device.name for device in devices]
        return ReplicaPass(
            rows=tuple(rows), replicas=replicas, transfers=tuple(self._transfers(cluster, names, rows)),
            sum_seconds=all_reduce_seconds(cluster, names, self.trained) if self.trained else 0.0,
            launch_seconds=sum(
                device.launch_seconds * np.count_nonzero(op_seconds(self.profile, device)) for device in devices
            ),
        )  # fmt: skip

    def _transfers(self, cluster: Cluster, names: Sequence[str], rows: Sequence[int]) -> list[Transfer]:
        """Inputs from the first device to the others, and outputs back."""
        made, (inputs, outputs), home = [], self._given_bytes, names[0]
        for name, share in zip(names[1:], rows[1:], strict=True):
            for source, target, nbytes, ends in (
                (home, name, inputs, (INPUTS, "")), (name, home, outputs, ("", OUTPUTS)),
            ):  # fmt: skip
                size = round(nbytes * share / self.batch.size)
                if size:
                    made.append(Transfer(
                        source=source, destination=target, nbytes=size, producer=ends[0], consumer=ends[1],
                        seconds=cluster.link(source, target).seconds(size),
                    ))  # fmt: skip
        return made

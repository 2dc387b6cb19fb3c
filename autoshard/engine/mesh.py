"""What a plan over a mesh of devices costs: replicas of pipelines of tensor-parallel ranks.

    replica 0   stage 0 [cuda:0 cuda:1]  ──▶  stage 1 [cuda:2 cuda:3]     every [ ] shares the parameters of a stage
    replica 1   stage 0 [cuda:4 cuda:5]  ──▶  stage 1 [cuda:6 cuda:7]     gradients are summed over columns at the end

A rank's part of a stage is priced from the recorded run with the sizes of its slices and of its rows. A stage takes as
long as its slowest rank and the all-reduces between its ranks. Each replica runs its schedule by the clock. Then the
gradients of every rank are summed over the replicas, in buckets, with nothing to hide behind, and the optimizer steps.
In one process one thread launches the ops of all devices: a pass takes as long as that at least.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from autoshard.batching import BatchAxis
from autoshard.capture.graph import TensorInfo
from autoshard.capture.stages import stage_of_ops
from autoshard.cluster.cluster import Cluster, Device
from autoshard.cost import check_devices, divided_bound, of_every_device, optimizer_seconds
from autoshard.engine.cut_collectives import Alike, count_alike
from autoshard.engine.cuts import Traced, Tracer, local_sizes
from autoshard.engine.links import all_reduce_seconds
from autoshard.engine.pipelines import Run, device_estimate, run_schedule, stage_estimate, transfers_of
from autoshard.engine.replicas import BUCKET_BYTES, rows_per_replica
from autoshard.engine.stages import Figures, stage_figures
from autoshard.errors import PlanError
from autoshard.estimate import DeviceEstimate, Estimate, Event, Pipelining, gap_above
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.part import Sizes, carriers_of_rows, part_of_batch, with_sizes
from autoshard.profile.profile import Profile


def needs_processes(plan: Plan, cluster: Cluster) -> bool:
    """Whether a plan can only run with a process per device: several hosts, or a schedule that one can't issue."""
    hosts = {cluster.device(device.name).host for device in plan.devices}
    return len(hosts) > 1 or plan.schedule in ("interleaved", "zero-bubble")


def rows_of_part(size: int, parts: int) -> int:
    """Rows of the largest of so many parts of a batch. Raises `PlanError` if there are fewer rows than parts."""
    if size < parts:
        raise PlanError(
            f"a batch of {size} can't be divided into {parts} micro-batches: use at most {size}, or a larger batch."
        )
    return ceil(size / parts)


def estimate_stages(
    plan: Plan, profile: Profile, cluster: Cluster, *, tracer: Tracer | None = None, processes: bool | None = None
) -> Estimate:
    """Compute what a plan with stages or tensor-parallel ranks costs.

    `tracer`: of the profile's graph, if there is one. `processes`: whether every device has a process of its own; by
    default what the mesh, the schedule and the hosts say. Raises `PlanError` if the plan names what the model or the
    cluster lacks, or can't be run.
    """
    return _Combined(plan, profile, cluster, tracer, processes).estimate()


def run_plan(plan: Plan, profile: Profile, cluster: Cluster, *, processes: bool | None = None) -> Run:
    """Work out the stages of a pipeline and run them by the clock; as `estimate_stages`, which also prices them."""
    return _Combined(plan, profile, cluster, None, processes).replicas()[0].run


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Seconds of the collectives of a stage for one micro-batch; forward ones come again where it is recomputed."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """One replica by the clock. `ranks`: per tensor rank, its figures; `sums`: per stage, what is done together."""

    run: Run
    ranks: tuple[Figures, ...]
    sums: tuple[_Sums, ...]


@dataclass(slots=True)
class _Combined:
    """Prices a plan; what equal ranks and equal groups share is computed once."""

    plan: Plan
    profile: Profile
    cluster: Cluster
    tracer: Tracer | None
    processes: bool | None
    mesh: Mesh = field(init=False)
    traced: Traced = field(init=False)
    carrying: frozenset[int] = field(init=False)
    alike: dict[int, list[Alike]] = field(init=False)
    local: dict[tuple[int, ...], tuple[Sizes | None, tuple[TensorInfo, ...] | None]] = field(default_factory=dict)
    figures: dict[object, Figures] = field(default_factory=dict)
    collectives: dict[object, _Sums] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan, batch = self.plan, self.plan.batch
        self.mesh = mesh = plan.mesh or Mesh()
        check_devices((device.name for device in plan.devices), self.cluster, "has stages and replicas on")
        if mesh.sharded:
            raise PlanError(
                "replicas that keep a part of all parameters each can't have stages or tensor-parallel ranks."
            )
        if (batch is None and (mesh.size > mesh.tensor or plan.num_microbatches > 1)) or len(
            self.stages
        ) < mesh.pipeline:
            raise PlanError("this plan has no stages, or does not say how the batch is divided. Plan again.")
        if self.processes is None:
            self.processes = mesh.pipeline < mesh.size or needs_processes(plan, self.cluster)
        graph = self.profile.graph
        self.traced = (self.tracer or Tracer(graph)).trace(plan.cuts) if plan.cuts else Traced()
        self.carrying = frozenset() if batch is None else carriers_of_rows(graph, batch)
        op_stage = stage_of_ops(graph, [stage.paths for stage in self.stages]) if plan.cuts else ()
        self.alike = count_alike(self.traced.collectives, graph, op_stage, self.carrying)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.plan.stages or (Stage(paths=("",)),)

    def _name(self, data: int, pipeline: int, tensor: int) -> str:
        return self.plan.devices[self.mesh.rank(data=data, pipeline=pipeline, tensor=tensor)].name

    def replicas(self) -> list[_Replica]:
        """All replicas by the clock."""
        batch, mesh = self.plan.batch, self.mesh
        rows = [0] if batch is None else rows_per_replica(batch, mesh.shares, mesh.data)
        return [self._replica(index, batch, share) for index, share in enumerate(rows)]

    def _replica(self, index: int, batch: BatchAxis | None, rows: int) -> _Replica:
        """Run the schedule of one replica, whose batch has so many rows."""
        mesh, count = self.mesh, self.plan.num_microbatches
        part = rows if batch is None else rows_of_part(rows, count)
        ranks = tuple(self._rank(index, tensor, batch, part) for tensor in range(mesh.tensor))
        share = 1.0 if batch is None else part / batch.size
        sums = tuple(
            self._sums(stage, [self._name(index, stage % mesh.pipeline, t) for t in range(mesh.tensor)], share)
            for stage in range(len(self.stages))
        )
        slowest = []
        for i, own in enumerate(zip(*(figures.stages for figures in ranks), strict=True)):
            back = max(one.backward_seconds for one in own) + self._back(sums[i], own[0].recompute)
            weight = back if i == 0 else max(one.weight_seconds for one in own)
            forward = max(one.forward_seconds for one in own) + sums[i].forward
            slowest.append(replace(own[0], forward_seconds=forward, backward_seconds=back, weight_seconds=weight))
        names = tuple(self._name(index, position, 0) for position in range(mesh.pipeline))
        run = run_schedule(
            replace(ranks[0], stages=tuple(slowest)), names, self.cluster, self.plan.schedule, count,
            self.profile.workload, one_process=not self.processes,
        )  # fmt: skip
        return _Replica(run=run, ranks=ranks, sums=sums)

    def _rank(self, data: int, tensor: int, batch: BatchAxis | None, rows: int) -> Figures:
        """What the stages cost one tensor rank."""
        mesh, stages = self.mesh, self.stages
        devices = [self.cluster.device(self._name(data, i % mesh.pipeline, tensor)) for i in range(len(stages))]
        shares = tuple(cut.shares[tensor] for cut in self.plan.cuts)
        key = (rows, shares, *map(_kind, devices))
        if key not in self.figures:
            if shares not in self.local:
                cut = bool(self.plan.cuts)
                self.local[shares] = local_sizes(self.profile, self.traced, tensor) if cut else (None, None)
            sizes, tensors = self.local[shares]
            if batch is not None:
                part = part_of_batch(self.profile, batch, rows, carrying=self.carrying, sizes=sizes, tensors=tensors)
            else:
                part = self.profile if sizes is None else with_sizes(self.profile, sizes, tensors=tensors)
            self.figures[key] = stage_figures(
                self.profile, part, stages, devices, processes=bool(self.processes), schedule=self.plan.schedule,
                batch=batch,
            )  # fmt: skip
        return self.figures[key]

    def _sums(self, stage: int, names: Sequence[str], share: float) -> _Sums:
        """What the ranks of a stage do together for a part of the batch."""
        if len(names) < 2:
            return _Sums()
        devices = [self.cluster.device(name) for name in names]
        key = (stage, share, *((_kind(device), device.host == devices[0].host) for device in devices))
        if key not in self.collectives:
            both = [alike.seconds(self.cluster, names, share) for alike in self.alike.get(stage, ())]
            self.collectives[key] = _Sums(forward=sum(one for one, _ in both), backward=sum(one for _, one in both))
        return self.collectives[key]

    def _back(self, sums: _Sums, recompute: bool) -> float:
        """Seconds of the collectives of the backward of a stage."""
        if not self.profile.workload.training:
            return 0.0
        return sums.backward + (sums.forward if recompute else 0.0)

    def estimate(self) -> Estimate:
        """All devices of all replicas, the sums of gradients over replicas, and the end of the pass."""
        mesh, training, replicas = self.mesh, self.profile.workload.training, self.replicas()
        rows: dict[str, DeviceEstimate] = {}
        events: list[Event] = []
        latency = summed = 0.0
        reduces = 0
        for position in range(mesh.pipeline):
            ready = max(one.run.done[position] for one in replicas)
            for tensor in range(mesh.tensor):
                names = [self._name(data, position, tensor) for data in range(mesh.data)]
                nbytes = self._trained(replicas[0].ranks[tensor], position) if training else 0
                buckets = max(1, -(-nbytes // BUCKET_BYTES)) if nbytes and mesh.data > 1 else 0
                seconds = buckets * all_reduce_seconds(self.cluster, names, nbytes / max(buckets, 1))
                summed, reduces = max(summed, seconds), max(reduces, buckets)
                for data, (one, name) in enumerate(zip(replicas, names, strict=True)):
                    device = self.cluster.device(name)
                    step = optimizer_seconds(nbytes, self.profile.workload, device)
                    rows[name] = self._device(one, position, tensor, device, step, seconds)
                    begin = ready if seconds else one.run.done[position]
                    latency = max(latency, begin + seconds + step)
                    partners = {self._name(data, at, 0): self._name(data, at, tensor) for at in range(mesh.pipeline)}
                    events += [replace(event, device=name, source=partners.get(event.source, event.source))
                               for event in one.run.events if event.device == one.run.names[position]]  # fmt: skip
                    events += _at_the_end(name, "all-reduce", begin, seconds, nbytes)
                    events += _at_the_end(name, "optimizer", begin + seconds, step, 0)
        return self._estimate(replicas, rows, events, latency, summed, reduces)

    def _trained(self, figures: Figures, position: int) -> int:
        mine = range(position, len(figures.stages), self.mesh.pipeline)
        return sum(nbytes for stage in mine for _, nbytes in figures.stages[stage].trained)

    def _device(
        self, one: _Replica, position: int, tensor: int, device: Device, step: float, reduce: float
    ) -> DeviceEstimate:
        """Bytes and seconds of one rank: its own computing, and what it waits for links and other ranks."""
        workload, count = self.profile.workload, self.plan.num_microbatches
        mine = range(position, len(self.stages), self.mesh.pipeline)
        run = replace(one.run, figures=one.ranks[tensor])
        own = [one.ranks[tensor].stages[i] for i in mine]
        sums = sum(one.sums[i].forward + self._back(one.sums[i], one.run.figures.stages[i].recompute) for i in mine)
        incoming = sum(sent.end - sent.begin for sent in run.simulated.sent if sent.destination == position)
        figures = device_estimate(run, position, device, count, workload, step, incoming + count * sums + reduce)
        seconds = count * sum(stage.forward_seconds + stage.backward_seconds * workload.training for stage in own)
        return replace(figures, compute_seconds=seconds + step)

    def _estimate(
        self, replicas: Sequence[_Replica], rows: dict[str, DeviceEstimate], events: list[Event], latency: float,
        summed: float, reduces: int,
    ) -> Estimate:  # fmt: skip
        plan, training, first = self.plan, self.profile.workload.training, replicas[0].run
        count = plan.num_microbatches
        launch = 0.0 if self.processes else count * sum(stage.launch_seconds for stage in first.figures.stages)
        latency = max(latency, launch)
        bound = max(launch, divided_bound(self.profile, self.cluster))
        busiest = min(max(row.compute_seconds + row.transfer_seconds for row in rows.values()), latency)
        together = self.traced.of_pass(training)
        gathers = sum(one.gathers for one in together)
        collective = max(sum(sums.forward + self._back(sums, False) for sums in one.sums) for one in replicas)
        bubble = sum(one.run.simulated.bubble for one in replicas) / len(replicas)
        return Estimate(
            devices=of_every_device(rows, self.cluster),
            transfers=transfers_of(first, self.profile, count, self.cluster),
            objective=plan.objective,
            latency_seconds=latency,
            bottleneck_seconds=busiest,
            lower_bound_seconds=bound,
            gap=gap_above(busiest if plan.objective == "throughput" and not training else latency, bound),
            aligned=first.figures.aligned,
            written_back=first.figures.written_back,
            notes=self.profile.graph.notes,
            collective_seconds=collective * count + summed + max(one.run.reduce_seconds for one in replicas),
            all_reduces=(len(together) - gathers) * count + reduces + len(first.figures.shared),
            all_gathers=gathers * count,
            pipelining=Pipelining(
                schedule=plan.schedule, num_microbatches=count,
                stages=tuple(stage_estimate(first, i) for i in range(len(self.stages))), bubble=bubble,
                events=tuple(sorted(events, key=lambda e: (e.begin_seconds, e.device, e.end_seconds))),
            ),
        )  # fmt: skip


def _kind(device: Device) -> tuple[object, ...]:
    """What makes devices alike to the model of cost."""
    return (*device.speed, device.block_bytes, device.overhead_bytes)


def _at_the_end(device: str, kind: str, begin: float, seconds: float, nbytes: int) -> list[Event]:
    event = Event(device=device, kind=kind, begin_seconds=begin, end_seconds=begin + seconds, nbytes=nbytes)
    return [event] if seconds else []

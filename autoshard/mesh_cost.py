"""What a plan over a mesh of devices costs: replicas of pipelines of tensor-parallel ranks.

    replica 0   stage 0 [cuda:0 cuda:1]  ──▶  stage 1 [cuda:2 cuda:3]     every [ ] shares the parameters of a stage
    replica 1   stage 0 [cuda:4 cuda:5]  ──▶  stage 1 [cuda:6 cuda:7]     gradients are summed over columns at the end

A rank's part of a stage is priced from the recorded run with the sizes of its slices and of its rows. A stage takes as
long as its slowest rank and the all-reduces between its ranks. Each replica runs its schedule by the clock. Then the
gradients of every rank are summed over the replicas, in buckets, with nothing to hide behind, and the optimizer steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from autoshard.answer_cost import of_answer
from autoshard.batching import BatchAxis
from autoshard.capture.graph import TensorInfo
from autoshard.capture.stages import stage_of_ops
from autoshard.cluster.cluster import Cluster, Device
from autoshard.collective_cost import all_reduce_seconds
from autoshard.cost import check_devices, divided_bound, estimate, of_every_device, optimizer_seconds
from autoshard.cut_collectives import Alike, count_alike
from autoshard.cut_cost import Traced, Tracer, estimate_cuts, local_sizes
from autoshard.cut_stream_cost import estimate_cut_streams
from autoshard.errors import PlanError
from autoshard.estimate import DeviceEstimate, Estimate, Event, Pipelining, gap_above
from autoshard.pipeline_cost import Run, device_estimate, estimate_pipeline, needs_processes, rows_of_part, run_schedule
from autoshard.pipeline_cost import price as price_pipeline
from autoshard.plan import Mesh, Plan, Stage
from autoshard.profile.part import Sizes, carriers_of_rows, part_of_batch, with_sizes
from autoshard.profile.profile import Profile
from autoshard.replica_cost import BUCKET_BYTES, estimate_replicas, rows_per_replica
from autoshard.stage_cost import Figures, stage_figures
from autoshard.stream_cost import estimate_streamed

UNDIVIDED = (
    "a cache belongs to all rows of the batch, so generate() runs undivided, one device after another, and is priced so"
)


def in_one_piece(plan: Plan) -> Plan:
    """The same placements without dividing the batch."""
    return replace(plan, mesh=None, batch=None, num_microbatches=1, schedule="none")


def price(plan: Plan, profile: Profile, cluster: Cluster, *, lower_bound_seconds: float | None = None) -> Estimate:
    """Compute what any plan costs: one that places modules, streams them, cuts parameters, or has a mesh.

    `lower_bound_seconds`: of plans that place or stream modules, if it is known or does not matter.
    """
    if plan.mesh is None and not plan.cuts:
        if plan.streamed:
            return estimate_streamed(plan, profile, cluster, lower_bound_seconds=lower_bound_seconds)
        return estimate(plan, profile, cluster, lower_bound_seconds=lower_bound_seconds)

    def recorded(half: Profile) -> Estimate:
        if plan.mesh is not None:
            return estimate_mesh(plan, half, cluster)
        return (estimate_cut_streams if plan.streamed else estimate_cuts)(plan, half, cluster)

    return of_answer(recorded(profile), profile, recorded)


class Pricer:
    """Prices plans of one profile on one cluster, as `price`; a plan that was priced before costs nothing.

    `processes`: whether every device has a process of its own; None: what each plan and the hosts say.
    """

    def __init__(self, profile: Profile, cluster: Cluster, *, processes: bool | None = None) -> None:
        self.profile, self.cluster, self.processes = profile, cluster, processes
        self._known: list[tuple[Plan, Estimate]] = []
        self._halves: dict[int, Pricer] = {}

    @cached_property
    def tracer(self) -> Tracer:
        """Follows cuts through the recorded run."""
        return Tracer(self.profile.graph)

    def __call__(self, plan: Plan) -> Estimate:
        known = next((figures for one, figures in self._known if one == _decisions(plan)), None)
        if known is None:
            if plan.mesh is not None:
                tracer = self.tracer if plan.cuts else None
                known = estimate_mesh(plan, self.profile, self.cluster, tracer=tracer, processes=self.processes)
            elif plan.cuts:
                cut_price = estimate_cut_streams if plan.streamed else estimate_cuts
                known = cut_price(plan, self.profile, self.cluster, tracer=self.tracer)
            else:
                known = price(plan, self.profile, self.cluster)
            self.remember(plan, known)
        return known

    def answer(self, plan: Plan) -> Estimate:
        """Price a plan for a whole answer, where one is asked for; else as it is called."""
        found = self(plan)
        if plan.mesh is None and not plan.cuts:
            return found
        return of_answer(found, self.profile, lambda half: self._half(half)(plan))

    def _half(self, half: Profile) -> "Pricer":
        known = self._halves.get(id(half))
        if known is None:
            known = self._halves[id(half)] = Pricer(half, self.cluster, processes=self.processes)
        return known

    def remember(self, plan: Plan, figures: Estimate) -> None:
        """Keep the estimate of a plan that somebody else made."""
        self._known.append((_decisions(plan), figures))


def _decisions(plan: Plan) -> Plan:
    """What of a plan its price depends on: not what it says about itself, nor what is noted for the run."""
    return replace(plan, reasons=(), whole=(), results=(), aligned=(), written_back=())


def estimate_mesh(
    plan: Plan, profile: Profile, cluster: Cluster, *, tracer: Tracer | None = None, processes: bool | None = None
) -> Estimate:
    """Compute what a plan with a mesh costs; `tracer`: of the profile's graph, if there is one already.

    `processes`: whether every device has a process of its own; by default what the plan and the hosts say. Raises
    `PlanError` if the plan names what the model or the cluster lacks.
    """
    mesh = plan.mesh
    if mesh is None:
        raise PlanError("this plan has no mesh.")
    if (
        profile.workload.new_tokens
        and mesh.tensor == 1
        and not (processes or mesh.sharded or needs_processes(plan, cluster))
    ):
        found = estimate(in_one_piece(plan), replace(profile, further=None), cluster)
        return replace(found, notes=(*found.notes, UNDIVIDED))
    if mesh.pipeline == 1 and mesh.tensor == 1:
        return estimate_replicas(plan, profile, cluster, processes=processes)
    if mesh.data == 1 and mesh.tensor == 1:
        return estimate_pipeline(plan, profile, cluster, processes=processes)
    return _Combined(plan=plan, mesh=mesh, profile=profile, cluster=cluster, tracer=tracer).estimate()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Replica:
    """One replica by the clock. `ranks`: per tensor rank, its figures; `sums`: per stage, what is done together."""

    run: Run
    ranks: tuple[Figures, ...]
    sums: tuple["_Sums", ...]
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    """Seconds of the collectives of a stage for one micro-batch; forward ones come again where it is recomputed."""

    forward: float = 0.0
    backward: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Combined:
    """Prices a plan; what equal ranks and equal groups share is computed once."""

    plan: Plan
    mesh: Mesh
    profile: Profile
    cluster: Cluster
    tracer: Tracer | None = None
    traced: Traced = field(init=False)
    carrying: frozenset[int] = field(init=False)
    alike: dict[int, list[Alike]] = field(init=False)
    local: dict[tuple[int, ...], tuple[Sizes | None, tuple[TensorInfo, ...] | None]] = field(default_factory=dict)
    figures: dict[object, Figures] = field(default_factory=dict)
    collectives: dict[object, _Sums] = field(default_factory=dict)

    def estimate(self) -> Estimate:
        plan, mesh, batch = self.plan, self.mesh, self.plan.batch
        check_devices((device.name for device in plan.devices), self.cluster, "has stages and replicas on")
        if mesh.sharded:
            raise PlanError(
                "replicas that keep a part of all parameters each can't have stages or tensor-parallel ranks."
            )
        if batch is None and (mesh.data > 1 or plan.num_microbatches > 1):
            raise PlanError("this plan does not say how the batch is divided. Plan again.")
        graph = self.profile.graph
        self.traced = (self.tracer or Tracer(graph)).trace(plan.cuts)
        op_stage = stage_of_ops(graph, [stage.paths for stage in self.stages])
        self.carrying = frozenset() if batch is None else carriers_of_rows(graph, batch)
        self.alike = count_alike(self.traced.collectives, graph, op_stage, self.carrying)
        rows = [0] if batch is None else rows_per_replica(batch, mesh.shares, mesh.data)
        replicas = [self._replica(index, batch, share) for index, share in enumerate(rows)]
        return self._joined(replicas)

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.plan.stages or (Stage(paths=("",)),)

    def _name(self, data: int, pipeline: int, tensor: int) -> str:
        return self.plan.devices[self.mesh.rank(data=data, pipeline=pipeline, tensor=tensor)].name

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
        figures = replace(ranks[0], stages=tuple(slowest))
        run = run_schedule(figures, names, self.cluster, self.plan.schedule, count, self.profile.workload)
        return _Replica(
            run=run, ranks=ranks, sums=sums, estimate=price_pipeline(run, self.plan, self.profile, self.cluster)
        )

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
            schedule = self.plan.schedule
            self.figures[key] = stage_figures(self.profile, part, stages, devices, processes=True, schedule=schedule)
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

    def _joined(self, replicas: Sequence[_Replica]) -> Estimate:
        """All devices of all replicas, the sums of gradients over replicas, and the end of the pass."""
        mesh, training = self.mesh, self.profile.workload.training
        rows: dict[str, DeviceEstimate] = {}
        events: list[Event] = []
        latency = summed = 0.0
        reduces = 0
        for position in range(mesh.pipeline):
            firsts = [self._name(data, position, 0) for data in range(mesh.data)]
            ready = max(_done(one.estimate, name) for one, name in zip(replicas, firsts, strict=True))
            for tensor in range(mesh.tensor):
                names = [self._name(data, position, tensor) for data in range(mesh.data)]
                nbytes = self._trained(replicas[0].ranks[tensor], position) if training else 0
                buckets = max(1, -(-nbytes // BUCKET_BYTES)) if nbytes and mesh.data > 1 else 0
                seconds = buckets * all_reduce_seconds(self.cluster, names, nbytes / max(buckets, 1))
                summed, reduces = max(summed, seconds), max(reduces, buckets)
                for one, name, first in zip(replicas, names, firsts, strict=True):
                    device = self.cluster.device(name)
                    step = optimizer_seconds(nbytes, self.profile.workload, device)
                    rows[name] = self._device(one, position, tensor, device, step, seconds, first)
                    begin = ready if seconds else _done(one.estimate, first)
                    latency = max(latency, begin + seconds + step)
                    events += _moved(one.estimate, first, name, dict(zip(one.run.names, self._row(name), strict=True)))
                    if seconds:
                        events.append(_event(name, "all-reduce", begin, begin + seconds, nbytes))
                    if step:
                        events.append(_event(name, "optimizer", begin + seconds, begin + seconds + step, 0))
        return self._estimate(replicas, rows, events, latency, summed, reduces)

    def _row(self, name: str) -> list[str]:
        """The devices of all stages that work with one device: of its replica and tensor rank."""
        rank = next(i for i, device in enumerate(self.plan.devices) if device.name == name)
        data, _, tensor = self.mesh.place(rank)
        return [self._name(data, position, tensor) for position in range(self.mesh.pipeline)]

    def _trained(self, figures: Figures, position: int) -> int:
        mine = range(position, len(figures.stages), self.mesh.pipeline)
        return sum(nbytes for stage in mine for _, nbytes in figures.stages[stage].trained)

    def _device(
        self, one: _Replica, position: int, tensor: int, device: Device, step: float, reduce: float, first: str
    ) -> DeviceEstimate:
        """Bytes and seconds of one rank: its own computing, and what it waits for links and other ranks."""
        workload, count = self.profile.workload, self.plan.num_microbatches
        mine = range(position, len(self.stages), self.mesh.pipeline)
        run = replace(one.run, figures=one.ranks[tensor])
        own = [one.ranks[tensor].stages[i] for i in mine]
        sums = sum(one.sums[i].forward + self._back(one.sums[i], one.run.figures.stages[i].recompute) for i in mine)
        incoming = next(row.transfer_seconds for row in one.estimate.devices if row.name == first)
        figures = device_estimate(run, position, device, count, workload, step, incoming + count * sums + reduce)
        seconds = count * sum(stage.forward_seconds + stage.backward_seconds * workload.training for stage in own)
        return replace(figures, compute_seconds=seconds + step)

    def _estimate(
        self, replicas: Sequence[_Replica], rows: dict[str, DeviceEstimate], events: list[Event], latency: float,
        summed: float, reduces: int,
    ) -> Estimate:  # fmt: skip
        plan, training, first = self.plan, self.profile.workload.training, replicas[0]
        devices = of_every_device(rows, self.cluster)
        bound = divided_bound(self.profile, self.cluster)
        busiest = max(row.compute_seconds + row.transfer_seconds for row in rows.values())
        value = latency if training or plan.objective == "latency" else busiest
        together = self.traced.of_pass(training)
        gathers = sum(one.gathers for one in together)
        collective = max(sum(sums.forward + self._back(sums, False) for sums in one.sums) for one in replicas)
        pipelining = first.estimate.pipelining
        assert pipelining is not None
        bubble = sum(one.run.simulated.bubble for one in replicas) / len(replicas)
        return Estimate(
            devices=devices,
            transfers=first.estimate.transfers,
            objective=plan.objective,
            latency_seconds=latency,
            bottleneck_seconds=min(busiest, latency),
            lower_bound_seconds=bound,
            gap=gap_above(value, bound),
            notes=self.profile.graph.notes,
            collective_seconds=collective * plan.num_microbatches + summed,
            all_reduces=(len(together) - gathers) * plan.num_microbatches + reduces,
            all_gathers=gathers * plan.num_microbatches,
            pipelining=Pipelining(
                schedule=plan.schedule, num_microbatches=plan.num_microbatches, stages=pipelining.stages, bubble=bubble,
                events=tuple(sorted(events, key=lambda e: (e.begin_seconds, e.device, e.end_seconds))),
            ),
        )  # fmt: skip


def _kind(device: Device) -> tuple[object, ...]:
    """What makes devices alike to the model of cost."""
    return (*device.speed, device.block_bytes, device.overhead_bytes)


def _done(figures: Estimate, name: str) -> float:
    """When a device is done with a replica's schedule, before its optimizer step."""
    assert figures.pipelining is not None
    ends = (e.end_seconds for e in figures.pipelining.events if e.device == name and e.kind != "optimizer")
    return max(ends, default=0.0)


def _moved(figures: Estimate, first: str, name: str, partner: dict[str, str]) -> list[Event]:
    """What the device of tensor rank 0 does, as another rank of its group does at the same time."""
    assert figures.pipelining is not None
    return [
        replace(event, device=name, source=partner.get(event.source, event.source))
        for event in figures.pipelining.events if event.device == first and event.kind != "optimizer"
    ]  # fmt: skip


def _event(device: str, kind: str, begin: float, end: float, nbytes: int) -> Event:
    return Event(device=device, kind=kind, begin_seconds=begin, end_seconds=end, nbytes=nbytes)

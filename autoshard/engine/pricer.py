"""What any plan for one process costs: placed, offloaded, with cuts, with replicas or stages.

An answer is a prompt and n - 1 further tokens, each priced as a pass. Memory is that of the recorded run, whose last
step finds the cache of the whole answer.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.engine.cuts import Tracer, estimate_cuts
from autoshard.engine.estimate import Estimate, gap_above
from autoshard.engine.offloaded import compute_devices, estimate_offloaded, streaming_bound
from autoshard.engine.pipelines import estimate_stages
from autoshard.engine.placed import check_devices, estimate_placed, lower_bound
from autoshard.engine.replicas import estimate_replicas
from autoshard.errors import PlanError
from autoshard.flow import Flow, flow
from autoshard.plan import Mesh, Plan
from autoshard.profile.accelerator import on_devices
from autoshard.profile.answer import prompt_and_token
from autoshard.profile.profile import Profile

UNDIVIDED = (
    "a cache belongs to all rows of the batch, so generate() runs undivided, one device after another, and is priced so"
)


def in_one_piece(plan: Plan) -> Plan:
    """The same placements without dividing the batch."""
    return replace(plan, mesh=None, batch=None, num_microbatches=1, schedule="none")


def price(
    plan: Plan, profile: Profile, cluster: Cluster, *, flow_of_plan: Flow | None = None,
    lower_bound_seconds: float | None = None, tracer_of: Callable[[Profile], Tracer] | None = None,
) -> Estimate:  # fmt: skip
    """Compute what any plan costs: one that places modules, streams them, cuts parameters, or has a mesh.

    `flow_of_plan`, of plans that place or stream modules, and `tracer_of`, of those with cuts, save what was worked out
    already; `lower_bound_seconds` replaces the bound computed here. Raises `PlanError` if the plan names what the model
    or the cluster lacks, leaves a tensor without a device, or is one for processes.
    """
    profile = on_devices(profile, cluster)
    if plan.mesh is not None:
        mesh = check_mesh(plan, cluster)
        if profile.workload.new_tokens:
            found = price(in_one_piece(plan), profile, cluster)
            return replace(found, notes=(*found.notes, UNDIVIDED))
        found = (estimate_replicas if mesh.pp == 1 else estimate_stages)(plan, profile, cluster)
        return of_answer(found, profile, lambda half: found)
    if plan.cuts:

        def cut(half: Profile) -> Estimate:
            return estimate_cuts(plan, half, cluster, tracer=tracer_of(half) if tracer_of else None)

        return of_answer(cut(profile), profile, cut)
    check_devices([*plan.placements.values(), *plan.offloaded.values()], cluster, "needs")
    moves = flow_of_plan or flow(profile.graph, plan.placements)
    bound = lower_bound_seconds
    if bound is None and plan.offloaded:
        bound = streaming_bound(profile, cluster, plan.objective, compute_devices(cluster))
    elif bound is None:
        bound = lower_bound(profile, cluster, divided=plan.objective == "throughput")

    def placed(half: Profile) -> Estimate:
        used = replace(moves, uncounted=half.graph.uncounted)
        if plan.offloaded:
            return estimate_offloaded(plan, half, cluster, used)
        return estimate_placed(half, cluster, used, plan.objective)

    found = of_answer(placed(profile), profile, placed, in_turns=not plan.offloaded)
    value = found.bottleneck_seconds if plan.objective == "throughput" else found.latency_seconds
    return replace(found, lower_bound_seconds=bound, gap=gap_above(value, bound))


class Pricer:
    """Prices plans of one profile on one cluster, as `price`; a plan that was priced before costs nothing."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self.profile, self.cluster = profile, cluster
        self._known: list[tuple[Plan, Estimate]] = []
        self._tracers: list[Tracer] = []

    def __call__(self, plan: Plan) -> Estimate:
        # Neither what a plan says about itself nor what is noted for the run changes its price.
        decisions = replace(plan, reasons=(), whole=(), results=(), mixed_device=(), written_back=())
        known = next((estimate for one, estimate in self._known if one == decisions), None)
        if known is None:
            known = price(plan, self.profile, self.cluster, tracer_of=self._tracer)
            self._known.append((decisions, known))
        return known

    def _tracer(self, profile: Profile) -> Tracer:
        """Follows cuts through a recorded run: the whole, or a half of an answer."""
        known = next((tracer for tracer in self._tracers if tracer.graph is profile.graph), None)
        if known is None:
            known = Tracer(profile.graph)
            self._tracers.append(known)
        return known


def check_mesh(plan: Plan, cluster: Cluster) -> Mesh:
    """The mesh of a plan with replicas or stages in one process. Raises `PlanError` as above."""
    mesh = plan.mesh
    if mesh is None:
        raise PlanError("this plan has no mesh.")
    check_devices((device.name for device in plan.devices), cluster, "needs")
    if needs_processes(plan, (cluster.device(device.name).host for device in plan.devices)):
        raise PlanError(
            "this plan needs a process per device, and such plans are priced with the model itself: use "
            'autoshard.estimate, or plan again with launch="processes".'
        )
    return mesh


def needs_processes(plan: Plan, hosts: Iterable[str]) -> bool:
    """Whether a plan with a mesh runs only with a process per device; `hosts`: of its devices."""
    mesh = plan.mesh
    assert mesh is not None
    divided = mesh.sharded or mesh.size not in (mesh.data, mesh.pp)
    return divided or plan.schedule not in ("none", "gpipe") or len(set(hosts)) > 1


def of_answer(
    recorded: Estimate, profile: Profile, price: Callable[[Profile], Estimate], *, in_turns: bool = False
) -> Estimate:
    """Return the estimate of the whole answer from that of the run as it was recorded; the same where there is none.

    `price`: prices the same plan for one of the halves. `in_turns`: each device does nothing but compute and copy, so
    that answers can overlap but for the busiest one.
    """
    halves = prompt_and_token(profile)
    if halves is None:
        seconds = recorded.latency_seconds
        return replace(recorded, tokens_per_second=_tokens(profile) / seconds if seconds else 0.0)
    times = profile.further or 0
    prompt = price(halves[0])
    token = price(halves[1]) if times else prompt

    def whole(of: Callable[[Estimate], float]) -> float:
        return of(prompt) + times * of(token)

    devices = tuple(
        replace(
            row,
            compute_seconds=first.compute_seconds + times * further.compute_seconds,
            transfer_seconds=first.transfer_seconds + times * further.transfer_seconds,
        )
        for row, first, further in zip(recorded.devices, prompt.devices, token.devices, strict=True)
    )
    latency = whole(lambda one: one.latency_seconds)
    busiest = max(device.compute_seconds + device.transfer_seconds for device in devices)
    bottleneck = busiest if in_turns else whole(lambda one: one.bottleneck_seconds)
    bound = whole(lambda one: one.lower_bound_seconds)
    value = bottleneck if recorded.objective == "throughput" else latency
    return replace(
        recorded,
        devices=devices,
        latency_seconds=latency,
        bottleneck_seconds=bottleneck,
        lower_bound_seconds=bound,
        gap=gap_above(value, bound),
        collective_seconds=whole(lambda one: one.collective_seconds),
        streaming=token.streaming,
        prompt_seconds=prompt.latency_seconds,
        token_seconds=token.latency_seconds if times else 0.0,
        tokens_per_second=_sequences(profile) * profile.workload.new_tokens / latency if latency else 0.0,
    )


def _tokens(profile: Profile) -> int:
    """Tokens of one pass; 0 where inputs are none, or a cache is in use."""
    workload = profile.workload
    return 0 if workload.new_tokens else _sequences(profile) * (workload.sequence_length or 0)


def _sequences(profile: Profile) -> int:
    """How many sequences are answered at a time."""
    given = (profile.graph.values[value].shape for value in profile.graph.inputs)
    return profile.workload.batch_size or next((shape[0] for shape in given if shape), 1)

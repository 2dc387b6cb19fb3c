"""What any plan for one process costs, or an old one for processes: placed, streamed, with cuts, or over a mesh."""

from dataclasses import replace
from functools import cached_property

from autoshard.cluster.cluster import Cluster
from autoshard.engine.answers import of_answer
from autoshard.engine.cuts import Tracer, estimate_cuts
from autoshard.engine.estimate import Estimate, gap_above
from autoshard.engine.pipelines import estimate_stages, needs_processes
from autoshard.engine.placed import check_devices, estimate_placed, lower_bound
from autoshard.engine.replicas import estimate_replicas
from autoshard.engine.streamed import compute_devices, estimate_streamed, streaming_bound
from autoshard.errors import PlanError
from autoshard.flow import Flow, flow
from autoshard.plan import Plan
from autoshard.profile.profile import Profile

UNDIVIDED = (
    "a cache belongs to all rows of the batch, so generate() runs undivided, one device after another, and is priced so"
)


def in_one_piece(plan: Plan) -> Plan:
    """The same placements without dividing the batch."""
    return replace(plan, mesh=None, batch=None, num_microbatches=1, schedule="none")


def price(
    plan: Plan, profile: Profile, cluster: Cluster, *, flow_of_plan: Flow | None = None,
    lower_bound_seconds: float | None = None,
) -> Estimate:  # fmt: skip
    """Compute what any plan costs: one that places modules, streams them, cuts parameters, or has a mesh.

    For plans that place or stream modules, `flow_of_plan` saves the walk if it was made already, and
    `lower_bound_seconds` replaces the bound computed here. Raises `PlanError` if the plan names a device that the
    cluster lacks or leaves a tensor without one.
    """
    if plan.mesh is not None or plan.cuts:

        def divided(half: Profile) -> Estimate:
            return estimate_mesh(plan, half, cluster) if plan.mesh is not None else estimate_cuts(plan, half, cluster)

        return of_answer(divided(profile), profile, divided)
    check_devices([*plan.placements.values(), *plan.streamed.values()], cluster, "needs")
    moves = flow_of_plan or flow(profile.graph, plan.placements)
    bound = lower_bound_seconds
    if bound is None and plan.streamed:
        bound = streaming_bound(profile, cluster, plan.objective, compute_devices(cluster))
    elif bound is None:
        bound = lower_bound(profile, cluster, divided=plan.objective == "throughput")

    def recorded(half: Profile) -> Estimate:
        used = replace(moves, uncounted=half.graph.uncounted)
        if plan.streamed:
            return estimate_streamed(plan, half, cluster, used)
        return estimate_placed(half, cluster, used, plan.objective)

    found = of_answer(recorded(profile), profile, recorded, in_turns=not plan.streamed)
    value = found.bottleneck_seconds if plan.objective == "throughput" else found.latency_seconds
    return replace(found, lower_bound_seconds=bound, gap=gap_above(value, bound))


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
                known = estimate_mesh(plan, self.profile, self.cluster, processes=self.processes)
            elif plan.cuts:
                known = estimate_cuts(plan, self.profile, self.cluster, tracer=self.tracer)
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


def estimate_mesh(plan: Plan, profile: Profile, cluster: Cluster, *, processes: bool | None = None) -> Estimate:
    """Compute what a plan with replicas or stages costs.

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
        found = price(in_one_piece(plan), replace(profile, further=None), cluster)
        return replace(found, notes=(*found.notes, UNDIVIDED))
    if mesh.pipeline == 1 and mesh.tensor == 1:
        return estimate_replicas(plan, profile, cluster, processes=processes)
    return estimate_stages(plan, profile, cluster, processes=processes)

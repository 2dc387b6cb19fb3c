"""What a plan over a mesh of devices costs: replicas of pipelines of tensor-parallel ranks."""

from autoshard.cluster.cluster import Cluster
from autoshard.cost import estimate
from autoshard.cut_cost import estimate_cuts
from autoshard.errors import PlanError
from autoshard.estimate import Estimate
from autoshard.pipeline_cost import estimate_pipeline
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.replica_cost import estimate_replicas
from autoshard.stream_cost import estimate_streamed


def price(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute what any plan costs: one that places modules, streams them, cuts parameters, or has a mesh."""
    if plan.mesh is not None:
        return estimate_mesh(plan, profile, cluster)
    of_plan = estimate_cuts if plan.cuts else estimate_streamed if plan.streamed else estimate
    return of_plan(plan, profile, cluster)


def estimate_mesh(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute what a plan with a mesh costs. Raises `PlanError` if it names what the model or the cluster lacks."""
    mesh = plan.mesh
    if mesh is None:
        raise PlanError("this plan has no mesh.")
    if mesh.data == 1 and mesh.tensor == 1:
        return estimate_pipeline(plan, profile, cluster)
    if mesh.pipeline == 1 and mesh.tensor == 1:
        return estimate_replicas(plan, profile, cluster)
    raise PlanError("plans that combine replicas, stages and tensor-parallel ranks can't be priced yet.")

"""What replicas of a model cost."""

from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.estimate import Estimate
from autoshard.plan import Plan
from autoshard.profile.profile import Profile


def estimate_replicas(plan: Plan, profile: Profile, cluster: Cluster) -> Estimate:
    """Compute it."""
    raise PlanError("not there yet.")

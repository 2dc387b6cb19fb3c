"""Data-parallel: a replica of the model on every device, each with its part of the batch."""

from autoshard.batching import BatchAxis
from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.profile.profile import Profile


def data_parallel(
    profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput", processes: int = 0
) -> Plan:
    """Plan replicas; `processes`: how many run, 0 if all devices are used from one."""
    raise PlanError("not there yet.")

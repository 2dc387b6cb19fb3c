"""Pipeline: stages, micro-batches and their schedule, chosen together."""

from autoshard.batching import BatchAxis
from autoshard.cluster.cluster import Cluster
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.profile.profile import Profile


def pipeline(
    profile: Profile, cluster: Cluster, batch: BatchAxis, *, objective: str = "throughput",
    num_microbatches: int | None = None, schedule: str | None = None, processes: int = 0,
) -> Plan:  # fmt: skip
    """Plan a pipeline; `processes`: how many run, 0 if all devices are used from one."""
    raise PlanError("not there yet.")

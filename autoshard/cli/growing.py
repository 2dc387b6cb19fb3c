"""--max-batch and --max-seq of `autoshard plan`: every size is profiled and planned, and shown while it is tried."""

from typing import TYPE_CHECKING, Any

from torch import nn

from autoshard.cli.steps import load, profile_of
from autoshard.errors import SpecError
from autoshard.plan.workload import Workload

if TYPE_CHECKING:
    from autoshard.cli.target import Target
    from autoshard.cluster.cluster import Cluster
    from autoshard.plan import Plan
    from autoshard.profile.profile import Profile


def check_one_size(batch: bool, sequence: bool) -> None:
    """Raise `SpecError` where both sizes are asked to grow."""
    if batch and sequence:
        raise SpecError("--max-batch and --max-seq can't be asked for at once. Fix one of them with --batch or --seq.")


def plan_largest(
    target: str, workload: Workload, cluster: "Cluster", batch: bool, settings: dict[str, Any]
) -> "tuple[Plan, Target, Profile]":
    """Plan TARGET for the largest batch or sequence that fits; returns what was planned for it, too."""
    from autoshard.cli.processes import tell_size
    from autoshard.search.planning import largest_plan

    vary = "batch_size" if batch else "sequence_length"
    known: dict[int, tuple[Target, Profile]] = {}

    def measured(asked: Workload) -> "tuple[nn.Module, Any, Profile]":
        loaded = load(target, asked)
        profile = profile_of(loaded)
        known.clear()
        known[getattr(asked, vary)] = loaded, profile
        return loaded.model, loaded.inputs, profile

    plan = largest_plan(vary, workload, measured, cluster, tried=tell_size(vary.replace("_", " ")), **settings)
    size = getattr(plan.workload, vary)
    if size not in known:
        measured(plan.workload)
    loaded, profile = known[size]
    return plan, loaded, profile

"""Cuts that somebody wrote down: exactly what a `tp_plan` names is cut, if no check refuses it."""

from collections.abc import Mapping
from dataclasses import replace

from autoshard.axes.groups import AxisGroup, AxisGroups
from autoshard.cluster.cluster import Cluster
from autoshard.common.module_paths import join
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.plan.tp_plan import wanted_dims
from autoshard.profile.profile import Profile
from autoshard.strategies.column_parallel import CheckCuts, column_parallel


def as_written(
    profile: Profile,
    cluster: Cluster,
    found: AxisGroups,
    check: CheckCuts,
    tp_plan: Mapping[str, str],
    *,
    objective: str = "latency",
    even: bool = False,
) -> Plan:
    """Plan the cuts that a `tp_plan` names, over all devices of the cluster.

    Where tensors are summed and put together is worked out here, and all of it is checked. Raises `PlanError` where the
    dict names what the model does not have, or what can't be cut as it says, with the reason.
    """
    shapes = {tensor.name: tensor.shape for tensor in profile.graph.tensors}
    wanted = wanted_dims(tp_plan, shapes)
    matrices = {name for name in wanted if len(shapes[name]) > 1}
    named = [group for group in found.groups if _is_wanted(group, wanted, shapes)]
    plan = column_parallel(
        profile, cluster, replace(found, groups=tuple(named)), check,
        objective="memory", degree=len(cluster.devices), even=even,
    )  # fmt: skip
    stored = {tensor.name: tensor.storage for tensor in profile.graph.tensors}
    cut = {stored[join(block, shard.name)] for cut in plan.cuts for block in cut.blocks for shard in cut.shards}
    missing = sorted(name for name in matrices if stored[name] not in cut)
    if missing:
        raise PlanError(_refusal(missing, wanted, found, plan))
    reasons = f"exactly what the tp_plan names is cut: {len(matrices)} matrices over {len(cluster.devices)} devices"
    return replace(plan, objective=objective, reasons=(reasons, *plan.reasons))


def _is_wanted(group: AxisGroup, wanted: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether all that a group cuts of matrices is named, with the same dimension."""
    return all(
        wanted.get(join(block, shard.name)) == shard.dim
        for block in group.blocks
        for shard in group.shards
        if len(shapes[join(block, shard.name)]) > 1
    )


def _refusal(missing: list[str], wanted: Mapping[str, int], found: AxisGroups, plan: Plan) -> str:
    name = missing[0]
    why = next((f": {row.reason}" for row in found.unshardable if row.name == name and row.dim == wanted[name]), "")
    if not why:
        kept = {join(block, one): row.reason for row in plan.whole for block in row.blocks for one in row.names}
        why = f": {kept[name]}" if name in kept else ""
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"the tp_plan cuts dimension {wanted[name]} of {name}{more}, which can't be shown to be equal{why}. "
        'Leave it out, or let strategy="column-parallel" find the cuts.'
    )

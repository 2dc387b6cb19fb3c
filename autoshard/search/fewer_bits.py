"""What fewer bits per weight would give, where a model computes on the CPU or is offloaded since it has no room.

The same devices are searched again with weights of 8 and of 4 bits, and what fits first is priced: a hint, not a plan.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_seconds
from autoshard.engine.memory import RecipeEstimate
from autoshard.engine.precision import FEWER_BITS
from autoshard.engine.pricer import price
from autoshard.errors import AutoshardError, PlanError
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile
from autoshard.search.limits import Asked
from autoshard.search.processes import plan_processes
from autoshard.search.reasons import shown_mesh
from autoshard.search.traced import trace

STORES = ("cpu", "disk")


def with_hint(make: Callable[[], Plan], profile: Profile, cluster: Cluster) -> Plan:
    """Make a plan; a reason more, or the refusal, says where quantised weights would fit on its accelerators."""
    try:
        plan = make()
    except PlanError as error:
        room = sum(device.memory_bytes for device in cluster.devices if device.name.startswith("cuda"))
        fewer = _fewer(profile, profile.workload, cluster) if 0 < room < profile.parameter_bytes else None
        if fewer is None:
            raise
        dtype, speed, _ = fewer
        raise PlanError(f"{error} With {FEWER_BITS[dtype]} weights (--dtype {dtype}) it fits: {speed}.") from None
    elsewhere = {*plan.placements.values(), *plan.offloaded.values()}.intersection(STORES)
    if not elsewhere or not any(device.name.startswith("cuda") for device in cluster.devices):
        return plan
    seconds = price(plan, profile, cluster, lower_bound_seconds=0.0).latency_seconds
    fewer = _fewer(profile, plan.workload, cluster)
    if fewer is None or fewer[2].seconds >= seconds:
        return plan
    dtype, speed, best = fewer
    hint = (
        f"with {FEWER_BITS[dtype]} weights (--dtype {dtype}) nothing is left on {' or '.join(STORES)}: {speed}, "
        f"{seconds / best.seconds:.3g} times as fast; quantised weights compute something else, and have to be made or "
        "loaded"
    )
    return replace(plan, reasons=(*plan.reasons, hint))


def _fewer(profile: Profile, workload: Workload, cluster: Cluster) -> tuple[str, str, RecipeEstimate] | None:
    """The dtype of most bits with which an answer fits on the accelerators: its name, what it takes, and its recipe."""
    if workload.training or profile.source is None:
        return None
    with suppress(AutoshardError):  # what can't be followed is not searched
        traced = trace(*profile.source, workload)
        for dtype in FEWER_BITS:
            with suppress(AutoshardError):  # has no room either
                _, found, _ = plan_processes(traced, cluster, Asked(dtype=dtype))
                if (best := found.best) is not None:
                    where = shown_mesh(best.recipe) if best.recipe.devices > 1 else "one device"
                    rate = workload.new_tokens * traced.samples / best.seconds
                    speed = f"{format_seconds(best.seconds)}{f', {rate:.3g} tokens/s' if rate else ''}"
                    return dtype, f"{where} would take {speed}", best
    return None

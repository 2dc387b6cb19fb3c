"""What fewer bits per weight would give, where a model computes on the CPU or is offloaded since it has no room.

The same devices are searched again with weights of 8 and of 4 bits, and what fits first is priced: a hint, not a plan.
"""

from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_seconds
from autoshard.engine.precision import FEWER_BITS
from autoshard.engine.pricer import price
from autoshard.errors import AutoshardError
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.search.limits import Asked
from autoshard.search.processes import plan_processes
from autoshard.search.reasons import shown_mesh
from autoshard.search.traced import trace

STORES = ("cpu", "disk")


def with_hint(plan: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """Return the plan with a reason more where quantised weights would fit on its accelerators and be faster."""
    elsewhere = {*plan.placements.values(), *plan.offloaded.values()}.intersection(STORES)
    lacks_room = bool(elsewhere) and any(device.name.startswith("cuda") for device in cluster.devices)
    if not lacks_room or profile.workload.training or profile.source is None:
        return plan
    seconds = price(plan, profile, cluster, lower_bound_seconds=0.0).latency_seconds
    try:
        traced = trace(*profile.source, plan.workload)
    except AutoshardError:
        return plan  # what can't be followed is not searched
    for dtype, bits in FEWER_BITS.items():
        try:
            _, found, _ = plan_processes(traced, cluster, Asked(dtype=dtype))
        except AutoshardError:
            continue  # has no room either
        best = found.best
        if best is None or best.seconds >= seconds:
            return plan
        where = shown_mesh(best.recipe) if best.recipe.devices > 1 else "one device"
        rate = plan.workload.new_tokens * traced.samples / best.seconds
        speed = f"{format_seconds(best.seconds)}{f', {rate:.3g} tokens/s' if rate else ''}"
        hint = (
            f"with {bits} weights (--dtype {dtype}) nothing is left on {' or '.join(STORES)}: {where} would take "
            f"{speed}, {seconds / best.seconds:.3g} times as fast; quantised weights compute something "
            "else, and have to be made or loaded"
        )
        return replace(plan, reasons=(*plan.reasons, hint))
    return plan

"""Cuts over devices that together are too small: modules are streamed, evenly spaced, as few as will do.

cut as if there were room    ──▶    stream 1 of 32 layers, 2 of 32, …    ──▶    the first plan that fits
"""

from collections.abc import Callable
from dataclasses import replace

from autoshard.cluster.cluster import Cluster, plan_device
from autoshard.engine.pricer import Pricer
from autoshard.errors import PlanError
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.sizes import format_bytes
from autoshard.strategies.streamable import Streamable, divisions
from autoshard.stream_cost import STORES

_PLENTY_BYTES = 2**60


def cut_and_stream(
    profile: Profile, cluster: Cluster, cut: Callable[[Cluster], Plan], price: Pricer, refusal: PlanError
) -> Plan:
    """Plan cuts over the accelerators of a cluster and stream what they have no room for.

    `cut`: plans cuts over the devices of a cluster. `refusal`: why the model does not fit without streaming; it is
    raised where streaming does not help: for training, without stores, and where even all modules streamed don't fit.
    """
    stores = [store for store in STORES if store in cluster.names]
    ranks = tuple(device for device in cluster.devices if device.name not in STORES)
    if not stores or len(ranks) < 2 or profile.workload.training:
        raise refusal
    roomy = tuple(replace(device, memory_bytes=_PLENTY_BYTES) for device in ranks)
    drafted = cut(replace(cluster, devices=roomy))
    if not drafted.cuts:
        raise refusal
    names = [device.name for device in drafted.devices]
    drafted = replace(drafted, devices=tuple(plan_device(cluster.device(name)) for name in names))
    for store in stores:
        for division in divisions(profile.graph):
            found = _fewest(drafted, division, store, price)
            if found is not None:
                return found
    raise refusal


def _fewest(drafted: Plan, division: tuple[Streamable, ...], store: str, price: Pricer) -> Plan | None:
    """The plan that streams the fewest modules of a division and fits, by halving; None if none does."""

    def plan(count: int) -> Plan:
        chosen = [division[(2 * i + 1) * len(division) // (2 * count)] for i in range(count)]
        nbytes = sum(module.nbytes for module in chosen)
        reason = (
            f"The devices have no room for all of it: {count} of {len(division)} modules ({format_bytes(nbytes)}) are "
            f"kept {'on disk' if store == 'disk' else 'in the memory of the cpu'} between their calls, evenly spaced; "
            "each rank brings its part. It takes one process per device (torchrun)."
        )
        streamed = {module.path: store for module in chosen}
        return replace(drafted, streamed=streamed, reasons=(*drafted.reasons, reason))

    if not division or not price(plan(len(division))).fits:
        return None
    few, enough = 0, len(division)
    while enough - few > 1:
        middle = (few + enough) // 2
        few, enough = (few, middle) if price(plan(middle)).fits else (middle, enough)
    return plan(enough)

"""What a plan costs that cuts parameters over ranks and keeps those of some modules off the devices between calls.

A rank is priced as a device that runs all of its smaller model alone, with the streamed modules brought over its own
link; ranks of one host share its disk, so each has its part of that rate. Collectives are added: nothing overlaps them.
"""

from collections.abc import Sequence
from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.cost import check_devices
from autoshard.engine.cuts import Tracer, estimate_cuts, local_profile
from autoshard.estimate import DeviceEstimate, Estimate, Streaming
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.stream_cost import estimate_streamed


def estimate_cut_streams(plan: Plan, profile: Profile, cluster: Cluster, *, tracer: Tracer | None = None) -> Estimate:
    """Compute the consequences of a plan with cuts and streamed modules; the arguments are those of `estimate_cuts`.

    Raises `PlanError` if the plan names a device or a module that is not there.
    """
    check_devices(plan.streamed.values(), cluster, "needs")
    tracer = tracer or Tracer(profile.graph)
    base = estimate_cuts(replace(plan, streamed={}), profile, cluster, tracer=tracer)
    traced = tracer.trace(plan.cuts)
    known: dict[object, Estimate] = {}
    ranks: dict[str, Estimate] = {}
    for rank, row in enumerate(plan.devices):
        device = cluster.device(row.name)
        key = tuple(cut.shares[rank] for cut in plan.cuts), device.speed, device.kind, device.memory_bytes, device.host
        if key not in known:
            alone = replace(plan, cuts=(), whole=(), placements={"": row.name})
            local, one = local_profile(profile, traced, rank), one_rank(plan, cluster, row.name)
            known[key] = estimate_streamed(alone, replace(local, further=None), one, lower_bound_seconds=0.0)
        ranks[row.name] = known[key]
    latency = max(found.latency_seconds for found in ranks.values()) + base.collective_seconds
    devices = tuple(_device(row, ranks) for row in base.devices)
    return replace(
        base,
        devices=devices,
        latency_seconds=latency,
        bottleneck_seconds=latency,
        streaming=_together(list(ranks.items())),
    )


def one_rank(plan: Plan, cluster: Cluster, name: str) -> Cluster:
    """Return the cluster as one rank sees it: its device and the stores."""
    host = cluster.device(name).host
    sharing = sum(cluster.device(row.name).host == host for row in plan.devices)
    stores = dict.fromkeys(plan.streamed.values())
    if "cpu" in cluster.names:  # what is read from disk goes through its memory
        stores["cpu"] = None
    links = tuple(
        replace(link, bytes_per_second=link.bytes_per_second / (sharing if link.source == "disk" else 1))
        for link in (cluster.link(store, name) for store in stores if store != name)
    )
    return replace(cluster, devices=tuple(cluster.device(one) for one in dict.fromkeys((name, *stores))), links=links)


def _device(row: DeviceEstimate, ranks: dict[str, Estimate]) -> DeviceEstimate:
    """What a device has and does: as a rank, and as a store of all ranks."""
    own = ranks.get(row.name)
    mine = row
    if own is not None:
        figures = own.devices[0]
        mine = replace(figures, name=row.name, transfer_seconds=figures.transfer_seconds + row.transfer_seconds)
    stored = sum(
        device.stored_bytes
        for name, found in ranks.items()
        for device in found.devices[1:]
        if device.name == row.name and name != row.name
    )
    if not stored:
        return mine
    return replace(mine, stored_bytes=mine.stored_bytes + stored, peak_bytes=mine.peak_bytes + stored)


def _together(ranks: Sequence[tuple[str, Estimate]]) -> Streaming:
    """Streaming of the slowest rank, with the links of all."""
    parts = [(name, found.streaming) for name, found in ranks if found.streaming is not None]
    return Streaming(
        links=tuple(replace(link, destination=name) for name, part in parts for link in part.links),
        compute_seconds=max(part.compute_seconds for _, part in parts),
        bound_seconds=max(part.bound_seconds for _, part in parts),
        stall_seconds=max(part.stall_seconds for _, part in parts),
    )

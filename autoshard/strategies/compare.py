"""Compare a plan that places whole modules with one that cuts parameters, by the estimates of both."""

from dataclasses import replace

from autoshard.cluster.cluster import Cluster
from autoshard.cost import estimate
from autoshard.cut_cost import estimate_cuts
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.sizes import format_bytes, format_seconds
from autoshard.stream_cost import estimate_streamed


def better(one: Plan, other: Plan, profile: Profile, cluster: Cluster) -> bool:
    """Whether a plan has a lower value of its objective than another; one without cuts is not looked at further."""
    return bool(one.cuts) and _value(one, profile, cluster) < _value(other, profile, cluster)


def compared(cut: Plan, placed: Plan, profile: Profile, cluster: Cluster) -> Plan:
    """The better one of a plan with cuts and one without, with the other among its reasons."""
    taken, left = (cut, placed) if better(cut, placed, profile, cluster) else (placed, cut)
    if not left.cuts and left is cut:  # nothing pays, or nothing can be cut
        return placed
    what = "cutting parameters over all devices" if left is cut else "placing whole modules"
    figure = _value(left, profile, cluster)
    text = format_bytes(int(figure)) if cut.objective == "memory" else format_seconds(figure)
    where = {"latency": "per pass", "throughput": "between passes", "memory": "on the fullest device"}[cut.objective]
    return replace(taken, reasons=(*taken.reasons, f"{what} would take {text} {where}"))


def _value(plan: Plan, profile: Profile, cluster: Cluster) -> float:
    price = estimate_cuts if plan.cuts else estimate_streamed if plan.streamed else estimate
    figures = price(plan, profile, cluster)
    if plan.objective == "memory":
        return max(device.peak_bytes for device in figures.devices)
    return figures.latency_seconds if plan.objective == "latency" else figures.bottleneck_seconds

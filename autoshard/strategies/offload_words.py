"""Sentences about offloaded modules: why these, what bounds the pass, and what would help where nothing fits."""

from collections.abc import Collection, Sequence

from autoshard.cluster.cluster import Cluster
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.offloaded import STORES
from autoshard.profile.profile import Profile
from autoshard.strategies.offload import Lack, Offloaded


def may_stream(profile: Profile, cluster: Cluster) -> bool:
    """Whether parameters may be away from their device at all: there is a place for them, and no gradients."""
    return not profile.workload.training and any(name in STORES for name in cluster.names) and len(cluster.names) > 1


def why_not_offloaded(profile: Profile, cluster: Cluster) -> str:
    """Say, after a refusal, why "cpu" or "disk" did not take what has no room; "" if there is nothing to say."""
    if not profile.workload.training or "disk" not in cluster.names:
        return ""
    return (
        ' "disk" can\'t hold weights in training: the backward pass reads them again and the optimizer writes them. '
        "Leave it out, or plan for inference."
    )


def explain_offload(
    profile: Profile, cluster: Cluster, found: Offloaded, resident_seconds: float | None
) -> tuple[str, ...]:
    """Say why modules are offloaded, where the others are, what bounds the pass, and how far from the best it is."""
    estimate = found.estimate
    streaming = estimate.streaming
    using = sorted(set(found.placements.values()), key=cluster.names.index)
    if streaming is None:
        return (f"all of it has room on {' and '.join(using)}, and nothing is brought for a call",)
    room = sum(cluster.device(name).budget_bytes for name in using)
    weights = profile.parameter_bytes
    reasons = []
    if resident_seconds is None:
        some = " and ".join(using)
        reasons.append(
            f"the parameters take {format_bytes(weights)} and {some} {'have' if len(using) > 1 else 'has'} "
            f"{format_bytes(room)}, so {len(found.offloaded)} modules are kept elsewhere and brought for each call, "
            "the next ones while one computes"
        )
    else:
        reasons.append(
            f"bringing {len(found.offloaded)} modules for each call is faster than computing them on cpu: "
            f"{format_seconds(found.value)} instead of {format_seconds(resident_seconds)}"
        )
    own = next(
        (d.parameter_bytes for d in estimate.devices if d.name == "cpu" and d.parameter_bytes and len(using) > 1), 0
    )
    if own:
        reasons.append(f"cpu computes with {format_bytes(own)} itself: for these that is faster than to bring them")
    seconds = estimate.token_seconds or estimate.latency_seconds
    stalled = streaming.stall_seconds / seconds if seconds else 0.0
    if stalled > 5e-3:
        reasons.append(
            f"computing waits {stalled:.0%} of the time: the links are the limit"
            if seconds <= streaming.bound_seconds * 1.001
            else f"computing waits {stalled:.0%} of the time"
        )
    else:
        reasons.append("computing hides all that is brought")
    return tuple(reasons)


def not_on_disk(in_memory: Collection[str], cluster: Cluster) -> str:
    """Say which parameters a disk is no help for; "" without a disk, or if there are none."""
    if not in_memory or "disk" not in cluster.names:
        return ""
    names = sorted(in_memory)
    return (
        f" {len(names)} parameters can't be kept on disk, as no file has them the way the model does (packed, of "
        f"another dtype, or made of several): {', '.join(names[:2])}{' and more' if len(names) > 2 else ''}."
    )


def offload_refusal(lack: Lack | None, cluster: Cluster, computing: Sequence[str]) -> str:
    """Say what has too little room for what, by how many bytes, and what to change."""
    if lack is None:
        return (
            "the model does not fit, and none of its modules can be kept elsewhere between its calls: their parameters "
            "are also read from outside, or are tied to those of others. Give "
            f"{' or '.join(computing)} more memory."
        )
    need, has = format_bytes(lack.need_bytes), format_bytes(lack.has_bytes)
    disk = "" if "disk" in cluster.names else ", add a disk (disk=500GiB)"
    size = " (cpu=128GiB; without a size it is what is free on this machine)" if lack.where == "cpu" else ""
    return (
        f"the model does not fit even with weights kept elsewhere between calls: {lack.what} takes {need} of "
        f"{lack.where}, which has room for {has}, {format_bytes(lack.need_bytes - lack.has_bytes)} too little. Give "
        f"{lack.where} that much more{size}{disk}, or use a smaller batch or a shorter sequence."
    )

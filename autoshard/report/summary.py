"""The figures that count of a plan, as the terminal and the page have them: (what, figure, remark)."""

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, Estimate, level
from autoshard.plan import Plan
from autoshard.plan.workload import Workload
from autoshard.profile.profile import Profile
from autoshard.report.layout import format_count, format_flops, format_number

Row = tuple[str, str, str]


def time_rows(plan: Plan, estimate: Estimate, profile: Profile) -> list[Row]:
    """What a step, an answer or a pass takes, and what it is made of."""
    if estimate.prompt_seconds:
        found = _answer_rows(estimate, plan.workload.new_tokens)
    else:
        said = speed(profile, estimate.latency_seconds, estimate.tokens_per_second)
        if plan.workload.training and plan.launch:
            said += f", {format_number(estimate.tokens_per_second / len(plan.devices))} per device"
        found = [(what_is_timed(profile), format_seconds(estimate.latency_seconds), said)]
    if estimate.streaming is not None:
        at = len(found) - bool(estimate.token_seconds)  # below the row of a token
        found[at:at] = _offloaded_rows(estimate)
    bubble = estimate.bubble if estimate.pipelining is None else estimate.pipelining.bubble
    if bubble:
        found.append(("devices wait", f"{bubble:.0%}", "of the time, for other stages (the bubble)"))
    if estimate.exposed_seconds:
        found.append(("waits for communication", format_seconds(estimate.exposed_seconds), "of the step"))
    if estimate.all_reduces or estimate.all_gathers:
        counts = ((estimate.all_reduces, "all-reduce"), (estimate.all_gathers, "all-gather"))
        count = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)
        found.append(("collectives", format_seconds(estimate.collective_seconds), count))
    if _take_turns(plan, estimate):
        busiest = max(estimate.devices, key=lambda d: d.compute_seconds + d.transfer_seconds)
        overlapping = "" if profile.workload.training else speed(profile, estimate.bottleneck_seconds)
        said = f"{busiest.name}; {overlapping} if passes overlap" if overlapping else busiest.name
        found.append(("busiest device", format_seconds(estimate.bottleneck_seconds), said))
    return [*found, *_bound_rows(plan, estimate)]


def _take_turns(plan: Plan, estimate: Estimate) -> bool:
    """Whether devices work one after the other on the same pass."""
    placed = plan.mesh is None and not plan.cuts and estimate.streaming is None and not estimate.prompt_seconds
    return placed and len(used_devices(plan, estimate)) > 1


def _bound_rows(plan: Plan, estimate: Estimate) -> list[Row]:
    """What no plan of this kind is faster than."""
    if not estimate.lower_bound_seconds or estimate.objective == "memory":
        return []
    beside = f"is {estimate.gap:.1%} above" if estimate.gap < 1 else f"takes {1 + estimate.gap:.3g} times as long"
    more = "" if estimate.gap < 5e-4 else f"; this one {beside}"
    divided = plan.mesh is not None or estimate.objective == "throughput"
    said = "if no device ever waited" if divided else "no placement is faster"
    return [("lower bound", format_seconds(estimate.lower_bound_seconds), said + more)]


def _answer_rows(estimate: Estimate, new_tokens: int) -> list[Row]:
    """An answer: its prompt, a token, and all of it."""
    found = [("prompt", format_seconds(estimate.prompt_seconds), "until the first token")]
    if estimate.token_seconds:
        found.append(("each further token", format_seconds(estimate.token_seconds), "of every sequence"))
    what = f"{new_tokens} new tokens" if new_tokens > 1 else "1 new token"
    remark = f"{format_number(estimate.tokens_per_second)} tokens/s of the whole machine"
    return [*found, (what, format_seconds(estimate.latency_seconds), remark)]


def _offloaded_rows(estimate: Estimate) -> list[Row]:
    """What a pass or a token with offloaded modules is made of."""
    streaming = estimate.streaming
    assert streaming is not None
    seconds, each = estimate.token_seconds or estimate.latency_seconds, "token" if estimate.token_seconds else "pass"
    found = [("computing", format_seconds(streaming.compute_seconds), f"of the {each}")]
    for link in streaming.links:
        what = f"{format_bytes(link.nbytes)} in {link.fetches} fetches per {each}"
        found.append((f"{link.source} to {link.destination}", format_seconds(link.seconds), what))
    share = streaming.stall_seconds / seconds if seconds else 0.0
    return [*found, ("waiting", format_seconds(streaming.stall_seconds), f"{share:.0%} of the {each}, for parameters")]


def what_is_timed(profile: Profile) -> str:
    """Say what a pass of the workload is."""
    if any(name == "decode" for name, _, _ in profile.graph.phases):
        return "prompt and one new token"
    return "one training step" if profile.workload.training else "one pass"


def unit_of(workload: Workload) -> str:
    """What is counted per second."""
    passes = "steps" if workload.training else "passes"
    return "tokens" if workload.sequence_length else "samples" if workload.batch_size else passes


def speed(profile: Profile, seconds: float, known: float = 0.0) -> str:
    """Tokens, or samples, or passes per second; nothing where a prompt and a new token are timed together."""
    workload = profile.workload
    if seconds <= 0 or any(name == "decode" for name, _, _ in profile.graph.phases):
        return ""
    one = (workload.batch_size or 1) * (workload.sequence_length or 1)
    return f"{format_number(known or one / seconds)} {unit_of(workload)}/s"


def fullest_row(estimate: Estimate) -> Row:
    """How full the fullest device is."""
    fullest = estimate.fullest
    share = fullest.peak_bytes / max(fullest.memory_bytes, 1)
    said = f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.memory_bytes)}, {fullest.name}"
    return "fullest device", f"{share:.0%}", said


def moved_row(estimate: Estimate) -> list[Row]:
    """What goes between devices, where something does."""
    if not estimate.moved_bytes:
        return []
    brought = f"{format_bytes(estimate.brought_bytes)} of parameters" if estimate.brought_bytes else ""
    count = sum(transfer.nbytes > 0 for transfer in estimate.transfers)
    tensors = f"{count} tensor{'s' if count > 1 else ''}" if count else ""
    what = "moved for prompt and token" if estimate.token_seconds else "moved per pass"
    return [(what, format_bytes(estimate.moved_bytes), ", ".join(filter(None, (brought, tensors))))]


def used_devices(plan: Plan, estimate: Estimate) -> list[DeviceEstimate]:
    """The devices that a plan puts something on; one that only passes inputs on is not among them."""
    if plan.cuts or plan.mesh is not None:
        names = {device.name for device in plan.devices}
    else:
        names = {*plan.placements.values(), *plan.offloaded.values()}
    return [device for device in estimate.devices if device.name in names]


def verdict(plan: Plan, estimate: Estimate) -> tuple[str, str]:
    """("good", "amber" or "bad", whether it fits and on how many devices)."""
    used, worst = used_devices(plan, estimate), estimate.fullest
    on = f"{len(used)} of {len(estimate.devices)} devices" if len(estimate.devices) > 1 else worst.name
    kind = level(worst.peak_bytes, worst.memory_bytes)
    if kind == "bad":
        return kind, f"Does not fit on {on}: {worst.name} lacks {format_bytes(-worst.free_bytes)}"
    if kind == "amber":
        return kind, f"Fits on {on}, but {worst.name} is {worst.peak_bytes / worst.memory_bytes:.1%} full"
    return "good", f"Fits on {on}"


def count_parameters(profile: Profile) -> int:
    """How many parameters a model has, tied ones once."""
    by_storage = {t.storage: t for t in reversed(profile.graph.tensors) if t.kind == "parameter"}
    return sum(t.nbytes // t.dtype.itemsize for t in by_storage.values())


def about_model(profile: Profile) -> str:
    """What the model is, in a sentence."""
    weights = format_bytes(profile.parameter_bytes + profile.buffer_bytes)
    work = f"; {what_is_timed(profile)} takes {format_flops(profile.flops)}" if profile.flops else ""
    parameters = format_count(count_parameters(profile))
    return f"{profile.modules[0].class_name} has {parameters} parameters, {weights}{work}, mostly in {profile.dtype}."

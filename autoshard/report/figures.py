"""The figures that count of a plan, as the terminal and the pages have them: (what, figure, remark)."""

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import Estimate
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.report.layout import format_count

Row = tuple[str, str, str]


def time_rows(plan: Plan, estimate: Estimate, profile: Profile) -> list[Row]:
    """What a step, an answer or a pass takes, the first row above all, and what it is made of."""
    if plan.workload.new_tokens and estimate.prompt_seconds:
        found = answer_rows(estimate, plan.workload.new_tokens)
    elif plan.launch:
        found = [(what_is_timed(profile) if plan.workload.training else "one pass",
                  format_seconds(estimate.latency_seconds), _speed(plan, estimate))]  # fmt: skip
    else:
        found = [(what_is_timed(profile), format_seconds(estimate.latency_seconds),
                  rate(profile, estimate.latency_seconds))]  # fmt: skip
    if plan.launch:
        if plan.workload.training and len(plan.devices) > 1:
            found.append(("waits for communication", format_seconds(estimate.exposed_seconds), "of the step"))
        return found + ([("stages are idle", f"{estimate.bubble:.0%}", "of the time")] if estimate.bubble else [])
    plain = len(found)
    if estimate.pipelining is not None:
        found.append(("devices wait", f"{estimate.pipelining.bubble:.0%}", "of the pass, on average"))
    elif estimate.streaming is not None:
        at = len(found) - bool(estimate.token_seconds)  # below the row of a token
        found[at:at] = _streamed(estimate)
    if estimate.all_reduces or estimate.all_gathers:
        counts = ((estimate.all_reduces, "all-reduce"), (estimate.all_gathers, "all-gather"))
        count = ", ".join(f"{count} {name}{'s' if count > 1 else ''}" for count, name in counts if count)
        found.append(("collectives", format_seconds(estimate.collective_seconds), count))
    elif len(found) == plain and sum(device.peak_bytes > 0 for device in estimate.devices) > 1:
        busiest = max(estimate.devices, key=lambda d: d.compute_seconds + d.transfer_seconds)
        overlapping = "" if profile.workload.training else rate(profile, estimate.bottleneck_seconds)
        said = f"{busiest.name}; {overlapping} if passes overlap" if overlapping else busiest.name
        found.append(("busiest device", format_seconds(estimate.bottleneck_seconds), said))
    if estimate.lower_bound_seconds > 0 and estimate.objective != "memory":
        gap = "no plan is faster" if estimate.gap < 5e-4 else f"this plan is {100 * estimate.gap:.1f} % above it"
        found.append(("lower bound", format_seconds(estimate.lower_bound_seconds), gap))
    return found


def fullest_row(estimate: Estimate) -> Row:
    """How full the fullest device is."""
    fullest = estimate.fullest
    share = fullest.peak_bytes / max(fullest.memory_bytes, 1)
    said = f"{format_bytes(fullest.peak_bytes)} of {format_bytes(fullest.memory_bytes)}, {fullest.name}"
    return "fullest device", f"{share:.0%}", said


def answer_rows(estimate: Estimate, new_tokens: int) -> list[Row]:
    """An answer: its prompt, a token, and all of it."""
    found = [("prompt", format_seconds(estimate.prompt_seconds), "until the first token")]
    if estimate.token_seconds:
        found.append(("each further token", format_seconds(estimate.token_seconds), "of every sequence"))
    what = f"{new_tokens} new tokens" if new_tokens > 1 else "1 new token"
    pace = f"{speed(estimate.tokens_per_second)} tokens/s of the whole machine"
    return [*found, (what, format_seconds(estimate.latency_seconds), pace)]


def speed(per_second: float) -> str:
    """Tokens or samples per second as people read them."""
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def what_is_timed(profile: Profile) -> str:
    """Say what a pass of the workload is."""
    if any(name == "decode" for name, _, _ in profile.graph.phases):
        return "prompt and one new token"
    return "one training step" if profile.workload.training else "one pass"


def rate(profile: Profile, seconds: float) -> str:
    """Tokens, or samples, or passes per second; nothing where a prompt and a new token are timed together."""
    workload = profile.workload
    if seconds <= 0 or any(name == "decode" for name, _, _ in profile.graph.phases):
        return ""
    batch, length = workload.batch_size, workload.sequence_length
    if batch and length:
        return f"{format_count(batch * length / seconds)} tokens/s"
    if batch:
        return f"{format_count(batch / seconds)} samples/s"
    return f"{format_count(1 / seconds)} {'steps' if workload.training else 'passes'}/s"


def _speed(plan: Plan, estimate: Estimate) -> str:
    unit = "tokens" if plan.workload.sequence_length else "samples"
    speed = f"{estimate.tokens_per_second:,.0f} {unit}/s"
    each = f", {estimate.tokens_per_second / len(plan.devices):,.0f} per device" if plan.workload.training else ""
    return speed + each


def _streamed(estimate: Estimate) -> list[Row]:
    """What a pass or a token with streamed modules is made of."""
    streaming = estimate.streaming
    assert streaming is not None
    seconds, each = estimate.token_seconds or estimate.latency_seconds, "token" if estimate.token_seconds else "pass"
    found = [("computing", format_seconds(streaming.compute_seconds), "")]
    for link in streaming.links:
        what = f"{format_bytes(link.nbytes)} in {link.fetches} fetches"
        found.append((f"{link.source} to {link.destination}", format_seconds(link.seconds), what))
    share = streaming.stall_seconds / seconds if seconds else 0.0
    found.append(("waiting", format_seconds(streaming.stall_seconds), f"{share:.0%} of the {each}"))
    over = seconds / streaming.bound_seconds - 1 if streaming.bound_seconds else 0.0
    reached = "reached" if over < 5e-4 else f"the {each} is {100 * over:.1f} % above it"
    return [*found, ("slowest of these", format_seconds(streaming.bound_seconds), reached)]

"""What an answer costs under a plan of one process: its prompt, and n - 1 further tokens, each priced as a pass.

    seconds = seconds of the prompt + (n - 1) * seconds of a token

Memory is that of the recorded run, whose last step finds the cache of the whole answer.
"""

from collections.abc import Callable
from dataclasses import replace

from autoshard.capture.graph import ModelGraph
from autoshard.engine.estimate import Estimate, gap_above
from autoshard.profile.answer import prompt_and_token
from autoshard.profile.profile import Profile


def of_answer(
    recorded: Estimate, profile: Profile, price: Callable[[Profile], Estimate], *, in_turns: bool = False
) -> Estimate:
    """Return the estimate of the whole answer from that of the run as it was recorded; the same where there is none.

    `price`: prices the same plan for one of the halves. `in_turns`: each device does nothing but compute and copy, so
    that answers can overlap but for the busiest one.
    """
    halves = prompt_and_token(profile)
    if halves is None:
        return recorded
    times = profile.further or 0
    prompt = price(halves[0])
    token = price(halves[1]) if times else prompt

    def whole(of: Callable[[Estimate], float]) -> float:
        return of(prompt) + times * of(token)

    devices = tuple(
        replace(
            row,
            compute_seconds=first.compute_seconds + times * further.compute_seconds,
            transfer_seconds=first.transfer_seconds + times * further.transfer_seconds,
        )
        for row, first, further in zip(recorded.devices, prompt.devices, token.devices, strict=True)
    )
    latency = whole(lambda one: one.latency_seconds)
    busiest = max(device.compute_seconds + device.transfer_seconds for device in devices)
    bottleneck = busiest if in_turns else whole(lambda one: one.bottleneck_seconds)
    bound = whole(lambda one: one.lower_bound_seconds)
    value = bottleneck if recorded.objective == "throughput" else latency
    return replace(
        recorded,
        devices=devices,
        latency_seconds=latency,
        bottleneck_seconds=bottleneck,
        lower_bound_seconds=bound,
        gap=gap_above(value, bound),
        collective_seconds=whole(lambda one: one.collective_seconds),
        streaming=token.streaming,
        prompt_seconds=prompt.latency_seconds,
        token_seconds=token.latency_seconds if times else 0.0,
        tokens_per_second=_sequences(profile) * profile.workload.new_tokens / latency if latency else 0.0,
    )


def _sequences(profile: Profile) -> int:
    """How many sequences are answered at a time."""
    graph: ModelGraph = profile.graph
    given = (graph.values[value].shape for value in graph.inputs)
    return profile.workload.batch_size or next((shape[0] for shape in given if shape), 1)

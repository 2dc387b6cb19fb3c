"""An answer of n tokens as what was recorded of it: the prompt once, and a further token n - 1 times.

    recorded     forward ids (batch, prompt)      context (counts nothing)      decode: the last token
    the answer   once, gives the first token                                    n - 1 times, for the others

Each half is a profile of the same run in which the rest counts nothing, so that whatever prices a pass prices it.
"""

from dataclasses import replace

import numpy as np

from autoshard.capture.columns import take_columns
from autoshard.capture.graph import ModelGraph
from autoshard.capture.latest import Latest
from autoshard.profile.profile import Profile

_LATEST = Latest[tuple[Profile, Profile]]()


def further_tokens(graph: ModelGraph, new_tokens: int) -> int | None:
    """Return how often the recorded step is made in the whole answer; None if none was recorded."""
    return max(new_tokens - 1, 0) if _decode(graph) is not None else None


def prompt_and_token(profile: Profile) -> tuple[Profile, Profile] | None:
    """Return the prompt alone and a further token alone; None where no answer is priced."""
    if profile.further is None:
        return None
    return _LATEST.of(profile.graph, (profile.workload, profile.op_bytes), lambda: _halves(profile))


def op_counts(profile: Profile) -> np.ndarray:
    """Return how often each op is done in the whole answer, [ops]; once where none is priced."""
    counts = np.ones(len(profile.graph.ops))
    decode = _decode(profile.graph)
    if profile.further is not None and decode is not None:
        counts[decode.start : decode.stop] = profile.further
    return counts


def times_computed(profile: Profile) -> int:
    """Return how many passes an answer takes."""
    return 1 if profile.further is None else 1 + profile.further


def _decode(graph: ModelGraph) -> range | None:
    return next((range(begin, end) for name, begin, end in graph.phases if name == "decode"), None)


def _halves(profile: Profile) -> tuple[Profile, Profile]:
    graph, decode = profile.graph, _decode(profile.graph)
    assert decode is not None
    begin = graph.uncounted.start if graph.uncounted else decode.start
    prompt = (("forward", 0, begin), ("context", begin, len(graph.ops)))
    token = (("context", 0, decode.start), ("decode", decode.start, decode.stop))
    return _only(profile, prompt), _only(profile, token)


def _only(profile: Profile, phases: tuple[tuple[str, int, int], ...]) -> Profile:
    graph = replace(profile.graph, phases=phases)
    take_columns(graph, profile.graph)
    idle = graph.uncounted
    moved = tuple(0 if i in idle else nbytes for i, nbytes in enumerate(profile.op_bytes))
    return replace(profile, graph=graph, op_bytes=moved, further=None)

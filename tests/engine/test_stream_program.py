"""Passes with fetches against cases worked out by hand and against a second way of computing the same schedule."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.engine.offloaded import Fetch, Piece, Steady, steady_pass

Call = tuple[int, str, float, float]
"""A module, its device, and the seconds before and in the call."""


def passes(calls: Sequence[Call], after: float, fetch: Sequence[float], on_disk: Sequence[bool]) -> Steady:
    """Passes through calls of modules, of which those that take time to fetch are brought."""
    pieces, fetches = [], []
    for module, device, before, seconds in calls:
        number = len(fetches) if fetch[module] else -1
        fetches += [Fetch(device=device, seconds=fetch[module], on_disk=on_disk[module])] if fetch[module] else []
        pieces += [Piece(seconds=before), Piece(seconds=seconds, waits=number, frees=number)]
    return steady_pass([*pieces, Piece(seconds=after)], fetches)


def test_devices_have_links_of_their_own_and_share_the_disk():
    turns = [(i, f"cuda:{i % 2}", 0.0, 1.0) for i in range(8)]
    own, shared = (passes(turns, 0.0, [4.0] * 8, [disk] * 8).seconds for disk in (False, True))
    assert own == pytest.approx(16) and shared == pytest.approx(32)


def one_device(pass_calls, after, fetch, passes=400):
    """Unrolled: fetch j starts when fetch j-1 is done and call j-2 has ended; call j when fetch j is done."""
    ended, brought, ends, now = [], 0.0, [], 0.0
    for _ in range(passes):
        for module, _, before, seconds in pass_calls:
            now += before
            if fetch[module]:
                free = ended[-2] if len(ended) > 1 else 0.0
                brought = max(brought, free) + fetch[module] if len(ended) > 1 else 0.0
                now = max(now, brought) + seconds
                ended.append(now)
            else:
                now += seconds
        now += after
        ends.append(now)
    return (ends[-1] - ends[passes // 2 - 1]) / (passes // 2)


times = st.integers(0, 8).map(float)


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4), times, times), min_size=1, max_size=9),
    times,
    st.lists(times, min_size=5, max_size=5),
)
def test_equals_the_unrolled_schedule(rows, after, fetch):
    order = [(m, "cuda:0", b, s) for m, b, s in rows]
    found = passes(order, after, fetch, [False] * 5)
    assert found.seconds == pytest.approx(one_device(order, after, fetch), rel=5e-2, abs=0.1)
    assert found.seconds >= max(found.busy.values()) * (1 - 5e-2)

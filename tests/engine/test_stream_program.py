"""Passes with fetches against cases worked out by hand and against a second way of computing the same schedule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.engine.streamed import StreamCall, steady_pass


def steady(*given) -> float:
    """Seconds of a pass in the long run."""
    return steady_pass(*given).seconds


def calls(*seconds: float, device: int = 0) -> list[StreamCall]:
    return [StreamCall(module=i, device=device, before_seconds=0.0, seconds=s) for i, s in enumerate(seconds)]


@pytest.mark.parametrize(
    ("compute", "fetch", "expected"),
    [
        ((4, 4, 4, 4), (0, 0, 0, 0), 16),  # nothing is streamed
        ((4, 4, 4, 4), (2, 2, 2, 2), 16),  # computing hides all
        ((4, 4, 4, 4), (6, 6, 6, 6), 24),  # the link is always busy
        ((4, 4, 4, 4), (6, 0, 6, 0), 16),  # two calls hide each fetch
        ((4, 4, 4, 4), (7, 7, 7, 0), 21),
        # the last call hides two fetches, across the end of the pass; the third can't begin before the first call ends
        ((1, 1, 1, 9), (3, 3, 3, 0), 14),
        ((1, 1, 1, 9), (4, 4, 4, 0), 15),
    ],
)
def test_by_hand(compute, fetch, expected):
    assert steady(calls(*compute), 0.0, fetch, [False] * len(fetch)) == pytest.approx(expected)


def test_devices_have_links_of_their_own_and_share_the_disk():
    turns = [StreamCall(module=i, device=i % 2, before_seconds=0.0, seconds=1.0) for i in range(8)]
    own = steady(turns, 0.0, [4.0] * 8, [False] * 8)
    shared = steady(turns, 0.0, [4.0] * 8, [True] * 8)
    assert own == pytest.approx(16) and shared == pytest.approx(32)


def one_device(pass_calls, after, fetch, passes=400):
    """Unrolled: fetch j starts when fetch j-1 is done and call j-2 has ended; call j when fetch j is done."""
    ended, brought, ends, now = [], 0.0, [], 0.0
    for _ in range(passes):
        for call in pass_calls:
            now += call.before_seconds
            if fetch[call.module]:
                free = ended[-2] if len(ended) > 1 else 0.0
                brought = max(brought, free) + fetch[call.module] if len(ended) > 1 else 0.0
                now = max(now, brought) + call.seconds
                ended.append(now)
            else:
                now += call.seconds
        now += after
        ends.append(now)
    return (ends[-1] - ends[passes // 2 - 1]) / (passes // 2)


times = st.integers(0, 8).map(float)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), times, times), min_size=1, max_size=9),
    times,
    st.lists(times, min_size=5, max_size=5),
)
def test_equals_the_unrolled_schedule(rows, after, fetch):
    order = [StreamCall(module=m, device=0, before_seconds=b, seconds=s) for m, b, s in rows]
    found = steady_pass(order, after, fetch, [False] * 5)
    assert found.seconds == pytest.approx(one_device(order, after, fetch), rel=5e-2, abs=0.1)
    assert found.seconds >= found.least_seconds * (1 - 5e-2)

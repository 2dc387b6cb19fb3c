"""Shares: how many slices of an axis every rank keeps, so that the last one is done as early as can be."""

import heapq
from collections.abc import Callable, Sequence

from autoshard.sharding import even_shares

_AS_GOOD = 1.02
"""Even shares are taken where they cost at most so much more: almost equal devices count as equal."""


def divide(size: int, seconds: Sequence[float], most: Sequence[int] | None = None) -> tuple[int, ...] | None:
    """Give each rank at least one of `size` slices, at most `most`, such that max(share x seconds) is least.

    `seconds`: of one slice, per rank. Water filling: every rank gets what it can do until a common time, which is as
    early as the slices allow; what is left goes to whoever is done first. Exact for equal slices. None if it can't be.
    """
    limits = [size] * len(seconds) if most is None else [min(limit, size) for limit in most]
    if size < len(seconds) or min(limits) < 1 or sum(limits) < size:
        return None
    even = even_shares(size, len(seconds))
    fits = all(share <= limit for share, limit in zip(even, limits, strict=True))
    if fits and len(set(seconds)) == 1:
        return even
    if not any(seconds):
        seconds = [1.0] * len(seconds)
    best = _fill(size, seconds, limits)
    return even if fits and _last(even, seconds) <= _last(best, seconds) * _AS_GOOD else best


def divide_by(
    size: int, count: int, cost: Callable[[int, int], float], most: Sequence[int], *, as_good: float = 1.0
) -> tuple[int, ...] | None:
    """Give each of `count` ranks at least one of `size` rows, at most `most`, such that the largest cost is least.

    `cost(rank, rows)` grows with rows; whoever is then the cheapest gets the next one. Even shares are taken where they
    cost at most `as_good` times as much. None if it can't be.
    """
    if size < count or min(most) < 1 or sum(most) < size:
        return None
    shares = [1] * count
    due = [(cost(rank, 2), rank) for rank in range(count) if most[rank] > 1]
    heapq.heapify(due)
    for _ in range(size - count):
        _, rank = heapq.heappop(due)
        shares[rank] += 1
        if shares[rank] < most[rank]:
            heapq.heappush(due, (cost(rank, shares[rank] + 1), rank))
    even = even_shares(size, count)
    if all(share <= limit for share, limit in zip(even, most, strict=True)):
        worst, of_even = (max(cost(rank, rows) for rank, rows in enumerate(one)) for one in (shares, even))
        if of_even <= worst * as_good:
            return even
    return tuple(shares)


def _last(shares: Sequence[int], seconds: Sequence[float]) -> float:
    return max(share * each for share, each in zip(shares, seconds, strict=True))


def _fill(size: int, seconds: Sequence[float], limits: Sequence[int]) -> tuple[int, ...]:
    def done_by(time: float) -> list[int]:
        each = zip(seconds, limits, strict=True)
        return [max(1, min(limit, int(time / own) if own else limit)) for own, limit in each]

    low, high = 0.0, size * max(seconds)
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(done_by(middle)) <= size else (low, middle)
    shares = done_by(low)
    due = [((shares[rank] + 1) * own, rank) for rank, own in enumerate(seconds) if shares[rank] < limits[rank]]
    heapq.heapify(due)
    for _ in range(size - sum(shares)):
        _, rank = heapq.heappop(due)
        shares[rank] += 1
        if shares[rank] < limits[rank]:
            heapq.heappush(due, ((shares[rank] + 1) * seconds[rank], rank))
    return tuple(shares)

"""Shares: how many slices of an axis every rank keeps, so that the last one is done as early as can be."""

import heapq
from collections.abc import Sequence

from autoshard.plan.sharding import even_shares

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

"""Least: the least possible largest figure, and the least sum, found with limits that start low and rise.

A limit that is too low is noticed soon, and a search within a low limit looks at little. So the first searches are held
to what a lower bound says and a little more; if they find nothing, one order of the devices says what can be had, and
the last search is held to that. Every answer is exact: nothing better lies outside a limit that the answer is within.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.grid import Grid
from autoshard.strategies.windows import Costs, Limits, TooWideError, best_end, needs, reaches, search_windows

WITHIN = 1 + 1e-9
"""Room for rounding in a limit."""
LIMITS = (1.0, 1.3, 2.0, np.inf)
"""Limits that are tried, over the lower bound. None but the first is much above what one order reaches."""
SHARES = (0.004, 0.3, 1.0, np.inf)
"""The same for sums, over the lower bound, as shares of it."""
MAX_AHEAD = 4_000_000
"""Most sums that a bound on what is still to come may take."""


def least_worst(grid: Grid, lines: Sequence[Grid], costs: Costs, plain: Array, guess: float) -> float | None:
    """Return the least possible largest figure of a device; None if there is no way.

    `lines`: single orders, to learn what can be had. `plain` [K, m+1, m+1]: what a stage costs at least. The answer
    may be about `guess`.
    """
    low = _lowest_open(grid, plain, guess)
    if low is None:
        return None

    def search(of: Grid, limit: float) -> float:
        total = search_windows(of, costs, reaches(plain, limit), Limits(limit=limit), worst=True)
        return best_end(of, costs, total, worst=True)[0]

    upper = np.inf
    for more in LIMITS[1:] if costs.far is not None else LIMITS:  # the lower bound is far off between hosts
        if more > LIMITS[0] and upper == np.inf:
            upper = min((search(line, low * more) for line in lines), default=np.inf)
        limit = min(max(low, 1e-30) * more, upper) * WITHIN
        value = search(grid, limit)
        if value <= limit and value < np.inf:
            return value
        upper = min(upper, value)  # only a device without a stage is above the limit
    return None


def _lowest_open(grid: Grid, plain: Array, guess: float) -> float | None:
    """Return about the least limit at which windows leave a way (a lower bound, to 0.5 %); None if there is none."""

    def is_open(limit: float) -> bool:
        return bool(needs(grid, reaches(plain, limit))[0] == 0)

    if not is_open(np.inf):
        return None
    top = float(np.max(plain, where=np.isfinite(plain), initial=0.0))
    high = min(max(guess, top * 1e-9), top)
    low, step = 0.0, 0.05
    if is_open(high):
        while high > top * 1e-9:
            low = high * (1 - step)
            if not is_open(low):
                break
            high, step = low, min(step * 2, 0.9)
    else:
        while high < top:
            low, high, step = high, min(high * (1 + step), top), min(step * 2, 1.0)
            if is_open(high):
                break
    while high - low > 0.005 * high and high > top * 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if is_open(middle) else (middle, high)
    return high


def least_sum(
    grid: Grid, lines: Sequence[Grid], costs: Costs, plain: Array, prices: tuple[Array, Array], each: float,
    stages: float = np.inf,
) -> tuple[float, Array, int] | None:  # fmt: skip
    """Return the least sum of seconds, the sums of all nodes and the last node; None if there is no way.

    `prices`: [m+1] what units 0..j-1 cost at least, [K] what a device may get back of it (see `memory_prices`). A way's
    sum less all that is its reduced sum, of which only small ones are looked at. Raises `TooWideError` with a lower
    bound where that takes more than so many `stages`.
    """
    least, credit = prices
    base = float(least[-1] - np.array([len(of) for of in grid.members]) @ credit)
    reduced = plain - (least[None, :] - least[:, None]) + credit[:, None, None]
    ahead = _ahead(reduced, grid.num_levels)
    start = float(ahead[0, 0])
    if start == np.inf:
        return None
    rounding = 1e-9 * max(float(least[-1]), abs(base))

    def search(of: Grid, limit: float) -> tuple[float, Array, int]:
        limits = Limits(
            limit=limit, each=each, ahead=ahead[: of.num_levels] - least, credit=of.counts @ credit, stages=stages
        )  # fmt: skip
        total = search_windows(of, costs, reaches(reduced, limit), limits, worst=False)
        value, end = best_end(of, costs, total, worst=False)
        return value, total, end

    upper, whole, proved = np.inf, max(base + start, rounding, 1e-30), base + start
    for more in SHARES:
        if (more > SHARES[0] or costs.far is not None) and upper == np.inf:
            upper = min((search(line, start + max(more, 0.3) * whole)[0] for line in lines), default=np.inf) - base
        limit = (
            upper if max(each, upper) < np.inf else min(start + more * whole, upper)
        )  # `each` leaves little to look at
        limit += max(rounding, 1e-9 * abs(limit)) if limit < np.inf else 0.0  # copies may cost far more than units
        try:
            value, total, end = search(grid, limit)
            if end >= 0 and value - base + rounding > limit:  # a better one may lie outside this limit
                value, total, end = search(grid, value - base + 2 * rounding)
        except TooWideError:
            raise TooWideError(proved) from None
        if end >= 0:
            return value, total, end
        proved = max(proved, min(base + limit - rounding, upper + base))
    return None


def _ahead(reduced: Array, levels: int) -> Array:
    """[levels, m+1] what placing units i.. costs at least in reduced sums, with devices left for as many stages."""
    size = reduced.shape[1] - 1
    ahead = np.zeros((levels, size + 1))
    if levels * (size + 1) ** 2 <= MAX_AHEAD:
        ahead[-1, :size] = np.inf
        step = reduced.min(axis=0)
        for level in range(levels - 2, -1, -1):
            ahead[level] = np.minimum(ahead[level + 1], (step + ahead[level + 1]).min(axis=1))
    return ahead


def memory_prices(seconds: Array, resident: Array, most: Array, devices: Array) -> tuple[Array, Array]:
    """Price memory: return [m+1] sums of the least priced seconds, and [K] what a full device pays in all.

    With every byte on a device of kind k priced p[k] >= 0 a stage costs at least the least priced seconds of its units
    less p[k] times what it can hold (a Lagrangian bound). The prices are those of the fractional plan that fills the
    fastest devices first. `seconds` [K, m] and `resident` [m] of units, `most` [K] bytes a device holds at most,
    `devices` [K] how many there are.
    """
    held = max(float(resident.sum()), 1e-9)
    rate = seconds.sum(axis=1) / held
    order = np.argsort(rate, kind="stable")
    room = np.cumsum((most * devices)[order])
    last = min(int(np.searchsorted(room, held * (1 - 1e-12))), len(order) - 1)
    price = np.maximum(rate[order[last]] - rate, 0.0)
    least = (seconds + price[:, None] * resident).min(axis=0)
    return np.concatenate([[0.0], np.cumsum(least)]), price * most

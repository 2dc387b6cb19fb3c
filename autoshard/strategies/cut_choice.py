"""Choose which axis groups to cut: the exact optimum among compatible ones, within the memory of every rank.

With y[g] = 1 if group g is cut, and everything that is not cut done by every rank:

    seconds    max over ranks d of (whole model - sum y[g] (what d saves of g))  +  sum y[g] collectives of g
    memory     of rank d: whole model - sum y[g] (what d does not keep of g)  <=  its budget
    conflicts  y[g] + y[h] <= 1

where blocks that are alike are one variable: few sets of them are all looked at, else it is a small mixed integer
program.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

_MARGIN = 1e-6
"""Part of the model by which memory limits are taken tighter than they are: the solver's tolerance."""
_MOST_SETS = 4096
"""Sets of compatible options up to which all are looked at."""


Picked = tuple[int, tuple[int, ...]]
"""A group, and the shares of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A group with shares for some devices. Figures are of all its blocks together.

    Attributes:
        index: of the group.
        saved_seconds, saved_bytes: per rank, what it need not compute, and hold.
        collective_seconds: all-reduces and gathers.
        places: how many actions the runtime has to carry out; between equals the fewest are taken.
        conflicts: indices of groups that can't be cut as well.
    """

    index: int
    shares: tuple[int, ...]
    saved_seconds: tuple[float, ...]
    saved_bytes: tuple[int, ...]
    collective_seconds: float
    places: int
    conflicts: frozenset[int]


def choose(
    options: Sequence[Option],
    whole_seconds: Sequence[float],
    whole_bytes: int,
    budget_bytes: Sequence[int],
    objective: str,
    too_few: Collection[Collection[Picked]] = (),
) -> tuple[Option, ...] | None:
    """Return the options with the fewest seconds, or with "memory" the emptiest fullest rank; None if none fits.

    `whole_seconds`, `budget_bytes`: per rank, of the model on one device and of the device. `too_few`: sets of options
    of which it is known that with no others the model does not fit.
    """
    count, ranks = len(options), len(whole_seconds)
    if not count:
        return () if all(whole_bytes <= budget for budget in budget_bytes) and not too_few else None
    second, byte = max(*whole_seconds, 1e-30), max(whole_bytes, 1)
    budget = np.maximum(np.array(budget_bytes, float), 1.0)
    spent = np.array([option.collective_seconds for option in options]) / second
    freed = np.array([option.saved_seconds for option in options]).T / second
    saved = np.array([option.saved_bytes for option in options], float).T / byte
    # variables: y, z = seconds of what is not cut, u = fullness of the fullest rank; scaled so that all are about 1
    seconds = np.concatenate([spent, [1.0, 0.0]])
    fullness = np.concatenate([np.zeros(count + 1), [1.0]])
    order = np.concatenate([[option.places + rank / count for rank, option in enumerate(options)], [0.0, 0.0]])
    rows = [np.concatenate([freed[rank], [1.0, 0.0]]) for rank in range(ranks)]
    least = [own / second for own in whole_seconds]
    rows += [np.concatenate([saved[rank], [0.0, budget[rank] / budget.max()]]) for rank in range(ranks)]
    least += [whole_bytes / byte] * ranks
    tight = [(rank, (whole_bytes - budget[rank]) / byte) for rank in range(ranks) if whole_bytes > budget_bytes[rank]]
    rows += [np.concatenate([saved[rank], [0.0, 0.0]]) for rank, _ in tight]
    least += [need + _MARGIN for _, need in tight]
    rows += [np.array([*((o.index, o.shares) not in known for o in options), 0.0, 0.0]) for known in too_few]
    least += [1.0] * len(too_few)
    place = {option.index: position for position, option in enumerate(options)}
    pairs = {
        tuple(sorted((place[option.index], place[other])))
        for option in options
        for other in option.conflicts
        if other in place
    }
    for one, other in sorted(pairs):
        row = np.zeros(count + 2)
        row[[one, other]] = -1.0
        rows.append(row)
        least.append(-1.0)
    first, then = (fullness, seconds) if objective == "memory" else (seconds, order)
    sets = _compatible(count, pairs)
    solved = _solve if sets is None else partial(_best_of, sets)
    picked = solved(first, then, np.array(rows), np.array(least), count)
    return None if picked is None else tuple(options[position] for position in picked)


def _compatible(count: int, pairs: Collection[tuple[int, ...]]) -> np.ndarray | None:
    """[sets, count] all sets without a pair, the empty one first; None if they are many."""
    sets = np.zeros((1, count), bool)
    for one in range(count):
        others = [a + b - one for a, b in pairs if one in (a, b)]
        more = sets[~sets[:, others].any(axis=1)]
        more[:, one] = True
        sets = np.concatenate([sets, more])
        if len(sets) > _MOST_SETS:
            return None
    return sets


def _best_of(
    sets: np.ndarray, first: np.ndarray, then: np.ndarray, rows: np.ndarray, least: np.ndarray, count: int
) -> tuple[int, ...] | None:
    """As `_solve`, over these sets: a row that has z or u in it says how large they must be, the others are limits."""
    left = least[None, :] - sets @ rows[:, :count].T
    own = rows[:, count:]
    z, u = (
        np.maximum((left[:, own[:, at] > 0] / own[own[:, at] > 0, at]).max(axis=1, initial=0.0), 0.0) for at in (0, 1)
    )
    able = np.flatnonzero((left[:, ~own.any(axis=1)] <= 0).all(axis=1))
    if not len(able):
        return None
    values, others = (sets[able] @ figure[:count] + figure[count] * z[able] + figure[count + 1] * u[able]
                      for figure in (first, then))  # fmt: skip
    good = np.flatnonzero(values <= values.min() + 1e-9 * max(abs(float(values.min())), 1.0))
    return tuple(np.flatnonzero(sets[able[good[others[good].argmin()]]]).tolist())


def _solve(
    first: np.ndarray, then: np.ndarray, rows: np.ndarray, least: np.ndarray, count: int
) -> tuple[int, ...] | None:
    """Minimise one figure, then among its optima another; variables up to `count` are 0 or 1."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    integrality = np.concatenate([np.ones(count), np.zeros(2)])
    bounds = Bounds(np.concatenate([np.zeros(count), [0.0, 0.0]]), np.concatenate([np.ones(count), [np.inf] * 2]))
    settings = {"mip_rel_gap": 0.0}
    constraints = [LinearConstraint(rows, least, np.inf)]
    found = milp(first, constraints=constraints, integrality=integrality, bounds=bounds, options=settings)
    if found.x is None:
        return None
    best = float(first @ found.x)
    constraints.append(LinearConstraint(first[None, :], -np.inf, best + 1e-9 * max(abs(best), 1.0)))
    again = milp(then, constraints=constraints, integrality=integrality, bounds=bounds, options=settings)
    x = found.x if again.x is None else again.x
    return tuple(np.flatnonzero(x[:count] > 0.5).tolist())

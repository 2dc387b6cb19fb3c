"""Choose which axis groups to cut: the exact optimum among compatible ones that save enough on every rank.

With y[g] = 1 if group g is cut, and everything that is not cut done by every rank:

    seconds    max over ranks d of (whole model - sum y[g] (what d saves of g))  +  sum y[g] collectives of g
    memory     sum y[g] (what d does not keep of g)  >=  what it needs to save
    conflicts  y[g] + y[h] <= 1

a small mixed integer program, where blocks that are alike are one variable.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    options: Sequence[Option], whole_seconds: Sequence[float], need_bytes: Sequence[int], objective: str
) -> tuple[Option, ...] | None:
    """Return the options with the fewest seconds, or with "memory" those that save most on the rank that saves least.

    `whole_seconds`, `need_bytes`: per rank, of the whole model on it, and what must be saved there. None if no options
    save that much.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    count, ranks = len(options), range(len(whole_seconds))
    if not count:
        return () if max(need_bytes) <= 0 else None
    second = max(*whole_seconds, 1e-30)
    byte = max(1, *need_bytes, *(nbytes for option in options for nbytes in option.saved_bytes))
    spent = np.array([option.collective_seconds for option in options]) / second
    freed = np.array([option.saved_seconds for option in options]).T / second
    saved = np.array([option.saved_bytes for option in options], float).T / byte
    # variables: y, z = seconds of what is not cut, u = bytes saved on the rank that saves least; all are about 1
    order = np.array([1e-9 * (option.places + rank / count) for rank, option in enumerate(options)])
    if objective == "memory":
        goal = np.concatenate([order + 1e-2 * spent / max(1.0, spent.max()), [0.0, -1.0]])
    else:
        goal = np.concatenate([order + spent, [1.0, 0.0]])
    rows = [np.concatenate([freed[rank], [1.0, 0.0]]) for rank in ranks]
    least = [own / second for own in whole_seconds]
    rows += [np.concatenate([saved[rank], [0.0, -1.0]]) for rank in ranks]
    least += [0.0 for _ in ranks]
    for rank in ranks:
        if need_bytes[rank] > 0:
            rows.append(np.concatenate([saved[rank], [0.0, 0.0]]))
            least.append(need_bytes[rank] / byte)
    place = {option.index: at for at, option in enumerate(options)}
    pairs = {tuple(sorted((at, place[other]))) for at, option in enumerate(options) for other in option.conflicts
             if other in place}  # fmt: skip
    for one, two in sorted(pairs):
        row = np.zeros(count + 2)
        row[[one, two]] = -1.0
        rows.append(row)
        least.append(-1.0)
    found = milp(
        goal,
        constraints=LinearConstraint(np.array(rows), np.array(least), np.inf),
        integrality=np.concatenate([np.ones(count), np.zeros(2)]),
        bounds=Bounds(np.zeros(count + 2), np.concatenate([np.ones(count), [np.inf, np.inf]])),
        options={"mip_rel_gap": 0.0},
    )
    if found.x is None:
        return None
    return tuple(option for option, yes in zip(options, found.x, strict=False) if yes > 0.5)

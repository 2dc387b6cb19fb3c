"""balanced and balanced_low_0: the exact optimum of the objective over contiguous cuts, devices in any order."""

from dataclasses import replace

import numpy as np

from autoshard.choices import Objective
from autoshard.strategies.chain import Chain
from autoshard.strategies.solve import Solution, solve

_STEPS = 12
"""Halvings of the first device's share in balanced_low_0: it is known to 1/4096 of the device's memory."""


def balanced(chain: Chain, objective: Objective = "latency", *, any_equal: bool = False) -> Solution | None:
    """Minimise latency, the busiest device's seconds (throughput) or the largest share of memory in use (memory).

    Where no speed is known the memory is evened out. One device is a valid answer for latency. `any_equal`: as for
    `solve`.
    """
    return solve(chain, objective if chain.seconds.any() else "memory", any_equal=any_equal)


def balanced_low_0(chain: Chain, objective: Objective = "latency") -> Solution | None:
    """Like balanced, with as little on the first device as the others allow: nothing, where they can hold all."""
    best = balanced(chain, objective)
    if best is None or chain.num_devices == 1:
        return best
    low, high = 0.0, best.cost.memory_bytes[0]
    for step in range(_STEPS):
        middle = (low + high) / 2 if step else 0.0
        found = balanced(_with_first(chain, middle), objective)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, found.cost.memory_bytes[0])
        if high <= low:
            break
    return best


def _with_first(chain: Chain, capacity: float) -> Chain:
    changed = np.array(chain.capacity_bytes, float)
    changed[0] = capacity
    return replace(chain, capacity_bytes=changed)

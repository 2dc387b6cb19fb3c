"""Reasons: why a placement is as it is, in sentences for people."""

import numpy as np

from autoshard.common.sizes import format_bytes
from autoshard.plan.choices import Objective
from autoshard.strategies.chain import Chain
from autoshard.strategies.partition import Solution

_BEST = {
    "latency": "the fewest seconds per pass", "throughput": "the fewest seconds of the busiest device",
    "memory": "the smallest share of memory in use",
}  # fmt: skip


def explain(strategy: str, objective: Objective, chain: Chain, solution: Solution) -> tuple[str, ...]:
    """Say why this many devices, what became of tied weights, and what it is the best of."""
    if strategy == "sequential":
        last = "sequential fills the devices in the order given; it does not look for the optimum"
    elif strategy == "balanced_low_0":
        last = f"{chain.devices[0]} holds as little as the other devices allow"
    else:
        last = f"of the contiguous plans that were compared it has {_BEST[objective]}"
    return (_how_many(strategy, objective, chain, solution), *_ties(chain, solution), last)


def _how_many(strategy: str, objective: Objective, chain: Chain, solution: Solution) -> str:
    used = sorted(set(solution.assignment))
    names = [chain.devices[device] for device in used]
    need = float(chain.resident_bytes.sum())
    if len(names) == 1:
        if chain.num_devices == 1:
            return f"everything is on {names[0]}, the only device of the process"
        if objective == "latency" and strategy != "sequential":
            return f"everything fits on {names[0]}, and devices that take turns on one input add copies: one is fastest"
        return f"everything fits on {names[0]}"
    largest = int(np.argmax(chain.capacity_bytes))
    if need > chain.capacity_bytes[largest]:
        return (
            f"{len(names)} devices, since what must stay in memory takes {format_bytes(need)} and the largest device, "
            f"{chain.devices[largest]}, has {format_bytes(float(chain.capacity_bytes[largest]))}"
        )
    if objective != "latency":
        goal = "the busiest device has the least to do" if objective == "throughput" else "memory is most even"
        return f"{len(names)} devices: {goal} when they share the model"
    return f"{len(names)} devices: with activations and pins, nothing on fewer that was compared fits and is faster"


def _ties(chain: Chain, solution: Solution) -> list[str]:
    found = []
    sizes = chain.tensor_bytes[len(chain.tensor_bytes) - len(chain.ties) :]
    for tie, nbytes in zip(chain.ties, sizes.tolist(), strict=True):
        names = " and ".join(chain.paths[unit][0] for unit in tie)
        where = sorted({solution.assignment[unit] for unit in tie})
        if len(where) == 1:
            found.append(f"{names} share one tensor and are together on {chain.devices[where[0]]}")
        else:
            on = " and ".join(chain.devices[device] for device in where)
            found.append(
                f"{names} share one tensor of {format_bytes(nbytes)}, of which {on} each hold a copy: cheaper than "
                "together"
            )
    return found

"""Reasons: why a plan is as it is, in sentences for people."""

import numpy as np

from autoshard.estimate import Estimate
from autoshard.sizes import format_bytes
from autoshard.strategies.auto import alternatives, describe, is_worse
from autoshard.strategies.chain import Chain
from autoshard.strategies.solve import Objective, Solution

_FIGURE = {
    "latency": "seconds per pass", "throughput": "seconds of the busiest device", "memory": "share of memory in use",
}  # fmt: skip


def explain(
    strategy: str, objective: Objective, chain: Chain, solved: Chain, solution: Solution, figures: Estimate
) -> tuple[str, ...]:
    """Say why this many devices, what bounds the plan, what became of tied weights, and how far from optimal it is."""
    reasons = [_how_many(strategy, objective, chain, solution)]
    reasons += _fullest(figures)
    reasons += _ties(chain, solution)
    if strategy == "sequential":
        reasons.append("sequential fills the devices in the order given; it does not look for the optimum")
    else:
        reasons.append(_optimality(objective, solution))
    if (np.asarray(solved.capacity_bytes) != chain.capacity_bytes).any():
        reasons.append(
            "planned with a little less or more memory than there is, so that the exact peak of the recorded run, op "
            "by op, fits and almost equal devices count as equal; what is said of the best plan holds for that"
        )
    if strategy == "auto":
        other = [a for a in alternatives(solved, objective) if is_worse(a, solution, objective)]
        reasons += [f"not chosen: {describe(alternative, objective)}" for alternative in other]
    return tuple(reasons)


def _how_many(strategy: str, objective: Objective, chain: Chain, solution: Solution) -> str:
    used = sorted(set(solution.assignment))
    names = [chain.devices[device] for device in used]
    need = float(chain.resident_bytes.sum())
    if len(names) == 1:
        if chain.num_devices == 1:
            return f"everything is on {names[0]}, the only device"
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
    return f"{len(names)} devices: with activations and pins the model does not fit better on fewer"


def _fullest(figures: Estimate) -> list[str]:
    used = [device for device in figures.devices if device.peak_bytes > device.overhead_bytes]
    if not used:
        return []
    full = max(used, key=lambda device: device.peak_bytes / device.memory_bytes)
    share = full.peak_bytes / full.memory_bytes
    return [
        f"{full.name} is the fullest device: {format_bytes(full.peak_bytes)} at its peak, {share:.0%} of its memory"
    ]


def _ties(chain: Chain, solution: Solution) -> list[str]:
    found = []
    for tie in chain.ties:
        names = " and ".join(chain.paths[unit][0] for unit in tie.units)
        where = sorted({solution.assignment[unit] for unit in tie.units})
        if len(where) == 1:
            found.append(f"{names} share one tensor and are together on {chain.devices[where[0]]}")
        else:
            size = format_bytes(tie.nbytes)
            on = " and ".join(chain.devices[device] for device in where)
            found.append(f"{names} share one tensor of {size}, of which {on} each hold a copy: cheaper than together")
    return found


def _optimality(objective: Objective, solution: Solution) -> str:
    gap = solution.value / solution.bound - 1 if solution.bound > 0 else 0.0
    if solution.bound > 0 and gap > 1e-9:
        return f"at most {gap:.2%} above the best contiguous plan in {_FIGURE[objective]} (proved by a lower bound)"
    less = "a lower" if objective == "memory" else "fewer"
    return f"by the planner's estimate no contiguous plan on these devices has {less} {_FIGURE[objective]}"

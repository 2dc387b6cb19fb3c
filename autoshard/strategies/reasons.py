"""Reasons: why a plan is as it is, and why there is none, in sentences for people."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.estimate import Estimate
from autoshard.sizes import format_bytes
from autoshard.strategies.auto import alternatives, describe, is_worse
from autoshard.strategies.chain import Chain
from autoshard.strategies.solve import Objective, Solution, solve

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
        reasons.append("sequential fills the devices in the order given, so it is not compared with the optimum")
    else:
        reasons.append(_optimality(objective, solution))
    if (solved.capacity_bytes != chain.capacity_bytes).any():
        reasons.append("device memory was checked against the exact peak of the recorded run, op by op")
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
    return [f"{full.name} is the fullest device: {format_bytes(full.peak_bytes)} at its peak, {share:.0%} of its memory"]


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
    return f"no contiguous plan of these modules on these devices has fewer {_FIGURE[objective]}".replace(
        "fewer share", "a lower share"
    )


def refusal(chain: Chain, cluster: Cluster, works: Callable[[Cluster, Chain], bool]) -> str:
    """Say which device lacks how much, what takes most there, and one change that was tried and works."""
    capacity = np.asarray(chain.capacity_bytes, float)
    even = solve(replace(chain, capacity_bytes=np.maximum(capacity, 1.0) * 1e9), "memory")
    if even is None:
        return (
            "the pins contradict each other: modules that share a weight are pinned to different devices. "
            "Pin all of them to one device, or leave out all pins but one."
        )
    device = int(np.argmax(np.array(even.cost.memory_bytes) - capacity))
    need, has = even.cost.memory_bytes[device], float(capacity[device])
    sizes = np.asarray(chain.resident_bytes, float) + np.asarray(chain.transient_bytes, float)
    mine = sorted((unit for unit, at in enumerate(even.assignment) if at == device), key=lambda unit: -sizes[unit])
    largest = ", ".join(f"{chain.paths[unit][0] or 'the model'} {format_bytes(sizes[unit])}" for unit in mine[:3])
    lack = f", {format_bytes(need - has)} too little" if need > has else ""
    return (
        f"the model does not fit: spread as evenly as possible, {chain.devices[device]} needs {format_bytes(need)} "
        f"and has {format_bytes(has)} for tensors{lack} (largest there: {largest}). "
        + _remedy(chain, cluster, device, works)
    )


def _remedy(chain: Chain, cluster: Cluster, device: int, works: Callable[[Cluster, Chain], bool]) -> str:
    """Find how much more memory on one device makes it fit, and try it to the end."""
    short = cluster.devices[device]
    capacity = np.array([d.budget_bytes for d in cluster.devices], float)

    def fits(extra: float) -> bool:
        more = capacity.copy()
        more[device] += extra
        return solve(replace(chain, capacity_bytes=np.maximum(more, 0.0)), "latency") is not None

    low, high = 0.0, 2.0 * float(np.sum(chain.resident_bytes) + np.max(chain.transient_bytes)) + short.overhead_bytes
    if not fits(high):
        return "More memory on one device alone does not help: give another device, or leave out the pins."
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    for factor in (1.0, 1.25, 2.0):
        extra = int(high * factor)
        larger = cluster.with_memory({short.name: short.memory_bytes + extra})
        if works(larger, replace(chain, capacity_bytes=np.array([d.budget_bytes for d in larger.devices], float))):
            return f"It was checked that it fits if {short.name} has {format_bytes(extra)} more."
    return "More memory on one device alone does not help: give another device."

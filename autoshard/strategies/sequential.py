"""sequential: fill the devices in the order given, each as far as it goes, and use no more of them than needed."""

import numpy as np

from autoshard.strategies.chain import Chain, cost_of
from autoshard.strategies.problem import Problem, make_problem
from autoshard.strategies.solve import MAX_DENSE, Objective, Solution, links_into, solve, tie_choices
from autoshard.strategies.stages import StageTables


def sequential(chain: Chain, objective: Objective = "latency") -> Solution | None:
    """Give each device in turn the longest run of units that fits and leaves the rest a place; None if nothing fits.

    Where no way in the given order exists the devices are taken in another. The objective only decides whether tied
    weights stay together or are copied.
    """
    best: Solution | None = None
    for merged in tie_choices(chain):
        problem = make_problem(chain, merged)
        if problem is None or problem.size > MAX_DENSE:
            continue
        stages = _fill(problem)
        if stages is None:
            continue
        assignment = problem.assignment(stages)
        cost = cost_of(chain, assignment)
        if best is None or cost.latency < best.value * (1 - 1e-12):
            best = Solution(assignment=assignment, cost=cost, value=cost.latency, bound=0.0)
    return best or solve(chain, "latency", "given") or solve(chain, "latency", "any")


def _fill(problem: Problem) -> list[tuple[int, int, int]] | None:
    """Fill from the left, looking ahead so that what is left always fits on the devices that are left."""
    devices, size = problem.chain.num_devices, problem.size
    tables = StageTables(problem, links_into(problem.chain) or (np.zeros(devices), np.ones(devices)))
    able = np.zeros((devices + 1, size + 1), bool)  # able[d, i]: units i.. fit on devices d..
    able[devices, size] = True
    fits: list[np.ndarray] = []
    for device in range(devices - 1, -1, -1):
        stages = tables.stages(device)
        fits.insert(0, np.isfinite(stages.load))
        able[device] = (fits[0] & able[device + 1]).any(axis=1)
        if np.isfinite(stages.idle_load):
            able[device] |= able[device + 1]
    if not able[0, 0]:
        return None
    stages_found, at = [], 0
    for device in range(devices):
        ends = np.flatnonzero(fits[device][at] & able[device + 1])
        if len(ends) and ends[-1] > at:
            stages_found.append((at, int(ends[-1]), device))
            at = int(ends[-1])
    return stages_found

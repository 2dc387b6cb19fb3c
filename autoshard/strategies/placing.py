"""Placing: solve the chain, check the answer exactly, and look on while an answer is not what the chain promised.

The chain adds up what may be live together, and runs glue between modules where the unit before it runs; the exact
estimate walks the recorded run. So a solution may not fit, or take longer than the chain says:

    solved with capacities c     0 0 0 0 0 1 1     cuda:0 holds h, 8 MiB too much by the exact estimate
    at first                     0 0 0 0 1 1 1     c of cuda:0 becomes h - 8 MiB, until something fits
    then, of small models        0 0 0 0 0 1 1     c becomes h - 1 byte: what comes next, from the best on, until the
                                                   chain promises nothing better than what was found

Where memory is the objective, or the chain finds nothing that fits, what intervals really hold (`peaks.py`) takes the
place of its sums.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from autoshard.choices import Objective
from autoshard.cluster.cluster import Cluster
from autoshard.cost import estimate, tensor_units, weight_bytes
from autoshard.estimate import Estimate
from autoshard.flow import Flow, flow
from autoshard.plan import Plan
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units
from autoshard.strategies.auto import auto
from autoshard.strategies.balanced import balanced, balanced_low_0
from autoshard.strategies.chain import Chain
from autoshard.strategies.compare import value_of
from autoshard.strategies.levels import coarsen, cut_depths
from autoshard.strategies.paths import collapse
from autoshard.strategies.peaks import MAX_CELLS, find_peaks
from autoshard.strategies.problem import device_kinds
from autoshard.strategies.sequential import sequential
from autoshard.strategies.solve import Solution, most_even

Strategy = Callable[[Chain, Objective], Solution | None]
STRATEGIES: dict[str, Strategy] = {
    "auto": auto, "sequential": sequential, "balanced": balanced, "balanced_low_0": balanced_low_0,
}  # fmt: skip
_TRIES = 8
"""Most rounds of solving, checking exactly and giving a device that came out too full less to hold (2 above room 1)."""
_SAME = 1e-9
"""Relative difference of rounding. Of plans that cost the same the one with cuts between larger modules is taken.

Nothing is given away for that: else more memory could make a plan worse, if the better one it allows is less clean.
"""
_MANY_KINDS = 8
"""Kinds of devices above which almost equal memory is treated as equal first."""
_MANY_STAGES = 2_000
"""Units times devices up to which more memory than the chain has is tried even where a plan is known already."""
_MANY_CUTS = 400
"""balanced_low_0 solves many times; it looks at deeper cuts only up to here once it has a plan."""
_ROOM = (1.0, 1.1, 1.3, 1.7)
"""Factors on the capacity of the chain: its memory is the sum of what may be live, the exact figure can be less."""
_ROUNDS = 24
"""Most placements that are checked by what intervals really hold: where memory is the objective, or nothing fits."""
_CHECKED_OPS = 12_000
"""Ops of the run, times such placements."""
_NEXT_BEST = 12
"""Most solutions that are checked after the first that fits, while the chain promises better ones."""
_NEXT_BEST_OPS = 4_000
"""Ops of the run, times such solutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A solution of the whole chain with its placements and exact consequences; `chain` is the one that was solved."""

    solution: Solution
    chain: Chain
    placements: Mapping[str, str]
    flow: Flow
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class _Solved:
    """A solution with cuts where `cuts` allows them, and the capacities it was solved with."""

    capacity: np.ndarray
    cuts: np.ndarray
    joined: Chain
    solution: Solution
    group: np.ndarray

    @property
    def assignment(self) -> tuple[int, ...]:
        """The device of every unit."""
        return tuple(np.array(self.solution.assignment)[self.group].tolist())


@dataclass(slots=True, kw_only=True)
class _Task:
    """What is asked. `known`: assignment -> what was checked; `missed`: solutions that are not what the chain said."""

    profile: Profile
    cluster: Cluster
    units: Units
    strategy: str
    objective: Objective
    known: dict[tuple[int, ...], Checked] = field(default_factory=dict)
    missed: list[_Solved] = field(default_factory=list)

    def solve(self, chain: Chain, cuts: np.ndarray, capacity: np.ndarray) -> _Solved | None:
        """The best with these capacities and cuts; None if nothing fits."""
        joined, group = coarsen(replace(chain, capacity_bytes=capacity), cuts)
        solution = STRATEGIES[self.strategy](joined, self.objective)
        if solution is None:
            return None
        return _Solved(capacity=capacity, cuts=cuts, joined=joined, solution=solution, group=group)

    def check(self, solved: _Solved) -> Checked:
        """The exact consequences of a solution."""
        assignment = solved.assignment
        solution = replace(solved.solution, assignment=assignment)
        if assignment not in self.known:
            self.known[assignment] = check(
                self.profile, self.cluster, self.units, solved.joined, solution, self.objective
            )
        found = replace(self.known[assignment], solution=solution, chain=solved.joined)
        if not self.keeps(found):
            self.missed.append(solved)
        return found

    def keeps(self, found: Checked) -> bool:
        """Whether it fits and is as good as the chain says."""
        return found.estimate.fits and self.value(found) <= found.solution.value * (1 + _SAME)

    def value(self, found: Checked) -> float:
        """The figure to minimise; passes are taken to overlap for throughput, whatever the model does."""
        return value_of(found.estimate, self.objective, training=False)

    def is_better(self, found: Checked, best: Checked | None) -> bool:
        if best is None:
            return True
        if self.strategy == "balanced_low_0":
            model = sum(device.peak_bytes for device in best.estimate.devices)
            return found.estimate.devices[0].peak_bytes < best.estimate.devices[0].peak_bytes - model / 100
        return self.value(found) < self.value(best) * (1 - _SAME)


def place(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, strategy: str, objective: Objective
) -> Checked | None:
    """Find the best plan by the exact estimate among those with cuts at every depth; None if none fits."""
    task = _Task(profile=profile, cluster=cluster, units=units, strategy=strategy, objective=objective)
    best = _first(task, chain)
    if strategy in ("sequential", "balanced_low_0"):
        return best
    if best is None:  # the chain thinks that nothing fits, or what it finds never does
        return _by_peaks(task, chain, None)
    if objective != "memory":
        return _next_best(task, chain, best)
    return _by_peaks(task, chain, best)


def fits(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, strategy: str, objective: Objective
) -> bool:  # fmt: skip
    """Say whether `place` finds a plan, without looking for the best one."""
    task = _Task(profile=profile, cluster=cluster, units=units, strategy=strategy, objective=objective)
    return _first(task, chain, any_will_do=True) is not None


def _first(task: _Task, chain: Chain, *, any_will_do: bool = False) -> Checked | None:
    """Find a plan that fits with what the devices have, or with more where the chain counts more than there is."""
    strategy, objective = task.strategy, task.objective
    budget = np.array([device.budget_bytes for device in task.cluster.devices], float)
    limits = [np.maximum(budget * room, 0.0) for room in _ROOM]
    if len(set(device_kinds(chain))) > _MANY_KINDS:
        limits.insert(0, _alike(limits[0]))
    seeks_least = not any_will_do and strategy not in ("sequential", "balanced_low_0") and objective != "memory"
    seeks_least = seeks_least and bool(chain.seconds.any())
    seeks_least = seeks_least and chain.num_units * chain.num_devices <= _MANY_STAGES
    most = max(_fullest(limit, budget) for limit in limits)
    best: Checked | None = None
    least: float | None = None  # how full the fullest device is, whatever is where; worked out if in doubt
    for limit in limits:
        posed = replace(chain, capacity_bytes=limit)
        if best is None and not _has_room(posed):
            least = _least_load(chain, budget, most) if least is None else least
            if least * (1 - _SAME) > _fullest(limit, budget):
                continue
        given = strategy == "sequential"
        finest = sequential(posed, objective) if given else balanced(posed, objective, any_equal=True)
        if finest is None or (best is not None and finest.value >= best.solution.value * (1 - _SAME)):
            continue
        found = _over_depths(task, posed, finest, _TRIES if limit is limits[0] else 2)
        if found is not None and task.is_better(found, best):
            best = found
        if best is not None and not seeks_least:
            break
    return best


def _fullest(limit: np.ndarray, budget: np.ndarray) -> float:
    """The part of its budget that a device may hold at most with these limits."""
    return float((limit / np.maximum(budget, 1.0)).max())


def _least_load(chain: Chain, budget: np.ndarray, most: float) -> float:
    """What no contiguous placement goes below: the part of its budget that the fullest device holds, by the chain.

    Where `simple_load` exceeds `most` it is enough to know that.
    """
    simple = simple_load(chain, budget)
    if simple * (1 - _SAME) > most:
        return simple
    even = most_even(replace(chain, capacity_bytes=budget))
    return np.inf if even is None else even.bound


def simple_load(chain: Chain, budget: np.ndarray) -> float:
    """What `_least_load` is not below: all units are somewhere, and each is whole."""
    room = np.maximum(budget, 1.0)
    unit = float((chain.resident_bytes + chain.transient_bytes).max())
    return max(unit / float(room.max()), float(chain.resident_bytes.sum()) / float(room.sum()))


def _has_room(chain: Chain) -> bool:
    """Whether devices have so much that most likely something fits: then one need not look before one solves."""
    alone = float((chain.resident_bytes + chain.transient_bytes).max())
    whole = float(chain.resident_bytes.sum() + chain.transient_bytes.max())
    return alone <= float(chain.capacity_bytes.min()) and whole < 0.5 * float(chain.capacity_bytes.sum())


def _over_depths(task: _Task, chain: Chain, finest: Solution, tries: int) -> Checked | None:
    """Find the best plan by the exact estimate with cuts between ever smaller modules; `finest` has cuts everywhere."""
    best: Checked | None = None
    for cuts in _levels(chain):
        if best is not None and task.strategy == "balanced_low_0" and cuts.sum() > _MANY_CUTS:
            break
        found = _fit(task, chain, cuts, tries)
        if found is None:
            continue
        found = replace(found, solution=replace(found.solution, bound=finest.bound))
        if task.strategy == "sequential" or task.is_better(found, best):
            best = found
        if best is not None and _good_enough(best, finest, task.strategy):
            break
    return best


def _levels(chain: Chain) -> list[np.ndarray]:
    """Which cuts are allowed, from those between the largest modules to all."""
    depths = cut_depths(chain.paths)
    return [depths <= depth for depth in sorted(set(depths[1:].tolist())) or [0]]


def _alike(capacity: np.ndarray) -> np.ndarray:
    """Round capacities that differ by 2 % at most down to the same figure: free memory is never quite equal.

    Devices that are otherwise equal then need not be told apart, which makes all their orders one.
    """
    rounded = capacity.copy()
    order = np.argsort(-capacity, kind="stable")
    start = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or capacity[order[end]] < 0.98 * capacity[order[start]]:
            rounded[order[start:end]] = capacity[order[end - 1]]
            start = end
    return rounded


def _good_enough(found: Checked, finest: Solution, strategy: str) -> bool:
    """True if deeper cuts can't help: the devices that should be used are, or the lower bound is next to it."""
    if strategy == "sequential":
        return set(found.solution.assignment) == set(finest.assignment)
    if strategy == "balanced_low_0":
        return 0 not in found.solution.assignment
    return found.solution.value <= finest.bound * (1 + _SAME)


def _fit(task: _Task, chain: Chain, cuts: np.ndarray, tries: int) -> Checked | None:
    """Solve with some cuts allowed, check exactly, and take from a device what it turns out to lack until it fits."""
    capacity, kinds = np.array(chain.capacity_bytes, float), np.array(device_kinds(chain))
    weights = weight_bytes(task.profile, task.units)
    budget = np.array([device.budget_bytes for device in task.cluster.devices], float)
    for _ in range(_TRIES):
        # as long as equal devices stay equal the solver need not tell them apart
        even = np.array([capacity[kinds == kind].min() for kind in kinds])
        solved = task.solve(chain, cuts, even) or task.solve(chain, cuts, capacity)
        if solved is None:
            return None
        held = np.array(solved.solution.cost.memory_bytes)
        over = np.bincount(solved.assignment, weights, len(budget)) - budget
        if (over > 0).any():  # too full with the weights alone
            capacity = np.where(over > 0, np.maximum(np.minimum(capacity, held) - over, 0.0), capacity)
            continue
        if not tries:
            return None
        tries -= 1
        found = task.check(solved)
        over = np.array([-device.free_bytes for device in found.estimate.devices], float)
        if (over <= 0).all():
            return found
        capacity = np.where(over > 0, np.maximum(np.minimum(capacity, held) - over, 0.0), capacity)
    return None


def _next_best(task: _Task, chain: Chain, best: Checked) -> Checked:
    """Check solutions in the order of what the chain promises, until it promises nothing better than what was found.

    What follows a solution that did not keep its promise: a device that was too full, or one that was used, must hold
    less than it did. Which of several equal devices that is makes no difference.
    """
    checks = min(_NEXT_BEST, _NEXT_BEST_OPS // max(len(task.profile.graph.ops), 1))
    bound, seen, kinds = best.solution.bound, set[bytes](), np.array(device_kinds(chain))
    queue = [(missed.solution.value, number, missed) for number, missed in enumerate(task.missed)]
    heapq.heapify(queue)
    numbers = count(len(queue))
    for _ in range(len(queue) + checks if checks else 0):
        if not queue or queue[0][0] >= task.value(best) * (1 - _SAME):
            break
        solved = heapq.heappop(queue)[2]
        found = task.check(solved)
        if found.estimate.fits and task.is_better(found, best):
            best = found
        over = [-device.free_bytes for device in found.estimate.devices]
        used = [] if task.keeps(found) else sorted(set(found.solution.assignment))
        for device in [d for d in used if over[d] > 0] or used:
            capacity = solved.capacity.copy()
            capacity[device] = found.solution.cost.memory_bytes[device] - max(over[device] / 2, 1)
            key = capacity[np.lexsort((capacity, kinds))].tobytes() + solved.cuts.tobytes()
            following = None if key in seen else task.solve(chain, solved.cuts, capacity)
            seen.add(key)
            if following is not None:
                heapq.heappush(queue, (following.solution.value, next(numbers), following))
    return replace(best, solution=replace(best.solution, bound=min(bound, best.solution.value)))


def _by_peaks(task: _Task, chain: Chain, best: Checked | None) -> Checked | None:
    """The best placement by what intervals really hold; where a check finds otherwise that is noted, and again.

    Of those that are as good the one with cuts between the largest modules is taken. `best`: what is known already.
    """
    ops = max(len(task.profile.graph.ops), 1)
    levels = [cuts for cuts in _levels(chain) if ops * int(cuts.sum()) ** 2 <= MAX_CELLS]
    if chain.pins or not levels:
        return best
    peaks = find_peaks(task.profile, task.cluster.devices, task.units)
    budget = np.array([device.budget_bytes for device in task.cluster.devices], float)
    posed = replace(chain, peaks=peaks)
    for found in task.known.values():
        peaks.learn(found.solution.assignment, _held(found))
    for _ in range(min(_ROUNDS, _CHECKED_OPS // ops)):
        finest = task.solve(posed, levels[-1], budget)
        if finest is None:
            break
        every = (task.solve(posed, cuts, budget) for cuts in levels)
        least = finest.solution.value * (1 + _SAME)
        solved = next(one for one in every if one is not None and one.solution.value <= least)
        seen = solved.assignment in task.known
        found = task.check(solved)
        peaks.learn(solved.assignment, _held(found))
        if found.estimate.fits and task.is_better(found, best):
            solution = replace(found.solution, bound=finest.solution.bound)
            best = replace(found, solution=solution, chain=replace(solved.joined, peaks=None))
        if seen or (found.estimate.fits and task.value(found) <= least):
            break
    return best


def _held(found: Checked) -> list[int]:
    """[devices] bytes of tensors at most, by the exact figures."""
    return [device.peak_bytes - device.overhead_bytes for device in found.estimate.devices]


def check(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, solution: Solution, objective: Objective
) -> Checked:
    """Work out placements and their exact consequences."""
    of_tensor = tensor_units(profile.graph, units)
    device_of = {name: chain.devices[solution.assignment[unit]] for name, unit in of_tensor.items()}
    placements = collapse(device_of, profile.graph) or {"": chain.devices[solution.assignment[0]]}
    moves = flow(profile.graph, placements)
    draft = Plan(strategy="draft", objective=objective, workload=profile.workload, devices=(), placements=placements)
    figures = estimate(draft, profile, cluster, flow_of_plan=moves, lower_bound_seconds=0.0)
    return Checked(solution=solution, chain=chain, placements=placements, flow=moves, estimate=figures)

"""Placing: solve the chain at several depths of the module tree, check the answers exactly, and correct the chain.

A cut between two units splits every module that holds both. Inside a split module the arithmetic of its own forward (a
residual sum, say) may meet tensors of two devices, which the chain does not price; between large modules it rarely
does. So plans are made with cuts between ever smaller modules (`levels`), and the exact estimate decides.

The chain adds up what may be live together; the estimate walks the recorded run. What a device turns out to hold more,
or less, than the chain says is taken off what it may hold in the next round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cluster.cluster import Cluster
from autoshard.engine.estimate import Estimate
from autoshard.engine.pricer import price
from autoshard.flow import Flow, flow
from autoshard.plan import Plan
from autoshard.plan.choices import Objective
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units, tensor_units
from autoshard.strategies.chain import Array, Chain, cost_of, join, tie_choices
from autoshard.strategies.compare import value_of
from autoshard.strategies.partition import (
    Room,
    Solution,
    balanced,
    balanced_low_0,
    most_even,
    most_units,
    sequential,
)
from autoshard.strategies.paths import collapse, cut_depths
from autoshard.strategies.stage_costs import StageCosts

STRATEGIES = {
    "auto": balanced, "sequential": sequential, "balanced": balanced, "balanced_low_0": balanced_low_0,
}  # fmt: skip
_ROUNDS = 8
"""Most solutions of one depth that are checked."""
_MANY_OPS = 60_000
"""Ops of the run, times solutions that are checked at all depths; one of each is always."""
_BETTER = 1e-3
"""A deeper cut must promise so much: of plans that cost the same the one with cuts between larger modules is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A solution of the whole chain with its placements and exact consequences."""

    solution: Solution
    placements: Mapping[str, str]
    flow: Flow
    estimate: Estimate


@dataclass(frozen=True, slots=True)
class JoinedChain:
    """A chain with some units joined: `group` says which unit of it each unit of the whole chain is in."""

    costs: StageCosts
    group: Array

    def whole(self, solution: Solution) -> Solution:
        """A solution of it, for all units."""
        return replace(solution, assignment=tuple(np.array(solution.assignment)[self.group].tolist()))


@dataclass(slots=True, kw_only=True)
class _Task:
    """What is asked. `known`: assignment -> what was checked. `wanted`: devices that sequential fills, by the chain."""

    profile: Profile
    cluster: Cluster
    units: Units
    chain: Chain
    strategy: str
    objective: Objective
    known: dict[tuple[int, ...], Checked] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    def solve(self, joined_chains: Sequence[JoinedChain], room: Room) -> Solution | None:
        """The best in this room, for all units; None if nothing fits."""
        solve = STRATEGIES[self.strategy]
        every = [(solve(one.costs, room, self.objective), one) for one in joined_chains]
        found = [one.whole(solution) for solution, one in every if solution is not None]
        return min(found, key=self.score, default=None)

    def check(self, solution: Solution) -> Checked:
        """The exact consequences of a solution."""
        if solution.assignment not in self.known:
            self.known[solution.assignment] = check(self.profile, self.cluster, self.units, solution, self.objective)
        return self.known[solution.assignment]

    def score(self, found: Solution | Checked) -> float:
        """The figure to minimise; passes are taken to overlap for throughput, whatever the model does."""
        solution = found.solution if isinstance(found, Checked) else found
        if self.strategy == "sequential":
            return float(self.wanted != set(solution.assignment))
        if self.strategy == "balanced_low_0":  # to a percent of the model
            held = np.array(solution.cost.memory_bytes)
            if isinstance(found, Checked):
                held = np.array([device.peak_bytes for device in found.estimate.devices])
            return float(np.floor(100 * held[0] / max(held.sum(), 1)))
        return solution.value if isinstance(found, Solution) else value_of(found.estimate, self.objective, False)

    def rank(self, found: Checked) -> tuple[bool, float]:
        """What is compared of plans: those that fit come first, by their score; then those that lack least."""
        full = found.estimate.fullest
        worth = self.score(found) if found.estimate.fits else full.peak_bytes / max(full.memory_bytes, 1)
        return not found.estimate.fits, float(f"{worth:.9g}")


def place(
    profile: Profile, cluster: Cluster, units: Units, chain: Chain, strategy: str, objective: Objective,
    *, any_will_do: bool = False, beat: float | None = None,
) -> Checked | None:  # fmt: skip
    """Find the best plan by the exact estimate among those with cuts at every depth; None if none fits.

    `beat`: what another plan has; what the chain says is no better is not looked at once something fits.
    """
    budget = np.array([device.budget_bytes for device in cluster.devices], float)
    if units.weight_bytes.sum() > np.maximum(budget, 0).sum():
        return None
    has = np.array([device.memory_bytes for device in cluster.devices], float)
    task = _Task(profile=profile, cluster=cluster, units=units, chain=chain, strategy=strategy, objective=objective)
    room, best = Room(has, has - budget), None
    if strategy == "sequential":
        finest = next(iter([*levels(chain, room)][-1:]), [])
        solution = task.solve(finest, room)
        task.wanted = set() if solution is None else set(solution.assignment)
    for joined_chains in levels(chain, room):
        room, best = _rounds(task, joined_chains, room, best, beat)
        if any_will_do and best is not None and best.estimate.fits:
            break
    return best if best is not None and best.estimate.fits else None


def _rounds(
    task: _Task, joined_chains: Sequence[JoinedChain], room: Room, best: Checked | None, beat: float | None = None
) -> tuple[Room, Checked | None]:  # fmt: skip
    """Solve and check at one depth until nothing new comes; returns what is known of the room then, and the best."""
    seen: set[tuple[int, ...]] = set()
    most = _MANY_OPS // max(len(task.profile.graph.ops), 1) - len(task.known)
    for _ in range(min(_ROUNDS, max(most, 1))):
        solution = task.solve(joined_chains, room)
        fits = best is not None and best.estimate.fits
        if solution is None and not fits and not seen:  # the chain may count more than there is
            solution = joined_chains[-1].whole(most_even(joined_chains[-1].costs, room))
        if solution is None or solution.assignment in seen:
            break
        if best is not None and fits and task.score(solution) >= task.score(best) * (1 - _BETTER):
            break
        if fits and beat is not None and task.score(solution) >= beat:
            break
        seen.add(solution.assignment)
        found = task.check(solution)
        if best is None or task.rank(found) < task.rank(best):
            best = found
        room = _corrected(task, joined_chains, room, found)
    return room, best


def _corrected(task: _Task, joined_chains: Sequence[JoinedChain], room: Room, found: Checked) -> Room:
    """The room with what used devices, and all that equal them, turned out to hold beside what the chain counts."""
    taken, used = room.taken_bytes.copy(), set(found.solution.assignment)
    held = cost_of(task.chain, found.solution.assignment).memory_bytes
    for kind in joined_chains[0].costs.kinds(room.has_bytes):
        more = [found.estimate.devices[device].peak_bytes - held[device] for device in kind if device in used]
        if more:
            taken[kind] = max(more)
    return replace(room, taken_bytes=taken)


def levels(chain: Chain, room: Room) -> Iterator[list[JoinedChain]]:
    """Yield the chain with cuts between the largest modules to cuts between all, tied units apart and together."""
    choices = [(one, group, _depths(one)) for one, group in tie_choices(chain)]
    most = most_units(StageCosts(chain), room)
    for depth in sorted({int(depth) for _, _, depths in choices for depth in depths[1:]}) or [0]:
        joined_chains, thinned = [], False
        for one, group, depths in choices:
            cuts = depths <= depth
            if cuts.sum() > most:
                cuts, thinned = _thinned(one, depths < depth, cuts, most), True
            runs = np.cumsum(cuts) - 1
            joined = join(one, runs)
            assert joined is not None
            joined_chains.append(JoinedChain(StageCosts(joined), runs[group]))
        if joined_chains:
            yield joined_chains
        if thinned:
            return


def _depths(chain: Chain) -> Array:
    """[n] depth of a cut before each unit; 0 where pins part it from the one before anyway."""
    depths = cut_depths(chain.paths)
    pin = np.array([chain.pins.get(unit, -1) for unit in range(chain.num_units)])
    depths[1:][pin[1:] != pin[:-1]] = 0
    return depths


def _thinned(chain: Chain, kept: Array, cuts: Array, most: int) -> Array:
    """So many cuts at most: those that are kept, and of the others some at even distances in bytes."""
    others = np.flatnonzero(cuts & ~kept)
    before = np.cumsum(chain.resident_bytes)[others - 1]
    marks = np.linspace(0, float(before[-1]), max(most - int(kept.sum()), 2))
    found = kept.copy()
    found[others[np.unique(np.searchsorted(before, marks))]] = True
    return found


def check(profile: Profile, cluster: Cluster, units: Units, solution: Solution, objective: Objective) -> Checked:
    """Work out placements and their exact consequences."""
    names = cluster.names
    device_of = {name: names[solution.assignment[unit]] for name, unit in tensor_units(profile.graph, units).items()}
    placements = collapse(device_of, profile.graph) or {"": names[solution.assignment[0]]}
    moves = flow(profile.graph, placements)
    draft = Plan(strategy="draft", objective=objective, workload=profile.workload, devices=(), placements=placements)
    estimate = price(draft, profile, cluster, flow_of_plan=moves, lower_bound_seconds=0.0)
    return Checked(solution=solution, placements=placements, flow=moves, estimate=estimate)

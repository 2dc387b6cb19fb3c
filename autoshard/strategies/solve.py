"""Solve: the best assignment of a chain for an objective, choosing the solver by the shape of the problem."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from autoshard.choices import Objective
from autoshard.cost import relaxed_bound
from autoshard.strategies.any_order import AnyOrder
from autoshard.strategies.chain import Array, Chain, Cost, cost_of
from autoshard.strategies.lattice import SLACK, Edges, Lattice, Tables, count_nodes, make_grid, make_line, sweep, trace
from autoshard.strategies.long import LongTables, least_limit, sweep_long
from autoshard.strategies.paired import PairTables, cheapest_links, search
from autoshard.strategies.problem import Problem, make_problem
from autoshard.strategies.stages import Stages, StageTables
from autoshard.strategies.windows import TooWideError

Order = Literal["given", "any"]
MAX_NODES = 1 << 16
"""Largest grid of used-up devices that is searched whole (16 devices that all differ)."""
MAX_LONG_NODES = 64
"""The same for long chains."""
MAX_WORK = 4e9
"""Most sums (edges of the lattice times cells of a table) that are made for all orders of the devices."""
MAX_DENSE = 2000
"""Longest chain that is solved with dense tables."""
MIN_LONG = 200
"""Shortest chain on which the search without dense tables is the faster one."""
SEARCH_BUDGET = 4_000_000
"""Labels times units that the search over unequal links may make before it settles for a proven gap."""
_PLENTY = 1e9
"""Times what devices have: as if memory had no limit."""
MAX_TIES = 6
"""Tied tensors for which every combination of together and apart is tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """An assignment (device index per unit), its cost, and a value no contiguous plan can beat (`bound`)."""

    assignment: tuple[int, ...]
    cost: Cost
    value: float
    bound: float


def value_of(cost: Cost, objective: Objective) -> float:
    """Return the figure that an objective minimises: seconds, seconds of the busiest device, or relative memory."""
    return {"latency": cost.latency, "throughput": cost.bottleneck, "memory": cost.load}[objective]


def solve(
    chain: Chain, objective: Objective = "latency", order: Order = "any", *, any_equal: bool = False
) -> Solution | None:
    """Find the best feasible assignment; None if there is none.

    Among equals in latency the one with the fewest devices, then the most even memory; among equals in the other
    objectives the one with the least latency. With `any_equal` whichever is found first, for who wants the value alone.
    """
    best: Solution | None = None
    bound = np.inf
    for merged in tie_choices(chain):
        problem = make_problem(chain, merged)
        if problem is None:
            continue
        found = _solve_problem(problem, objective, order, any_equal)
        if found is None:
            continue
        bound = min(bound, found.bound)
        if best is None or found.value < best.value * (1 - 1e-12):
            best = found
    if best is None:
        return None
    return Solution(assignment=best.assignment, cost=best.cost, value=best.value, bound=min(bound, best.value))


def can_fit(chain: Chain) -> bool:
    """Say whether any contiguous assignment fits; links play no part in that."""
    return solve(_without_links(chain), "memory") is not None


def most_even(chain: Chain) -> Solution | None:
    """The contiguous assignment with the emptiest fullest device, whether it fits or not; None if pins forbid all."""
    roomy = np.maximum(np.asarray(chain.capacity_bytes, float), 1.0) * _PLENTY
    found = solve(replace(_without_links(chain), capacity_bytes=roomy), "memory")
    if found is None:
        return None
    cost = replace(found.cost, load=found.cost.load * _PLENTY)
    return replace(found, cost=cost, value=cost.load, bound=found.bound * _PLENTY)


def _without_links(chain: Chain) -> Chain:
    size = chain.num_devices
    return replace(chain, link_seconds=np.zeros((size, size)), link_bytes_per_second=np.ones((size, size)))


def tie_choices(chain: Chain) -> Iterator[tuple[bool, ...]]:
    """Yield which ties to keep together: all combinations of a few, all or none of many, all if none may be copied."""
    if not chain.duplicate_ties:
        yield (True,) * len(chain.ties)
    elif len(chain.ties) <= MAX_TIES:
        yield from product((False, True), repeat=len(chain.ties))
    else:
        yield (False,) * len(chain.ties)
        yield (True,) * len(chain.ties)


def links_into(chain: Chain) -> tuple[Array, Array] | None:
    """Return latency and bandwidth of copies into each device if they don't depend on where the copy comes from."""
    size = chain.num_devices
    if size == 1:
        return np.zeros(1), np.ones(1)
    columns = []
    for links in (chain.link_seconds, chain.link_bytes_per_second):
        others = _off_diagonal(links)
        if (others != others[:1]).any():
            return None
        columns.append(others[0])
    return columns[0], columns[1]


def _off_diagonal(links: Array) -> Array:
    """[D-1, D]: column d holds the links into d from all the others."""
    size = len(links)
    rows = np.array([[q for q in range(size) if q != d] for d in range(size)]).T
    return links[rows, np.arange(size)]


def _solve_problem(problem: Problem, objective: Objective, order: Order, any_equal: bool) -> Solution | None:
    links = links_into(problem.chain)
    if problem.size > MAX_DENSE:
        return _solve_long(problem, objective, order, LongTables(problem, links or cheapest_links(problem)))
    few = problem.size >= MIN_LONG and count_nodes(problem.kinds) <= MAX_LONG_NODES and problem.chain.peaks is None
    if any_equal and objective == "latency" and few and links is not None:
        tables = LongTables(problem, links)
        if tables.exact:
            return _solve_long(problem, objective, order, tables)
    if links is not None:
        return _solve_uniform(problem, objective, order, links)
    return _solve_pairs(problem, objective, order)


def _solve_pairs(problem: Problem, objective: Objective, order: Order) -> Solution | None:
    """Solve with links that differ from pair to pair: by what the last devices say of a copy, else by search."""
    found: Solution | None = None
    if order == "any":
        everywhere = AnyOrder(problem, StageTables(problem, cheapest_links(problem)), paired=True)
        if everywhere.possible:
            bound = 0.0
            try:
                guess = everywhere.solve(objective)
                if guess is None:
                    return None
                found = _solution(problem, objective, *guess)
            except TooWideError as error:
                bound = error.bound
            if objective == "memory" and found is not None:
                return found
            if everywhere.short and (found is None or found.value > found.bound * (1 + 1e-9)):
                # without short stages all copies from the stage before are known
                long = AnyOrder(problem, everywhere.tables, paired=True, only_long=True).solve(objective)
                other = _solution(problem, objective, *long) if long else None
                if other is not None and (found is None or other.value < found.value):
                    found = replace(other, bound=min(found.bound if found else bound, other.value))
            if found is not None and found.value <= found.bound * (1 + 1e-9):
                return found
    lattice = make_lattice(problem, order, paired=True)
    if lattice is None:  # too many different devices: the cheapest links give a bound and a good plan
        return found or _solve_uniform(problem, objective, order, cheapest_links(problem))
    tables = PairTables(problem, busy=objective == "throughput")
    if found is None:
        guess = best_stages(lattice, tables, problem.size, objective)
        if guess is None:
            return None
        found = _solution(problem, objective, *guess)
        if objective == "memory" or found.value <= found.bound * (1 + 1e-9):
            return found
    budget = SEARCH_BUDGET // max(problem.size, 1)
    if budget < 20 * problem.size:  # not worth the preparation
        return found
    stages, bound = search(problem, lattice, tables, upper=found.value, budget=budget)
    if stages is None:
        return replace(found, bound=min(max(bound, found.bound), found.value))
    return _solution(problem, objective, stages, max(bound, found.bound))


def _solve_uniform(problem: Problem, objective: Objective, order: Order, links: tuple[Array, Array]) -> Solution | None:
    """Solve with links that depend on the destination alone; exact in the orders of devices that are looked at."""
    plain = StageTables(problem, links)

    def tables(edge: Edges) -> Stages:
        return plain.stages(edge.devices[0])

    if order == "any":
        everywhere = AnyOrder(problem, plain, paired=False)
        if everywhere.possible:
            guess = everywhere.solve(objective)
            return _solution(problem, objective, *guess) if guess else None
    whole = make_lattice(problem, order)
    lattices = [whole] if whole is not None else [make_line(order) for order in likely_orders(problem.chain)]
    best: Solution | None = None
    for lattice in lattices:
        guess = best_stages(lattice, tables, problem.size, objective)
        found = _solution(problem, objective, *guess) if guess else None
        if found is not None and (best is None or found.value < best.value * (1 - 1e-12)):
            best = found
    if best is None or whole is not None:
        return best
    return replace(best, bound=min(best.value, _any_order_bound(problem.chain, objective)))


def likely_orders(chain: Chain) -> list[tuple[int, ...]]:
    """Orders to try where there are too many to try all: as given, the fastest first, the largest first."""
    devices = range(chain.num_devices)
    total = chain.seconds.sum(axis=1)
    orders = [
        tuple(devices),
        tuple(sorted(devices, key=lambda d: float(total[d]))),
        tuple(sorted(devices, key=lambda d: -float(chain.capacity_bytes[d]))),
    ]
    return list(dict.fromkeys(orders))


def _any_order_bound(chain: Chain, objective: Objective) -> float:
    """A bound for every order of devices and every cut: units may be split, copies are free."""
    held = np.asarray(chain.resident_bytes, float)
    capacity = np.maximum(np.asarray(chain.capacity_bytes, float), 0.0)
    if objective == "memory":
        return float(held.sum() / max(capacity.sum(), 1e-9))
    return relaxed_bound(chain.seconds, held, capacity, objective)


def _solve_long(problem: Problem, objective: Objective, order: Order, tables: LongTables) -> Solution | None:
    """Solve a chain without dense tables; exact but for gaps and links that it prices too high or too low."""
    kinds, devices = problem.kinds, tuple(range(problem.chain.num_devices))
    whole = order == "given" or count_nodes(kinds) <= MAX_LONG_NODES
    lattice = make_line(devices) if order == "given" or not whole else make_grid(kinds)
    seconds_limit, load_limit, bound = np.inf, 1.0, 0.0
    if objective != "latency":
        limits = least_limit(lattice, tables, load=objective == "memory")
        if limits is None:
            return None
        bound, enough = limits
        seconds_limit, load_limit = (enough, 1.0) if objective == "throughput" else (np.inf, enough)
    found = sweep_long(lattice, tables, seconds_limit, load_limit)
    if found is None:
        return None
    bound = found[0] if objective == "latency" else bound
    if not tables.exact or not whole:
        bound = _any_order_bound(problem.chain, objective)
    return _solution(problem, objective, found[1], bound)


def _solution(problem: Problem, objective: Objective, stages: list[tuple[int, int, int]], bound: float) -> Solution:
    assignment = problem.assignment(stages)
    cost = cost_of(problem.chain, assignment)
    value = value_of(cost, objective) if problem.chain.peaks is None or objective != "memory" else bound
    return Solution(assignment=assignment, cost=cost, value=value, bound=min(bound, value))


def make_lattice(problem: Problem, order: Order, *, paired: bool = False) -> Lattice | None:
    """Build the lattice for devices in the given order, or in any; None where searching it would take too long."""
    devices, kinds = problem.chain.num_devices, problem.kinds
    table = (problem.size + 1) ** 2
    if order == "given":
        edges = devices**3 / 6 if paired else devices
        return make_line(tuple(range(devices)), paired=paired) if edges * table < MAX_WORK else None
    nodes = count_nodes(kinds, paired=paired)
    if nodes > MAX_NODES or nodes * len(set(kinds)) / 2 * table > MAX_WORK:
        return None
    return make_grid(kinds, paired=paired)


def best_stages(
    lattice: Lattice, tables: Tables, size: int, objective: Objective
) -> tuple[list[tuple[int, int, int]], float] | None:
    """Find the stages of the best way through a lattice, and its value by the tables."""
    within, value = tables, None
    if objective != "latency":
        as_load = _changed(tables, lambda stages: _as_load(stages, objective))
        if not lattice.line:  # one order gives a limit, which leaves fewer stages to look at in all orders
            one = sweep(make_line(tuple(range(lattice.num_devices)), paired=lattice.paired), as_load, size, "max")
            if one is not None:
                limit = one.value[1]
                as_load = _changed(as_load, lambda stages: stages.limited(np.inf, limit))
        worst = sweep(lattice, as_load, size, "max")
        if worst is None:
            return None
        value = worst.value[1]
        limits = (value, np.inf) if objective == "throughput" else (np.inf, value)
        within = _changed(tables, lambda stages: stages.limited(*limits))
    found = sweep(lattice, within, size, "sum")
    if found is None:
        return None
    stages = trace(lattice, within, found)
    # the same devices in the same order, with the most even memory among equals
    line = make_line(tuple(device for _, _, device in stages), paired=lattice.paired)
    even = sweep(line, within, size, "both")
    if even is not None and even.value[0] <= found.value[0] * (1 + SLACK):
        stages = trace(line, within, even)
    return stages, found.value[0] if value is None else value


def _changed(tables: Tables, change: Callable[[Stages], Stages]) -> Tables:
    """The same tables, each changed once."""
    made: dict[int, tuple[Stages, Stages]] = {}

    def changed(edge: Edges) -> Stages:
        whole = tables(edge)
        if id(whole) not in made:
            if len(made) >= 512:
                made.clear()
            made[id(whole)] = whole, change(whole)
        return made[id(whole)][1]

    return changed


def _as_load(stages: Stages, objective: Objective) -> Stages:
    """Tables whose load is what the objective wants the largest of to be small."""
    load, idle = (stages.seconds, stages.idle_seconds) if objective == "throughput" else (stages.load, stages.idle_load)
    return Stages(stages.seconds, load, stages.idle_seconds, idle)

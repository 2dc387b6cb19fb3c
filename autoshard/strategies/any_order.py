"""Any order: the best stages with the devices in any order.

What a stage costs where links differ from pair to pair: every copy at the cheapest link into its device, and the excess
of what the node of the grid knows. A tensor made less than `short` units before the stage comes from the previous
device if that one's stage is not short; one made just before it always does; one made by unit 0, or by the first
`short` units if the first stage is not short, comes from the first; what the last unit makes for unit 0 goes back to
the first. For plans whose copies are all of this sort that is exact, for others a lower bound.
"""

from dataclasses import dataclass, replace

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.grid import NOTHING, Kept, all_orders, devices_by_kind, grid_nodes, one_order
from autoshard.strategies.lattice import Edges, Lattice, sweep, trace
from autoshard.strategies.least import least_sum, least_worst, memory_prices
from autoshard.strategies.paired import NO_DEVICE, excess, selected
from autoshard.strategies.problem import Problem, Rectangles, rectangles
from autoshard.strategies.stages import Stages, StageTables
from autoshard.strategies.windows import Costs, trace_windows

MAX_SHORT = 32
"""Longest gap between a tensor and its use that is followed back to the previous device."""
MAX_CELLS = 60_000_000
"""Most entries of all tables together (8 bytes each)."""
MAX_STATES = 1 << 25
"""Most nodes times units."""
MAX_STAGES = 2.5e8
"""Most stages that are looked at (some 10 ns each) where short ones count apart; without them it is much less."""
Found = tuple[list[tuple[int, int, int]], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plain:
    """Tables of one device of every kind: [K, m+1, m+1], and [K] for a device without a stage."""

    seconds: Array
    load: Array
    idle_seconds: Array
    idle_load: Array

    def within(self, worst: Array, idle: Array, limit: float) -> "Plain":
        """Leave out what exceeds a limit on the figure `worst`."""
        keep, may_idle = worst <= limit, idle <= limit
        return Plain(
            seconds=np.where(keep, self.seconds, np.inf), load=np.where(keep, self.load, np.inf),
            idle_seconds=np.where(may_idle, self.idle_seconds, np.inf),
            idle_load=np.where(may_idle, self.idle_load, np.inf),
        )  # fmt: skip


class AnyOrder:
    """The search over all orders of the devices of one problem; `possible` says whether it is small enough."""

    def __init__(self, problem: Problem, tables: StageTables, *, paired: bool, only_long: bool = False) -> None:
        """`paired`: links differ from pair to pair. `only_long`: no short stages, so that all near copies are known."""
        self.problem, self.tables, self.only_long = problem, tables, only_long
        self.members = devices_by_kind(problem.kinds)
        self.paired = paired and len(self.members) > 1
        self.short = _longest_gap(problem) if self.paired else 0
        self.lengths = 2 if self.short and not only_long and self._is_possible(2) else 1
        self.short = self.short if self.lengths == 2 or only_long else 0
        self.possible = self._is_possible(self.lengths)

    def _is_possible(self, lengths: int) -> bool:
        kinds, width = len(self.members), self.problem.size + 1
        tables = (2 * kinds * lengths + 3) * kinds if self.paired else 3 * kinds
        nodes = grid_nodes(self.problem.kinds, Kept(ends=self.paired, lengths=lengths, promise=self.paired))
        return tables * width**2 <= MAX_CELLS and nodes * width <= MAX_STATES

    def solve(self, objective: str) -> Found | None:
        """Return the best stages and their value, exact or a lower bound (see above); None if there is no plan.

        Raises `TooWideError` with a lower bound where that would take too long.
        """
        plain, kinds = self._plain(), self.problem.kinds
        value, each = None, np.inf
        if objective == "memory":
            costs = Costs(start=plain.load[:, 0], near=plain.load, far=None, idle=plain.idle_load)
            value = least_worst(all_orders(kinds), [], costs, plain.load, self._even_share(objective))
            if value is None:
                return None
            plain = plain.within(plain.load, plain.idle_load, value)
        costs, promise = self._costs(plain, busy=objective == "throughput")
        kept = Kept(ends=self.paired, lengths=self.lengths, promise=promise) if self.paired else NOTHING
        grid = all_orders(kinds, kept)
        orders = tuple(range(len(kinds))), tuple(np.argsort(self.problem.seconds.sum(axis=1), kind="stable").tolist())
        lines = [one_order(kinds, order, kept) for order in dict.fromkeys(orders)]
        if objective == "throughput":
            value = least_worst(grid, lines, costs, plain.seconds, self._even_share(objective))
            if value is None:
                return None
            each = value * (1 + 1e-12)
            plain = plain.within(plain.seconds, plain.idle_seconds, each)
            costs = replace(costs, idle=plain.idle_seconds)
        most = MAX_STAGES if self.lengths == 2 and objective == "latency" else np.inf
        found = least_sum(grid, lines, costs, plain.seconds, self._prices(plain), each, most)
        if found is None:
            return None
        seconds, total, end = found
        stages = trace_windows(grid, costs, total, end, each)
        return self._evened(stages, seconds, costs, plain, each), seconds if value is None else value

    def _even_share(self, objective: str) -> float:
        """Return about what every device has if the units could be split: where to begin looking for a limit."""
        problem = self.problem
        if objective == "memory":
            return float(problem.resident.sum()) / max(float(np.sum(problem.chain.capacity_bytes)), 1e-9)
        return 1 / float((1 / np.maximum(problem.seconds.sum(axis=1), 1e-30)).sum())

    def _plain(self) -> Plain:
        made = [self.tables.stages(of[0]) for of in self.members]
        brief = ~np.tri(self.problem.size + 1, k=-self.short, dtype=bool).T if self.only_long else False
        return Plain(
            seconds=np.stack([np.where(brief, np.inf, stages.seconds) for stages in made]),
            load=np.stack([np.where(brief, np.inf, stages.load) for stages in made]),
            idle_seconds=np.array([stages.idle_seconds for stages in made]),
            idle_load=np.array([stages.idle_load for stages in made]),
        )  # fmt: skip

    def _prices(self, plain: Plain) -> tuple[Array, Array]:
        problem = self.problem
        most = np.where(np.isfinite(plain.seconds), self.tables.resident, 0.0).max(axis=(1, 2))
        seconds = problem.seconds[[of[0] for of in self.members]]
        return memory_prices(seconds, problem.resident, most, np.array([len(of) for of in self.members]))

    def _costs(self, plain: Plain, *, busy: bool) -> tuple[Costs, bool]:
        """Seconds of all stages, and whether the first pays for what the promised last device sends (with `busy`)."""
        start, idle = plain.seconds[:, 0], plain.idle_seconds
        if not self.paired:
            return Costs(start=start, near=plain.seconds, far=None, idle=idle), False
        problem, kinds, size = self.problem, len(self.members), self.problem.size
        near_by, far_by, returned = self._copies()
        near = np.tile(plain.seconds, (kinds * self.lengths, 1, 1))
        far = np.zeros((kinds * self.lengths * kinds, size + 1, size + 1))
        homeward = np.zeros((kinds, kinds))  # [last, first]
        for other, of in enumerate(self.members):
            for kind, devices in enumerate(self.members):
                device = devices[-1]
                if other == kind and len(devices) == 1:
                    continue
                more, per_byte = excess(problem, self.tables, of[0], device)
                if not problem.pinned[device] and (more or per_byte):
                    for table, copies in ((near, near_by), (far, far_by)):
                        for length, (count, moved) in enumerate(copies):
                            table[(other * self.lengths + length) * kinds + kind] += more * count + per_byte * moved
                if not problem.pinned[of[0]]:
                    more, per_byte = excess(problem, self.tables, device, of[0])
                    homeward[kind, other] = more * returned[0] + per_byte * returned[1]
        promise = busy and bool(homeward.any())
        if promise:
            paying = np.where(np.arange(size + 1) < size, homeward[:, :, None], 0.0)
            start = (start + paying).reshape(kinds * kinds, size + 1)
        elif not busy:
            by_first = far.reshape(kinds, self.lengths, kinds, size + 1, size + 1)
            by_first[..., 1:, -1] += homeward.T[:, None, :, None]
        return Costs(start=start, near=near, far=far, idle=idle, short=self.short), promise

    def _copies(self) -> tuple[list[list[Array]], list[list[Array]], list[float]]:
        """Tables of the copies, and the bytes copied, that come from the previous device, and from the first.

        Of each the first of two is for a stage that is not short. Then the figures of what goes back to the first.
        """
        problem, size = self.problem, self.problem.size
        weights = problem.copies, problem.copies * problem.nbytes
        found = rectangles(problem, NO_DEVICE)
        source = problem.source[found.x]
        after = (source >= 0) & (found.i_low > source)
        lasting = after & (found.j_high == size)

        def tables(part: Rectangles) -> list[Array]:
            return [part.table(weight, size) for weight in weights]

        close = selected(found, after, np.minimum(found.i_high, np.where(source == 0, 1, source + max(self.short, 1))))
        next_to = selected(found, after, np.minimum(found.i_high, source + 1))
        # what `close` leaves of the tensors that a first stage of at least `short` units makes, and of those of unit 0
        begun = lasting & (source < max(self.short, 1))
        far = selected(found, begun, found.i_high, minimum=np.where(source == 0, 2, source + self.short + 1))
        from_unit_0 = selected(found, lasting & (source == 0), found.i_high, minimum=2)
        near_by = [tables(part) for part in (close, next_to)[: self.lengths]]
        far_by = [tables(part) for part in (far, from_unit_0)[: self.lengths]]
        back = np.zeros(len(problem.source), bool)
        back[problem.edge_x[problem.edge_at == 0]] = True
        back &= problem.source == size - 1
        return near_by, far_by, [float(weight[back].sum()) for weight in weights]

    def _evened(
        self, stages: list[tuple[int, int, int]], seconds: float, costs: Costs, plain: Plain, each: float
    ) -> list[tuple[int, int, int]]:
        """Move the cuts to the most even memory among equals, with the same devices in the same order."""
        if len(stages) < 2 or any(stop - start < costs.short for start, stop, _ in stages):
            return stages
        of_kind, kinds = self.problem.kinds, len(self.members)
        first, last = of_kind[stages[0][2]], of_kind[stages[-1][2]]
        start = costs.start[(last * kinds if len(costs.start) > kinds else 0) + first]
        made: dict[tuple[int, int], Stages] = {}
        tables: list[Stages] = []
        for k, (_, _, device) in enumerate(stages):
            kind = of_kind[device]
            before = of_kind[stages[k - 1][2]] * self.lengths if k and self.paired else 0
            if (before, kind) not in made or k < 2:
                table = costs.near[before * kinds + kind]
                if costs.far is not None:
                    table = table + costs.far[first * self.lengths * kinds + kind]
                if not k:
                    table = np.concatenate([start[None], np.full_like(table[1:], np.inf)])
                keep = (table <= each) & np.isfinite(plain.load[kind])
                keep &= ~np.tri(len(keep), k=costs.short - 1, dtype=bool).T if costs.short else True
                load = np.where(keep, plain.load[kind], np.inf)
                made[before, kind] = Stages(np.where(keep, table, np.inf), load, 0.0, 0.0)
            tables.append(made[before, kind])
        one = np.zeros(1, int)
        steps = tuple((Edges(one, one, (device,), first=k),) for k, (_, _, device) in enumerate(stages))
        line = Lattice((1,) * (len(stages) + 1), steps, True, False)
        even = sweep(line, lambda edge: tables[edge.first], self.problem.size, "both")
        if even is None or even.value[0] > seconds * (1 + 1e-12):
            return stages
        return trace(line, lambda edge: tables[edge.first], even)


def _longest_gap(problem: Problem) -> int:
    """Units between a tensor and its last use, where copies of it may cross a cut and are not already known."""
    found = rectangles(problem, NO_DEVICE)
    source = problem.source[found.x]
    inner = (source >= 1) & (found.i_low > source) & (problem.copies[found.x] > 0)
    gaps = (found.i_high - source)[inner]
    return int(np.minimum(gaps, MAX_SHORT).max()) if (gaps > 1).any() else 0

"""Where to cut a line of units into the stages of a pipeline, for one number of micro-batches and one schedule.

    units      [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]      cuts (0, 3, 5, 7)
    stages     └─ 0 ─────┘└─ 1 ──┘└─ 2 ──┘        stage i is on position i mod p, which has a device

With t the seconds of a stage for one micro-batch, its copies included, T of a pass lies between two figures:

    max(F, m L) <= T          F = sum of t over stages, L = the largest t
    T = F + (m - 1) L         forwards only, exactly

so for every limit on L the partition with the least F is found by dynamic programming, and those that come out are run
by the clock; a few steps of moving single cuts follow. Few partitions are all tried. What a stage keeps depends on its
position, so every stage has its own limit of memory; where it does not fit it computes activations again, if that
fits.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, pairwise, permutations
from math import comb

import numpy as np

from autoshard.schedules.orders import Order, in_flight, make_order
from autoshard.schedules.simulate import Times, simulate

Array = np.ndarray
MAX_ALL = 120
"""Partitions (times orders of devices) up to which all are run by the clock."""
MAX_LIMITS = 12
"""Limits on the slowest stage that are tried otherwise."""
MAX_ORDERS = 24
"""Orders of unequal devices that are tried."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """n units in the order in which they run, on D devices, for one of `microbatches` micro-batches.

    Attributes:
        forward, backward, weight: [D, n] seconds of a unit on a device; `weight` is the part of `backward` for
            gradients of parameters.
        static: [n] bytes that are there all the time. kept: [n] from a forward to its backward. transient: [n] more
            while the unit runs.
        kept_again: [n] bytes that are kept where activations are computed again; again: [n] what that takes meanwhile.
        lasting: [n] bytes per micro-batch that stay to the end of the pass.
        sends, returns: [n + 1] tensors and their bytes, [2, n + 1], that go over a cut before each unit, and back.
        cuts: [n + 1] whether there may be a cut before each unit; the first and the last are.
        capacity: [D] bytes. latency, bandwidth: [D, D] of copies from row to column.
        training: there is a backward.
    """

    microbatches: int
    forward: Array
    backward: Array
    weight: Array
    static: Array
    kept: Array
    transient: Array
    kept_again: Array
    again: Array
    lasting: Array
    sends: Array
    returns: Array
    cuts: Array
    capacity: Array
    latency: Array
    bandwidth: Array
    training: bool

    @property
    def num_units(self) -> int:
        return len(self.static)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """[D] the first device that is like each one in speed, memory and links."""
        rows = []
        for d in range(len(self.capacity)):
            links = np.delete(self.latency[d], d), np.delete(self.latency[:, d], d)
            widths = np.delete(self.bandwidth[d], d), np.delete(self.bandwidth[:, d], d)
            own = (self.forward[d], self.backward[d], self.weight[d], self.capacity[d : d + 1], *links, *widths)
            rows.append(b"".join(np.ascontiguousarray(part, np.float64).tobytes() for part in own))
        return tuple(rows.index(row) for row in rows)

    @cached_property
    def totals(self) -> dict[str, Array]:
        """Sums up to each unit of everything that adds up."""
        names = ("forward", "backward", "weight", "static", "kept", "kept_again", "lasting")
        return {name: _prefix(getattr(self, name)) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A partition: `cuts` [stages + 1], the device of every position, which stages compute again, seconds of a pass."""

    cuts: tuple[int, ...]
    devices: tuple[int, ...]
    recompute: tuple[bool, ...]
    seconds: float
    load: float


class Search:
    """The partitions of one line into `positions` x `per_device` stages under one schedule.

    Attributes:
        keep: [stages] micro-batches of which each stage keeps activations at one time.
        bound: no partition can be faster.
    """

    def __init__(
        self, line: Line, schedule: str, positions: int, per_device: int = 1, *, may_recompute: bool = True
    ) -> None:
        self.line, self.schedule, self.positions = line, schedule, positions
        self.order: Order = make_order(
            schedule, positions, line.microbatches, stages_per_device=per_device, training=line.training
        )
        self.count = positions * per_device
        flying = in_flight(self.order)
        self.keep = [flying[stage] if line.training else 0 for stage in range(self.count)]
        self.may_recompute = may_recompute and line.training and schedule != "zero-bubble"
        self._simulated: dict[tuple, float] = {}

    # ---- one partition

    def times(self, cuts: Sequence[int], devices: Sequence[int], recompute: Sequence[bool]) -> Times:
        """Seconds of its stages and copies."""
        line, totals = self.line, self.line.totals
        forward, backward, weight, sends, returns = [], [], [], [], []
        for stage in range(self.count):
            low, high, device = cuts[stage], cuts[stage + 1], devices[stage % self.positions]
            forward.append(float(totals["forward"][device, high] - totals["forward"][device, low]))
            back = float(totals["backward"][device, high] - totals["backward"][device, low])
            back += forward[-1] if recompute[stage] else 0.0
            backward.append(back)
            own = float(totals["weight"][device, high] - totals["weight"][device, low])
            weight.append(back if stage == 0 else own)
            if stage + 1 < self.count:
                following = devices[(stage + 1) % self.positions]
                sends.append(self._over(line.sends[:, high], device, following))
                returns.append(self._over(line.returns[:, high], following, device))
        return Times(forward=forward, backward=backward, weight=weight, sends=sends, returns=returns)

    def _over(self, what: Array, source: int, destination: int) -> float:
        if source == destination:
            return 0.0
        return float(what[0] * self.line.latency[source, destination]
                     + what[1] / self.line.bandwidth[source, destination])  # fmt: skip

    def memory(self, cuts: Sequence[int], devices: Sequence[int], recompute: Sequence[bool]) -> float:
        """The largest part of a device's capacity that is in use."""
        held, more = [0.0] * self.positions, [0.0] * self.positions
        for stage in range(self.count):
            at = stage % self.positions
            fixed, transient = self._bytes(cuts[stage], cuts[stage + 1], stage, recompute[stage])
            held[at], more[at] = held[at] + fixed, max(more[at], transient)
        loads = [
            (held[at] + more[at]) / max(float(self.line.capacity[devices[at]]), 1e-9) for at in range(self.positions)
        ]
        return max(loads)

    def _bytes(self, low: int, high: int, stage: int, recompute: bool) -> tuple[float, float]:
        totals, line, m = self.line.totals, self.line, self.line.microbatches
        kept = totals["kept_again" if recompute else "kept"]
        came = float(line.sends[1, low]) if low else 0.0
        fixed = totals["static"][high] - totals["static"][low] + m * (totals["lasting"][high] - totals["lasting"][low])
        fixed += self.keep[stage] * (kept[high] - kept[low] + came * (not recompute))
        transient = line.transient[low:high].max(initial=0.0) + came * (not line.training)
        return float(fixed), float(transient + (line.again[low:high].max(initial=0.0) if recompute else 0.0))

    def run(self, cuts: Sequence[int], devices: Sequence[int]) -> Found | None:
        """Run a partition by the clock; None if it fits in no way."""
        recompute = self._recompute(cuts, devices)
        if recompute is None:
            return None
        key = (tuple(cuts), tuple(self.line.kinds[d] for d in devices), recompute)
        if key not in self._simulated:
            self._simulated[key] = simulate(self.order, self.times(cuts, devices, recompute)).seconds
        return Found(
            cuts=tuple(cuts), devices=tuple(devices), recompute=recompute, seconds=self._simulated[key],
            load=self.memory(cuts, devices, recompute),
        )  # fmt: skip

    def _recompute(self, cuts: Sequence[int], devices: Sequence[int]) -> tuple[bool, ...] | None:
        """Which stages compute again: where one position has one stage, those that don't fit; else all or none."""
        ways = [(False,) * self.count, (True,) * self.count] if self.may_recompute else [(False,) * self.count]
        if self.count == self.positions and self.may_recompute:
            ways.insert(1, tuple(
                sum(self._bytes(cuts[s], cuts[s + 1], s, False)) > self.line.capacity[devices[s]]
                for s in range(self.count)
            ))  # fmt: skip
        return next((way for way in ways if self.memory(cuts, devices, way) <= 1.0), None)

    # ---- all of them

    def orders(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """Orders of so many devices as there are positions, those that differ: the given one first."""
        kinds = [self.line.kinds[d] for d in devices]
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        if len(set(kinds)) == 1:
            return [tuple(devices[: self.positions])]
        given = tuple(devices[: self.positions])
        found[tuple(self.line.kinds[d] for d in given)] = given
        speed = {d: float(self.line.forward[d].sum()) for d in devices}
        heuristics = [sorted(devices, key=lambda d: (speed[d], d)), sorted(devices, key=lambda d: (-speed[d], d)),
                      sorted(devices, key=lambda d: (-self.line.capacity[d], speed[d], d))]  # fmt: skip
        several: Iterator[Sequence[int]] = iter(heuristics)
        if len(devices) <= 6:
            several = permutations(devices, self.positions)
        for order in several:
            picked = tuple(order[: self.positions])
            found.setdefault(tuple(self.line.kinds[d] for d in picked), picked)
            if len(found) >= MAX_ORDERS and len(devices) > 4:
                break
        return list(found.values())

    def bound(self, devices: Sequence[int]) -> float:
        """Seconds that no partition goes below: one micro-batch through all stages, or the busiest device."""
        line, m = self.line, self.line.microbatches
        whole = (line.forward + line.backward)[list(devices)]
        fastest = whole.min(axis=0)
        # seconds of all units on one device are its speed; together devices do at most the sum of their shares
        totals = whole.sum(axis=1)
        related = np.allclose(whole * totals.min(), whole.min(axis=0) * totals[:, None], rtol=1e-6)
        rate = np.sort(1 / np.maximum(totals, 1e-30))[::-1][: self.positions].sum()
        shared = 1 / rate if related else float(fastest.sum()) / self.positions
        return max(float(fastest.sum()), m * max(float(fastest.max(initial=0.0)), shared))

    def best(self, devices: Sequence[int], better: Callable[[Found], float]) -> Found | None:
        """Find the partition with the least figure `better`, over the orders of the devices."""
        inner = np.flatnonzero(self.line.cuts[1:-1]) + 1
        if len(inner) < self.count - 1:
            return None
        orders = self.orders(devices)
        if comb(len(inner), self.count - 1) * len(orders) <= MAX_ALL:
            every = ((0, *cuts, self.line.num_units) for cuts in combinations(inner.tolist(), self.count - 1))
            tried = [self.run(cuts, order) for cuts in every for order in orders]
        else:
            tried = [self.run(cuts, order) for order in orders for cuts in self._sweep(order)]
        found = sorted((one for one in tried if one is not None), key=lambda one: (better(one), one.cuts, one.devices))
        if not found:
            return None
        return min((self._improved(one, better) for one in found[:2]), key=lambda one: (better(one), one.cuts))

    def _improved(self, found: Found, better: Callable[[Found], float]) -> Found:
        """Move single cuts as long as it helps."""
        allowed = np.flatnonzero(self.line.cuts).tolist()
        place = {cut: i for i, cut in enumerate(allowed)}
        for _ in range(4):
            best = found
            for stage in range(1, self.count):
                for step in (-1, 1):
                    cut = allowed[place[found.cuts[stage]] + step]
                    if found.cuts[stage - 1] < cut < found.cuts[stage + 1]:
                        moved = self.run((*found.cuts[:stage], cut, *found.cuts[stage + 1 :]), found.devices)
                        if moved is not None and better(moved) < better(best) * (1 - 1e-12):
                            best = moved
            if best is found:
                break
            found = best
        return found

    # ---- limits on the slowest stage

    def _sweep(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """Partitions with the least F for limits on L, from the least L that there is."""
        at = np.flatnonzero(self.line.cuts)
        tables = [self._table(stage, order, at) for stage in range(self.count)]
        least = self._solve(tables, at, np.inf, np.maximum)
        if least is None:
            return []
        found = {least[1]: None}
        slowest = least[0]
        every = np.unique(np.concatenate([table[np.isfinite(table)] for table in tables]))
        limits = every[every >= slowest * (1 - 1e-12)]
        if len(limits) > MAX_LIMITS:
            steps = slowest * np.array([1.0, 1.005, 1.01, 1.02, 1.04, 1.07, 1.1, 1.15, 1.25, 1.5, 2.0])
            limits = np.unique([*limits[np.searchsorted(limits, steps[steps <= limits[-1]])], limits[-1]])
        for limit in limits:
            cheapest = self._solve(tables, at, float(limit), np.add)
            if cheapest is not None:
                found[cheapest[1]] = None
        return list(found)

    def _table(self, stage: int, order: Sequence[int], at: Array) -> Array:
        """[c, c] seconds of a stage from one cut to another, incoming copies included; inf where it does not fit."""
        line, totals, device = self.line, self.line.totals, order[stage % self.positions]
        before = order[(stage - 1) % self.positions]

        def between(sums: Array) -> Array:
            return sums[at][None, :] - sums[at][:, None]

        valid = at[:, None] < at[None, :]
        forward = between(totals["forward"][device])
        seconds = forward + between(totals["backward"][device])
        if stage and before != device:
            for what, ends in ((line.sends, (before, device)), (line.returns, (device, before))):
                over = what[0] * line.latency[ends] + what[1] / line.bandwidth[ends]
                seconds = seconds + over[at][:, None]
        transient = _largest_between(line.transient, at)
        came = np.where(at > 0, line.sends[1][at], 0.0)[:, None]
        fixed = between(totals["static"]) + line.microbatches * between(totals["lasting"])
        room = float(line.capacity[device])  # of several stages on a device the sum is looked at when they are run
        plain = fixed + self.keep[stage] * (between(totals["kept"]) + came) + transient + came * (not line.training)
        again = fixed + self.keep[stage] * between(totals["kept_again"]) + transient
        again = again + _largest_between(line.again, at)
        fits = plain <= room
        table = np.where(fits, seconds, np.inf)
        if self.may_recompute:
            table = np.where(~fits & (again <= room), seconds + forward, table)
        return np.where(valid, table, np.inf)

    def _solve(
        self, tables: Sequence[Array], at: Array, limit: float, join: Callable[..., Array]
    ) -> tuple[float, tuple[int, ...]] | None:
        """The partition with the least sum, or maximum, of stages that all stay within a limit."""
        best = np.full(len(at), np.inf)
        best[0] = 0.0
        came_from = []
        for table in tables:
            value = join(best[:, None], np.where(table <= limit, table, np.inf))
            came_from.append(value.argmin(axis=0))
            best = value.min(axis=0)
        if not np.isfinite(best[-1]):
            return None
        cuts, end = [len(at) - 1], len(at) - 1
        for previous in reversed(came_from):
            end = int(previous[end])
            cuts.append(end)
        return float(best[-1]), tuple(int(at[cut]) for cut in reversed(cuts))


def _prefix(values: Array) -> Array:
    zero = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zero, np.cumsum(values, axis=-1)], axis=-1)


def _largest_between(values: Array, at: Array) -> Array:
    """[c, c] the largest of the values from one cut to another."""
    pieces = np.array([values[low:high].max(initial=0.0) for low, high in pairwise(at)])
    found = np.zeros((len(at), len(at)))
    for row in range(len(pieces)):
        found[row, row + 1 :] = np.maximum.accumulate(pieces[row:])
    return found


def with_capacity(line: Line, capacity: Array) -> Line:
    """The same line on devices with other memory."""
    return replace(line, capacity=capacity)

"""Where to cut a line of pieces into the stages of a pipeline, for one number of micro-batches and one schedule.

    pieces     [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]      cuts (0, 3, 5, 7)
    stages     └─ 0 ─────┘└─ 1 ──┘└─ 2 ──┘        stage i is on position i mod p, which has a device

With t the seconds of a stage for one micro-batch, its copies included, T of a pass lies between two figures:

    max(F, m L) <= T          F = sum of t over stages, L = the largest t
    T = F + (m - 1) L         forwards only, exactly

so for every limit on L the partition with the least F is found by dynamic programming, and those that come out are run
by the clock; a few rounds of moving single cuts follow. Few partitions are all tried. What a stage keeps depends on its
position, so every stage has its own limit of memory; where it does not fit it computes activations again, if that
fits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import combinations, pairwise, permutations
from math import comb

import numpy as np

from autoshard.schedules.fast import Program, compile_order, makespan
from autoshard.schedules.orders import check_schedule, in_flight, make_order
from autoshard.schedules.simulate import Times
from autoshard.strategies.stage_line import Array, Line
from autoshard.strategies.stage_tables import StageTables, over_link

MAX_ALL = 300
"""Partitions times orders of devices up to which all are run by the clock."""
MAX_ORDERS = 24
"""Orders of unequal devices that are tried."""
_ROUNDS = 6
"""Rounds of moving single cuts; 2 for schedules of many actions, where each takes long."""
_MANY_ACTIONS = 2_000
_AS_EMPTY = 1.002
"""Where memory is the objective, stages compute again if they hold less by more than this factor."""
_FEW = 6
"""Pipelines up to which a schedule is run for one after the other, and not for all at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A partition: `cuts` [stages + 1] in pieces, the device of every position, which stages compute again.

    `seconds` of a pass; `device_seconds`: were launches free; `load`: the largest part of a device's memory in use.
    """

    cuts: tuple[int, ...]
    devices: tuple[int, ...]
    recompute: tuple[bool, ...]
    seconds: float
    load: float
    device_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Many:
    """K partitions as arrays: cuts [K, stages + 1], the device of every stage [K, stages], who computes again."""

    cuts: Array
    devices: Array
    recompute: Array


class Search:
    """The partitions of one line into `positions` x `per_device` stages under one schedule.

    `figure` is minimised: "seconds" of a pass, those of the "busiest" device with what it is sent, where passes
    overlap, or the "load" of the fullest.
    """

    def __init__(
        self, line: Line, schedule: str, positions: int, per_device: int = 1, *, figure: str = "seconds",
        may_recompute: bool = True,
    ) -> None:  # fmt: skip
        self.line, self.positions, self.figure = line, positions, figure
        self.count = positions * per_device
        check_schedule(
            schedule, positions, line.microbatches, stages_per_device=per_device, training=line.training
        )  # fmt: skip
        self._ordered = schedule, positions, line.microbatches, per_device, line.training, line.one_process
        self.splits = schedule == "zero-bubble"
        self.may_recompute = may_recompute and line.training and not self.splits
        self._known: dict[tuple, Found | None] = {}

    @property
    def program(self) -> Program:
        """The steps of the schedule; made when first needed, and once for all lines."""
        return _program(*self._ordered)[0]

    @property
    def _is_long(self) -> bool:
        return len(self.program.steps) > _MANY_ACTIONS

    @property
    def keep(self) -> Sequence[int]:
        """Per stage, the micro-batches whose activations it keeps at one time; none in inference."""
        return _program(*self._ordered)[1]

    @cached_property
    def tables(self) -> StageTables:
        """What every stage of this line takes."""
        return StageTables(
            self.line, self.positions, self.keep, load=self.figure == "load", may_recompute=self.may_recompute
        )

    # ---- partitions, run by the clock

    def run(self, partitions: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Found]:
        """Run (cuts, device of every position) by the clock, all at once; those that fit."""
        kinds = self.line.kinds
        keys = [(cuts, tuple(kinds[d] for d in devices)) for cuts, devices in partitions]
        new = {key: at for at, key in enumerate(keys) if key not in self._known}
        if new:
            self._known.update(dict.fromkeys(new))
            for found in self._run([partitions[at] for at in new.values()]):
                self._known[found.cuts, tuple(kinds[d] for d in found.devices)] = found
        found_ones = [self._known[key] for key in keys]
        return [one for one in found_ones if one is not None]

    def _run(self, partitions: Sequence[tuple[tuple[int, ...], tuple[int, ...]]]) -> list[Found]:
        cuts = np.array([one for one, _ in partitions])
        devices = np.array([order for _, order in partitions])[:, np.arange(self.count) % self.positions]
        plain = Many(cuts, devices, np.zeros((len(cuts), self.count), bool))
        load = self._loads(plain)
        recompute = plain.recompute
        if self.may_recompute:
            ways = [np.ones_like(recompute)]
            if self.count == self.positions:  # those that do not fit, or hold less
                alone = self._stage_bytes(plain)
                less = alone > self.line.capacity[devices]  # the step takes the same in any way
                if self.figure == "load":
                    less = alone > self._stage_bytes(replace(plain, recompute=ways[0])) * _AS_EMPTY
                ways.insert(0, less)
            for way in ways:
                other = self._loads(Many(cuts, devices, way))
                better = (load > 1) & ((other <= 1) | (other < load))
                if self.figure == "load":
                    better |= other * _AS_EMPTY < load
                recompute = np.where(better[:, None], way, recompute)
                load = np.where(better, other, load)
        fits = np.flatnonzero(load <= 1)
        if not len(fits):
            return []
        many = Many(cuts[fits], devices[fits], recompute[fits])
        alone = self._seconds(self._times(many), len(fits), self._after(many))
        seconds = np.maximum(alone, self.line.issue_seconds)
        return [
            Found(
                cuts=tuple(cuts[at].tolist()), devices=tuple(devices[at, : self.positions].tolist()),
                recompute=tuple(recompute[at].tolist()), seconds=float(seconds[i]), load=float(load[at]),
                device_seconds=float(alone[i]),
            )
            for i, at in enumerate(fits.tolist())
        ]  # fmt: skip

    def _after(self, many: Many) -> list[Array]:
        """Per position [K] seconds of the optimizer's step."""
        if self.line.after is None:
            return []
        own = [np.zeros(len(many.cuts)) for _ in range(self.positions)]
        for stage in range(self.count):
            own[stage % self.positions] += self._between("after", many, stage)
        return own

    def _seconds(self, times: Times, count: int, after: Sequence[Array]) -> Array:
        """[K] seconds of pipelines; few are faster one by one, with plain numbers."""
        if count > _FEW:
            return makespan(self.program, times, after)
        names = ("forward", "backward", "weight", "sends", "returns")
        rows = {name: np.array(getattr(times, name)).T.tolist() or [[]] * count for name in names}
        ends = [[float(own[k]) for own in after] for k in range(count)]
        return np.array(
            [makespan(self.program, Times(**{name: rows[name][k] for name in names}), ends[k]) for k in range(count)]
        )

    def _between(self, name: str, many: Many, stage: int) -> Array:
        """[K] sum over the pieces of a stage."""
        table, low, high = self.line.totals[name], many.cuts[:, stage], many.cuts[:, stage + 1]
        if table.ndim == 1:
            return table[high] - table[low]
        device = many.devices[:, stage]
        return table[device, high] - table[device, low]

    def _times(self, many: Many) -> Times:
        """Seconds of stages and copies, [K] each."""
        line = self.line
        forward, backward, weight, sends, returns = [], [], [], [], []
        for stage in range(self.count):
            forward.append(self._between("forward", many, stage))
            back = self._between("backward", many, stage)
            backward.append(back + np.where(many.recompute[:, stage], forward[-1], 0.0))
            weight.append(backward[-1] if stage == 0 else self._between("weight", many, stage))
            if stage + 1 < self.count:
                ends, cut = (many.devices[:, stage], many.devices[:, stage + 1]), many.cuts[:, stage + 1]
                sends.append(over_link(line, line.sends[:, cut], *ends))
                returns.append(over_link(line, line.returns[:, cut], *reversed(ends)))
        return Times(forward=forward, backward=backward, weight=weight, sends=sends, returns=returns)

    def _fixed_and_passing(self, many: Many, stage: int) -> tuple[Array, Array]:
        """[K] bytes that a stage keeps, and more while it runs."""
        line, low, high = self.line, many.cuts[:, stage], many.cuts[:, stage + 1]
        again = many.recompute[:, stage]
        came = line.sends[1][low] * (low > 0)
        all_kept = self._between("kept", many, stage)
        # In one process modules run again one by one, else the stage does as a whole, from what came in.
        kept_again = self._between("kept_again", many, stage) if line.one_process else came
        more = line.most("again", low, high) if line.one_process else all_kept
        kept = np.where(again, kept_again, all_kept + came)
        fixed = self._between("static", many, stage) + self.keep[stage] * kept
        fixed = fixed + line.microbatches * self._between("lasting", many, stage)
        passing = line.most("transient", low, high) + came * (not line.training)
        return fixed, passing + np.where(again, more, 0.0)

    def _stage_bytes(self, many: Many) -> Array:
        """[K, stages] bytes of every stage by itself."""
        return np.stack([sum(self._fixed_and_passing(many, stage)) for stage in range(self.count)], 1)

    def held(self, found: Found) -> Array:
        """[positions] bytes that each device holds at its peak."""
        devices = np.array([found.devices])[:, np.arange(self.count) % self.positions]
        return self._held(Many(np.array([found.cuts]), devices, np.array([found.recompute])))[:, 0]

    def _loads(self, many: Many) -> Array:
        """[K] the largest part of a device's capacity that is in use."""
        room = np.maximum(self.line.capacity[many.devices[:, : self.positions]].T, 1e-9)
        return (self._held(many) / room).max(axis=0)

    def _held(self, many: Many) -> Array:
        """[positions, K] bytes of every device at its peak."""
        held = np.zeros((self.positions, len(many.cuts)))
        passing, stepping = np.zeros_like(held), np.zeros_like(held)
        for stage in range(self.count):
            at = stage % self.positions
            fixed, more = self._fixed_and_passing(many, stage)
            held[at] += fixed
            passing[at] = np.maximum(passing[at], more)
            stepping[at] += self._between("stepping", many, stage)
        return np.maximum(held + passing, stepping)

    # ---- the search

    def value(self, found: Found) -> float:
        """The figure that is minimised."""
        if self.figure == "busiest":
            return self._busiest(found)
        return found.load if self.figure == "load" else found.seconds

    def _busiest(self, found: Found) -> float:
        """Seconds that the busiest device computes and is sent tensors, in all micro-batches."""
        line, own = self.line, [0.0] * self.positions
        for stage, (low, high) in enumerate(pairwise(found.cuts)):
            at = stage % self.positions
            device, before = found.devices[at], found.devices[(stage - 1) % self.positions]
            own[at] += float(line.totals["forward"][device, high] - line.totals["forward"][device, low])
            own[at] += float(over_link(line, line.sends[:, low], before, device)) if stage else 0.0
        return min(line.microbatches * max(own), found.seconds)

    @property
    def known(self) -> list[Found]:
        """All partitions that were run and fit."""
        return [found for found in self._known.values() if found is not None]

    def bound(self, devices: Sequence[int]) -> float:
        """What no partition goes below: the busiest device; and what stages that make up all pieces need in turn.

        The first micro-batch reaches stage s, and the last one leaves it, through all stages before it, so with one
        stage per device T >= t_0 + ... + t_(s-1) + m t_s. The least T for which stages can add up to F is then
        F / (1 - (1 - 1/m)^p). Where backward is split, forwards alone are sure to come one after the other.
        """
        line, m, p = self.line, self.line.microbatches, self.positions
        if self.figure == "load":
            return float(line.static.sum()) / max(float(np.sort(line.capacity)[-p:].sum()), 1e-9)
        whole = (line.forward + line.backward)[list(devices)]
        fastest, totals = whole.min(axis=0), np.maximum(whole.sum(axis=1), 1e-30)
        shared = float(fastest.sum()) / p
        if np.allclose(whole * totals.min(), fastest * totals[:, None], rtol=1e-9):
            # every device has its own speed at everything: together they do the sum of their speeds
            shared = max(shared, 1.0 / float(np.sort(1.0 / totals)[::-1][:p].sum()))
        busiest = m * max(float(fastest.max(initial=0.0)), shared)
        if self.figure == "busiest":
            return busiest
        passing = line.forward[list(devices)].min(axis=0) if self.splits else fastest
        through = float(passing.sum())
        if self.count == p:
            through /= 1 - (1 - 1 / m) ** p
        return max(busiest, through, line.issue_seconds)

    def quick(self, devices: Sequence[int]) -> Found | None:
        """Find a good partition: the best of all where they are few, else the most even one of each order."""
        if not self.line.may_fit(self.positions, self.count // self.positions, devices):
            return None
        return self._least(self.run(self._all(devices) or self._even(devices)))

    def best(self, devices: Sequence[int]) -> Found | None:
        """Find the best partition."""
        if not self.line.may_fit(self.positions, self.count // self.positions, devices):
            return None
        every = self._all(devices)
        if every or self.figure == "busiest":  # the most even partition is the best one
            return self._least(self.run(every or self._even(devices)))
        tried = self.run([(cuts, order) for order in self.orders(devices) for cuts in self.tables.sweep(order)])
        first = sorted(tried, key=self._rank)[: 1 if self._is_long else 2]
        return self._least([self._improved(one) for one in first])

    def _rank(self, found: Found) -> tuple:
        return self.value(found), found.device_seconds, found.cuts, found.devices

    def _least(self, found: Sequence[Found]) -> Found | None:
        return min(found, key=self._rank, default=None)

    def orders(self, devices: Sequence[int]) -> list[tuple[int, ...]]:
        """Orders of as many devices as there are positions, those that differ; the given one first."""
        kinds = self.line.kinds
        given = tuple(devices[: self.positions])
        if len({kinds[d] for d in devices}) == 1:
            return [given]
        speed = {d: float(self.line.forward[d].sum()) for d in devices}
        several = [
            given,
            *(sorted(devices, key=lambda d: (way * speed[d], d)) for way in (1, -1)),
            sorted(devices, key=lambda d: (-self.line.capacity[d], speed[d], d)),
            *(permutations(devices, self.positions) if len(devices) <= 6 else ()),
        ]
        found: dict[tuple[int, ...], tuple[int, ...]] = {}
        for order in several:
            picked = tuple(order[: self.positions])
            found.setdefault(tuple(kinds[d] for d in picked), picked)
        return list(found.values()) if len(devices) <= 4 else list(found.values())[:MAX_ORDERS]

    def _all(self, devices: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Every partition, if they are few."""
        inner, size = range(1, self.line.size), self.line.size
        if self.count > size or comb(size - 1, self.count - 1) > MAX_ALL:
            return []
        orders = self.orders(devices)
        if comb(size - 1, self.count - 1) * len(orders) > MAX_ALL:
            return []
        return [((0, *cuts, size), order) for cuts in combinations(inner, self.count - 1) for order in orders]

    def _even(self, devices: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Of every order the partition whose slowest (or fullest) stage is least."""
        found = [(self.tables.even(order), order) for order in self.orders(devices)]
        return [(cuts, order) for cuts, order in found if cuts is not None]

    def _improved(self, found: Found) -> Found:
        """Move single cuts as long as it helps."""
        for _ in range(2 if self._is_long else _ROUNDS):
            moved = []
            for stage in range(1, self.count):
                for step in (-2, -1, 1, 2):
                    cut = found.cuts[stage] + step
                    if found.cuts[stage - 1] < cut < found.cuts[stage + 1]:
                        moved.append(((*found.cuts[:stage], cut, *found.cuts[stage + 1 :]), found.devices))
            best = self._least(self.run(moved))
            if best is None or self.value(best) >= self.value(found) * (1 - 1e-12):
                break
            found = best
        return found


def figure_of(objective: str, training: bool) -> str:
    """What a search minimises for an objective; steps of training don't overlap."""
    if objective == "memory":
        return "load"
    return "busiest" if objective == "throughput" and not training else "seconds"


@lru_cache(maxsize=256)
def _program(
    schedule: str, positions: int, microbatches: int, per_device: int, training: bool, one_process: bool
) -> tuple[Program, list[int]]:
    """The steps of a schedule, and how many micro-batches every stage keeps at one time."""
    order = make_order(
        schedule, positions, microbatches,
        stages_per_device=per_device, training=training, one_process=one_process,
    )  # fmt: skip
    count = positions * per_device
    flying = in_flight(order) if training else dict.fromkeys(range(count), 0)
    return compile_order(order, count), [flying[stage] for stage in range(count)]

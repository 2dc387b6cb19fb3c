"""Where to cut a list of layers into the stages of a pipeline: one dynamic programme, for every mesh and schedule.

    layers     [ 0 | 1 | 2 | 3 | 4 | 5 | 6 ]      cuts (0, 3, 5, 7)
    stages     └─ 0 ─────┘└─ 1 ──┘└─ 2 ──┘        stage i is on position i mod p

The slowest stage (or the fullest device) is made as small as can be; among partitions whose slowest stage is not much
slower those with the least sum are looked at, too. What a stage keeps depends on its position, so every stage has its
own limit of memory; where it does not fit it recomputes its activations, if that fits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import combinations, pairwise
from math import comb

import numpy as np

from autoshard.schedules.orders import Order, in_flight, make_order
from autoshard.schedules.simulate import Times, simulate

Array = np.ndarray
_ALL = 64
"""Partitions up to which all are looked at."""
_LIMITS = (1.0, 1.05, 1.2, 1.6)
"""Limits on the slowest stage, in parts of the least, under which the sum of stages is made least."""
_ROUNDS = 4
"""Rounds of moving single cuts where several stages share a device."""
_AS_EMPTY = 1.002
"""Where memory is the objective, stages recompute if they hold less by more than this factor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Line:
    """n layers in the order in which they run, on D positions, for one of `microbatches` micro-batches.

    Attributes:
        begins: [n + 1] the first unit of every layer, and the number of units.
        forward, backward, weight: [D, n] seconds of a layer; `weight` is the part of `backward` for gradients of
            parameters. after: [D, n] seconds when all micro-batches are done: sum over replicas, optimizer step.
        static: [n] bytes that are there all the time; trained: the part of it in parameters that get a gradient; step:
            what the optimizer's step takes beside it. kept: [n] saved activations; transient: [n] more while it runs.
        kept_again: [n] saved where modules are recomputed one by one, which is how it is in one process; again: [n]
            what that takes meanwhile. lasting: [n] outputs, per micro-batch.
        sends, returns: [2, n + 1] tensors and their bytes that go over a cut before each layer, and back.
        capacity: [D] bytes. latency, bandwidth: [D, D] of copies from row to column.
        launch_seconds: of one thread for all ops of a micro-batch; 0 for a process per device.
    """

    microbatches: int
    begins: Array
    forward: Array
    backward: Array
    weight: Array
    after: Array
    static: Array
    trained: Array
    step: Array
    kept: Array
    kept_again: Array
    again: Array
    transient: Array
    lasting: Array
    sends: Array
    returns: Array
    capacity: Array
    latency: Array
    bandwidth: Array
    training: bool
    one_process: bool = False
    launch_seconds: float = 0.0

    @property
    def size(self) -> int:
        """How many layers there are."""
        return len(self.static)

    @cached_property
    def totals(self) -> dict[str, Array]:
        """Sums up to each layer of everything that adds up."""
        names = ("forward", "backward", "weight", "after", "static", "step", "kept", "kept_again", "lasting")
        return {name: np.concatenate([np.zeros((*one.shape[:-1], 1)), np.cumsum(one, axis=-1)], axis=-1)
                for name in names for one in [getattr(self, name)]}  # fmt: skip

    def over_link(self, what: Array, source: int, destination: int) -> Array:
        """Seconds of tensors, [2, …] (how many, bytes), from one position to another; 0 within one."""
        if source == destination:
            return np.zeros(what.shape[1:])
        return what[0] * self.latency[source, destination] + what[1] / self.bandwidth[source, destination]

    @cached_property
    def spans(self) -> dict[str, Array]:
        """[n + 1, n + 1] what all stages from one cut to another hold; `most`: the largest transient, and `again`."""
        found = {name: self.totals[name][None, :] - self.totals[name][:, None]
                 for name in ("static", "step", "kept", "kept_again", "lasting")}  # fmt: skip
        later = np.arange(self.size)[None, :] >= np.arange(self.size + 1)[:, None]
        for name in ("transient", "again"):
            most = np.maximum.accumulate(np.where(later, getattr(self, name)[None, :], 0.0), axis=1)
            found[name] = np.concatenate([np.zeros((self.size + 1, 1)), most], axis=1)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A partition: `cuts` [stages + 1] in layers, which stages recompute; seconds of a pass, and the fullest device."""

    cuts: tuple[int, ...]
    recompute: tuple[bool, ...]
    seconds: float
    load: float


@lru_cache(maxsize=256)
def _order(
    schedule: str, positions: int, microbatches: int, per_device: int, training: bool, one_process: bool
) -> tuple[Order, tuple[int, ...]]:
    """The actions of a schedule, and how many micro-batches every stage keeps at one time."""
    order = make_order(
        schedule, positions, microbatches,
        stages_per_device=per_device, training=training, one_process=one_process,
    )  # fmt: skip
    flying = in_flight(order) if training else {}
    return order, tuple(flying.get(stage, 0) for stage in range(positions * per_device))


class StageCuts:
    """The partitions of one line into `positions` x `per_device` stages under one schedule.

    `figure` is minimised: "seconds" of a pass, those of the "busiest" device with what it is sent, where passes
    overlap, or the "load" of the fullest.
    """

    def __init__(self, line: Line, schedule: str, positions: int, per_device: int, figure: str) -> None:
        self.line, self.schedule, self.positions, self.figure = line, schedule, positions, figure
        self.per_device, self.count = per_device, positions * per_device
        settings = positions, line.microbatches, per_device, line.training, line.one_process
        self.order, self.keep = _order("gpipe" if schedule == "none" else schedule, *settings)
        self.may_recompute = line.training and schedule not in ("zero-bubble", "none")

    # ---- bytes

    @cached_property
    def _known(self) -> dict[tuple[int, bool], tuple[Array, Array]]:
        return {}

    def _bytes(self, stage: int, again: bool) -> tuple[Array, Array]:
        """[n + 1, n + 1] bytes that a stage keeps, and the most it has while it runs, from one cut to another."""
        key = self.keep[stage], again
        if key not in self._known:
            self._known[key] = self._made_bytes(*key)
        return self._known[key]

    def _made_bytes(self, keep: int, again: bool) -> tuple[Array, Array]:
        line, spans = self.line, self.line.spans
        came = np.where(np.arange(line.size + 1) > 0, line.sends[1], 0.0)[:, None]
        kept = spans["kept"] + came
        passing = spans["transient"] + came * (not line.training)
        if again:  # in one process modules one by one, else the stage as a whole, from what came in
            kept = spans["kept_again"] if line.one_process else came + 0 * kept
            passing = passing + (spans["again"] if line.one_process else spans["kept"])
        return spans["static"] + keep * kept + line.microbatches * spans["lasting"], passing

    @cached_property
    def _alone(self) -> list[tuple[Array, Array]]:
        """Per stage bytes of it alone, as it is and with recomputing."""
        known: dict[int, tuple[Array, Array]] = {}
        for stage, keep in enumerate(self.keep):
            if keep not in known:
                found = [np.maximum(sum(self._bytes(stage, again)), self.line.spans["static"] + self.line.spans["step"])
                         for again in ((False, True) if self.may_recompute else (False, False))]  # fmt: skip
                known[keep] = found[0], found[1]
        return [known[keep] for keep in self.keep]

    def _load(self, cuts: Sequence[int], recompute: Sequence[bool]) -> float:
        """The largest part of a position's memory that is in use."""
        line, held = self.line, np.zeros(self.positions)
        passing, stepping = held.copy(), held.copy()
        for stage, ends in enumerate(pairwise(cuts)):
            at = stage % self.positions
            if self.per_device == 1:
                held[at] = self._alone[stage][recompute[stage]][ends]
                continue
            fixed, more = self._bytes(stage, recompute[stage])
            held[at] += fixed[ends]
            passing[at] = max(passing[at], more[ends])
            stepping[at] += line.spans["static"][ends] + line.spans["step"][ends]
        return float((np.maximum(held + passing, stepping) / np.maximum(line.capacity[: self.positions], 1e-9)).max())

    # ---- seconds

    def _seconds(self, name: str, cuts: Sequence[int]) -> list[float]:
        total = self.line.totals[name]
        return [float(total[s % self.positions, high] - total[s % self.positions, low])
                for s, (low, high) in enumerate(pairwise(cuts))]  # fmt: skip

    def times(self, cuts: Sequence[int], recompute: Sequence[bool]) -> Times:
        """Seconds of every stage and of the copies from each to the next."""
        line, p = self.line, self.positions
        forward, backward, weight = (self._seconds(name, cuts) for name in ("forward", "backward", "weight"))
        backward = [b + f * again for f, b, again in zip(forward, backward, recompute, strict=True)]
        borders = [(s % p, (s + 1) % p, cut) for s, cut in enumerate(cuts[1:-1])]
        return Times(
            forward=forward, backward=backward, weight=[backward[0], *weight[1:]],
            sends=[float(line.over_link(line.sends[:, cut], a, b)) for a, b, cut in borders],
            returns=[float(line.over_link(line.returns[:, cut], b, a)) for a, b, cut in borders],
        )  # fmt: skip

    def _rough(self, times: Times, own: Sequence[float]) -> float:
        """About the seconds of a pass: what the slowest device does, and the way of one micro-batch past the others."""
        m, p, v = self.line.microbatches, self.positions, self.per_device
        stages = list(zip(times.forward, times.backward, times.weight, strict=True))

        def through(seconds: Sequence[float], links: Sequence[float]) -> float:
            slowest = max(*(sum(seconds[at::p]) for at in range(p)), *links, 0.0)
            return m * slowest + max((sum(seconds) + sum(links)) / v - slowest, 0.0)

        there, back = times.sends, times.returns
        if self.schedule == "gpipe" and self.line.training:
            found = through(times.forward, there) + through(times.backward, back)
        elif self.schedule == "zero-bubble":
            whole = through([f + b for f, b, _ in stages], [*there, *back])
            found = whole - sum(w for _, _, w in stages) + max(w for _, _, w in stages)
        else:
            found = through([f + b for f, b, _ in stages], [*there, *back])
        return found + max(own)

    def _own(self, cuts: Sequence[int]) -> list[float]:
        after = self._seconds("after", cuts)
        return [sum(after[at :: self.positions]) for at in range(self.positions)]

    def simulated(self, found: Found) -> float:
        """Seconds of a pass by the clock."""
        ran = simulate(self.order, self.times(found.cuts, found.recompute)).ran
        own = self._own(found.cuts)
        ends = [
            max((one.end for one in ran if one.device == at), default=0.0) + own[at] for at in range(self.positions)
        ]
        return max(*ends, self.line.microbatches * self.line.launch_seconds)

    def _busiest(self, times: Times) -> float:
        """Seconds that the busiest device computes and is sent tensors, in all micro-batches."""
        own = [f + (times.sends[s - 1] if s else 0.0) for s, f in enumerate(times.forward)]
        return self.line.microbatches * max(sum(own[at :: self.positions]) for at in range(self.positions))

    # ---- the search

    def partitions(self) -> list[tuple[int, ...]]:
        """All partitions where they are few, else those that come out of the dynamic programme."""
        size, inner = self.line.size, self.count - 1
        if self.count > size:
            return []
        if comb(size - 1, inner) <= _ALL:
            return [(0, *cuts, size) for cuts in combinations(range(1, size), inner)]
        tables, ways = zip(*(self._tables(stage) for stage in range(self.count)), strict=True)
        least = _solve(tables, np.maximum)
        if least is None:
            return []
        found = {least[1]: None}
        for limit in _LIMITS if self.figure == "seconds" else ():
            within = least[0] * limit * (1 + 1e-9)
            even = _solve([np.where(one <= within, way, np.inf) for one, way in zip(tables, ways, strict=True)], np.add)
            assert even is not None
            found[even[1]] = None
        return list(found)

    def _tables(self, stage: int) -> tuple[Array, Array]:
        """[n + 1, n + 1] the figure of a stage from one cut to another, inf where it does not fit; and its whole way.

        The pace of a stage is that of its device, or of the link into it, whichever is slower.
        """
        line, at, before = self.line, stage % self.positions, (stage - 1) % self.positions
        plain, again = self._alone[stage]
        room = max(float(line.capacity[at]), 1e-9)
        exists = np.arange(line.size + 1)[:, None] < np.arange(line.size + 1)[None, :]
        if self.figure == "load":
            load = np.minimum(plain, again) / room
            load = np.where(exists & (load <= 1), load, np.inf)
            return load, load
        forward, back = (line.totals[name][at][None, :] - line.totals[name][at][:, None]
                         for name in ("forward", "backward"))  # fmt: skip
        seconds = forward + back
        seconds = np.where(plain <= room, seconds, np.where(again <= room, seconds + forward, np.inf))
        seconds = np.where(exists, seconds, np.inf)
        if not stage:
            return seconds, seconds
        come, gone = line.over_link(line.sends, before, at)[:, None], line.over_link(line.returns, at, before)[:, None]
        if self.figure == "busiest":
            return seconds + come, seconds
        return np.maximum(seconds, np.maximum(come, gone)), seconds + come + gone

    def found(self, cuts: tuple[int, ...]) -> Found | None:
        """A partition with the stages that recompute, if it fits; its seconds by a formula."""
        nowhere, everywhere = (False,) * self.count, (True,) * self.count
        ways = [nowhere, everywhere] if self.may_recompute else [nowhere]
        if self.may_recompute and self.per_device == 1:
            room = self.line.capacity
            both = [(plain[ends], again[ends]) for (plain, again), ends in
                    zip(self._alone, pairwise(cuts), strict=True)]  # fmt: skip
            if self.figure == "load":
                ways.insert(1, tuple(bool(plain > again * _AS_EMPTY) for plain, again in both))
            else:
                ways.insert(1, tuple(bool(plain > room[at]) for at, (plain, _) in enumerate(both)))
        loads = [self._load(cuts, way) for way in ways]
        best = min(range(len(ways)), key=lambda i: (loads[i] > 1, i)) if self.figure != "load" else min(
            range(len(ways)), key=lambda i: (round(loads[i] / _AS_EMPTY**i, 6), i)
        )  # fmt: skip
        if loads[best] > 1:
            return None
        times = self.times(cuts, ways[best])
        floor = self.line.microbatches * self.line.launch_seconds
        seconds = max(self._rough(times, self._own(cuts)), floor)
        if self.figure == "busiest":
            seconds = min(self._busiest(times), seconds)
        return Found(cuts=cuts, recompute=ways[best], seconds=seconds, load=loads[best])

    def candidates(self) -> list[Found]:
        """The partitions that fit; where several stages share a device also with single cuts moved as long as it helps.

        The dynamic programme makes stages even there, not their sums.
        """
        found = [one for cuts in self.partitions() if (one := self.found(cuts)) is not None]
        best = min(found, key=self.value, default=None) if self.per_device > 1 else None
        for _ in range(_ROUNDS if best is not None else 0):
            assert best is not None
            moved = [self.found((*best.cuts[:at], best.cuts[at] + step, *best.cuts[at + 1 :]))
                     for at in range(1, self.count) for step in (-1, 1)
                     if best.cuts[at - 1] < best.cuts[at] + step < best.cuts[at + 1]]  # fmt: skip
            least = min((one for one in moved if one is not None), key=self.value, default=best)
            if self.value(least) >= self.value(best) * (1 - 1e-3):
                break
            best = least
        return found if best is None else [*found, best]

    def value(self, found: Found) -> float:
        """The figure that is minimised."""
        return found.load if self.figure == "load" else found.seconds

    def bound(self) -> float:
        """Seconds that no partition goes below: an equal share of all micro-batches; 0 where memory is minimised."""
        line = self.line
        if self.figure == "load":
            return 0.0
        fastest = (line.forward + line.backward).min(axis=0)
        busy = line.microbatches * max(float(fastest.max(initial=0.0)), float(fastest.sum()) / self.positions)
        through = float(fastest.sum()) if self.figure == "seconds" and self.schedule != "zero-bubble" else 0.0
        return max(busy, through, line.microbatches * line.launch_seconds)


def _solve(tables: Sequence[Array], join: Callable[..., Array]) -> tuple[float, tuple[int, ...]] | None:
    """The partition with the least sum, or maximum, of its stages; None if there is none."""
    best = np.full(len(tables[0]), np.inf)
    best[0] = 0.0
    came_from = []
    for table in tables:
        value = join(best[:, None], table)
        came_from.append(value.argmin(axis=0))
        best = value.min(axis=0)
    if not np.isfinite(best[-1]):
        return None
    cuts = [len(best) - 1]
    for previous in reversed(came_from):
        cuts.append(int(previous[cuts[-1]]))
    return float(best[-1]), tuple(reversed(cuts))


def figure_of(objective: str, training: bool) -> str:
    """What a search minimises for an objective; steps of training don't overlap."""
    if objective == "memory":
        return "load"
    return "busiest" if objective == "throughput" and not training else "seconds"

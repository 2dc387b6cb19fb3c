"""Peaks: what a device holds at its fullest with any interval of units, from one walk with a device for every unit.

    walk           [ a ] [ b ] [ c ] [ d ]      who allocates what, from when to when, and what is copied from whom
    interval             [ b     c ]            what b and c allocate, less the copies of what the other of them makes;
                                                what both copy from elsewhere is copied once

The chain adds up what may be live together; here it is looked at when it lives, op by op. That is what the exact
estimate finds, but for the few tensors whose device depends on which modules around them are divided: what a check
found otherwise is noted (`learn`), and holds from then on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.cluster.cluster import Device
from autoshard.cost import tensor_units
from autoshard.flow import flow
from autoshard.profile.measure import gradient_surplus, trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.units import Units
from autoshard.workload import OPTIMIZER_STATE_TENSORS

Array = np.ndarray
MAX_CELLS = 6e7
"""Units times units times ops up to which all intervals are looked at (some 2 ns each)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One allocation: live at moments `born` to `died` - 1, and in an optimizer's step if `at_step`."""

    unit: int
    nbytes: int
    born: int
    died: int
    at_step: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Copied:
    """Copies of one value that live at the same time, and the allocation that it was copied from, if that is known."""

    source: Row | None
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A parameter's bytes, what its gradient keeps beyond itself, and its unit; in the order of the optimizer."""

    unit: int
    nbytes: int
    surplus: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Peaks:
    """What is allocated in a pass, unit by unit. `group`: unit -> unit of the chain; `tables`, `learned`: kept."""

    devices: tuple[Device, ...]
    group: Array
    moments: int
    own: tuple[Row, ...]
    copied: tuple[Copied, ...]
    trained: tuple[Trained, ...]
    optimizer: str
    tables: dict[object, Array] = field(default_factory=dict)
    learned: dict[tuple[object, tuple[int, ...]], int] = field(default_factory=dict)

    def joined(self, group: Array) -> "Peaks":
        """The same for a chain whose units are joined."""
        return replace(self, group=group[self.group])

    def look(self, device: int) -> tuple[object, ...]:
        """What devices have in common that hold the same with the same units."""
        one = self.devices[device]
        return one.block_bytes, one.name.startswith("cpu"), one.overhead_bytes, one.memory_bytes

    def learn(self, assignment: Sequence[int], held: Sequence[int]) -> None:
        """Note what every device turned out to hold under an assignment of the chain's units, without its overhead."""
        placed = np.array(assignment)[self.group]
        for device, nbytes in enumerate(held):
            mine = tuple(np.flatnonzero(placed == device).tolist())
            if mine:
                self.learned[self.look(device)[:2], mine] = nbytes

    def table(self, device: int, position: Array) -> tuple[Array, Array]:
        """[m+1, m+1] bytes at most of the interval [i, j) of positions, and the part of the device's memory in use.

        `position`: of every unit of the chain.
        """
        at = position[self.group]
        look = self.look(device)[:2]
        if (look, at.tobytes()) not in self.tables:
            self.tables[look, at.tobytes()] = _Sweep(self, self.devices[device], at).table()
        table = self.tables[look, at.tobytes()].copy()
        for (alike, units), nbytes in self.learned.items():
            own = at[list(units)]
            low, high = int(own.min()), int(own.max()) + 1
            if alike == look and np.count_nonzero((at >= low) & (at < high)) == len(units):
                table[low, high] = nbytes
        one = self.devices[device]
        return table, (table + one.overhead_bytes) / max(one.memory_bytes, 1)


def find_peaks(profile: Profile, devices: Sequence[Device], units: Units) -> Peaks:
    """Walk the recorded run with a device for every unit."""
    graph = profile.graph
    owner = tensor_units(graph, units)
    moves = flow(graph, {name: str(unit) for name, unit in owner.items()})
    rows, skipped = moves.buffers, moves.uncounted
    times = np.unique(rows.born)
    times = times[(times <= skipped.start) | (times >= skipped.stop)]
    unit = np.array([int(name) for name in moves.devices])[rows.device].tolist()
    born, died = np.searchsorted(times, rows.born), np.searchsorted(times, rows.died - 1, "right")
    gradients = {graph.values[value].storage for _, value in graph.gradients}
    lasting = (rows.born <= moves.steps) & (moves.steps <= rows.died - 1)
    every = [
        Row(unit=unit[row], nbytes=int(rows.nbytes[row]), born=int(born[row]), died=int(died[row]),
            at_step=bool(lasting[row]) and int(rows.storage[row]) not in gradients)
        for row in range(len(rows.born))
    ]  # fmt: skip
    source: dict[int, Row] = {}
    for row, storage in enumerate(rows.storage.tolist()):
        if not rows.copied[row]:
            source.setdefault(storage, every[row])
    of_value: dict[int, list[Row]] = {}
    for copy in moves.copies:
        if copy.buffer >= 0:
            of_value.setdefault(copy.value, []).append(every[copy.buffer])
    state = profile.workload.training
    surplus = dict(gradient_surplus(graph)) if state else {}
    return Peaks(
        devices=tuple(devices),
        group=np.arange(len(units.paths)),
        moments=len(times),
        own=tuple(row for row, is_copy in zip(every, rows.copied.tolist(), strict=True) if not is_copy),
        copied=tuple(
            Copied(source=source.get(graph.values[value].storage), rows=together)
            for value, found in of_value.items() for together in _at_one_time(found)
        ),
        trained=tuple(
            Trained(unit=owner[name], nbytes=nbytes, surplus=surplus.get(name, 0))
            for name, nbytes in (trained_sizes(graph) if state else ())
        ),
        optimizer=profile.workload.optimizer,
    )  # fmt: skip


def _at_one_time(rows: Sequence[Row]) -> list[tuple[Row, ...]]:
    """Copies of one value, those that live at the same time together: a device keeps one of them."""
    found: list[list[Row]] = []
    end = -1
    for row in sorted(rows, key=lambda row: row.born):
        if row.born > end:
            found.append([])
        found[-1].append(row)
        end = max(end, row.died)
    return [tuple(sorted(one, key=lambda row: row.unit)) for one in found]


Span = tuple[int, int, bool]
"""Moments from one to before another, and whether it is held in the optimizer's step."""


class _Sweep:
    """All intervals of positions: `change[k]` is what position k adds, [moments + 1] with the step as the last one.

    Starts go from the last position to the first; what is copied into an interval depends on where it starts.
    """

    def __init__(self, peaks: Peaks, device: Device, at: Array) -> None:
        self.peaks, self.block, self.at, self.size = peaks, device.block_bytes, at.tolist(), int(at.max()) + 1
        self.fused = not device.name.startswith("cpu")
        self.change = np.zeros((self.size, peaks.moments + 1))
        for row in peaks.own:
            self._add(self.at[row.unit], (row.born, row.died, row.at_step), self._rounded(row.nbytes))

    def table(self) -> Array:
        peaks, size = self.peaks, self.size
        touched: list[list[int]] = [[] for _ in range(size)]
        for number, copied in enumerate(peaks.copied):
            units = [row.unit for row in (*copied.rows, *([copied.source] if copied.source else []))]
            for position in {self.at[unit] for unit in units}:
                touched[position].append(number)
        applied: list[list[tuple[int, Span, int]]] = [[] for _ in peaks.copied]
        table, stepping = np.zeros((2, size + 1, size + 1))
        for start in reversed(range(size)):
            for number in touched[start]:
                for position, span, nbytes in applied[number]:
                    self._add(position, span, -nbytes)
                applied[number] = self._copies(peaks.copied[number], start)
                for position, span, nbytes in applied[number]:
                    self._add(position, span, nbytes)
            live = self.change[start:].cumsum(axis=0)
            table[start, start + 1 :] = live[:, :-1].max(axis=1, initial=0.0)
            stepping[start, start + 1 :] = live[:, -1]
        return self._with_optimizer(table, stepping) if peaks.trained else table

    def _rounded(self, nbytes: int) -> int:
        return -(-nbytes // self.block) * self.block

    def _add(self, position: int, span: Span, nbytes: int) -> None:
        low, high, at_step = span
        self.change[position, low:high] += nbytes
        if at_step:
            self.change[position, -1] += nbytes

    def _copies(self, copied: Copied, start: int) -> list[tuple[int, Span, int]]:
        """What copies of a value add at each position of the intervals from `start` on.

        [start   reader      reader    maker   reader
                 copy from   (the same  what is left of the copy when
                 then on      copy)     the original is gone
        """
        source = copied.source
        maker = self.at[source.unit] if source is not None else -1
        by_position: dict[int, list[Row]] = {}
        for row in copied.rows:
            if self.at[row.unit] >= start:
                by_position.setdefault(self.at[row.unit], []).append(row)
        found: list[tuple[int, Span, int]] = []
        nbytes = self._rounded(copied.rows[0].nbytes)
        low, high, at_step, before = 1 << 60, 0, False, (0, 0, False)
        for position in sorted({*by_position, *([maker] if maker >= start else [])}):
            for row in by_position.get(position, ()):
                low, high, at_step = min(low, row.born), max(high, row.died), at_step or row.at_step
            span: Span = (low, high, at_step) if high else (0, 0, False)
            if source is not None and start <= maker <= position:
                span = (max(low, source.died), max(high, source.died), at_step and not source.at_step)
            if span != before:
                found += [(position, before, -nbytes), (position, span, nbytes)]
                before = span
        return found

    def _with_optimizer(self, table: Array, stepping: Array) -> Array:
        """The larger of a pass and the optimizer's step, with its state, as `cost.estimate` counts them."""
        peaks, size = self.peaks, self.size
        states = OPTIMIZER_STATE_TENSORS[peaks.optimizer]
        own, more = np.zeros(size), np.zeros(size)
        step = np.zeros((size + 1, size + 1))
        adam = peaks.optimizer in ("adam", "adamw")
        previous = (0, 0)  # position and bytes
        for one in peaks.trained:
            position = self.at[one.unit]
            own[position] += self._rounded(one.nbytes)
            more[position] += one.surplus + (one.nbytes if self.fused and adam else 0)
            if adam and not self.fused:  # the denominator of the one before is there while the next one's is made
                for other, nbytes in ((position, 2 * one.nbytes), (previous[0], 2 * one.nbytes + previous[1])):
                    cell = min(position, other), max(position, other) + 1
                    step[cell] = max(step[cell], nbytes)
                previous = position, one.nbytes
        step = np.maximum.accumulate(np.maximum.accumulate(step[::-1], axis=0)[::-1], axis=1)
        stepping = stepping + _between(own + more) + step
        return np.maximum(table, stepping) + states * _between(own)


def _between(values: Array) -> Array:
    """[m+1, m+1] sums of the positions of every interval."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return np.maximum(sums[None, :] - sums[:, None], 0.0)

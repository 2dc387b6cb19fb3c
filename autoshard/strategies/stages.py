"""Stages: what every interval [i, j) of free units costs on every kind of device, as dense (m+1) x (m+1) tables."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.strategies.chain import Array
from autoshard.strategies.problem import Problem, base_copies, rectangles


@dataclass(frozen=True, eq=False)
class Stages:
    """Tables of one device: `seconds[i, j]` and `load[i, j]` (memory / capacity) of stage [i, j); inf where impossible.

    `idle_seconds` and `idle_load` are those of the device without a stage: 0, or what its pinned units need.
    """

    seconds: Array
    load: Array
    idle_seconds: float
    idle_load: float

    @cached_property
    def _first(self) -> Array:
        """[m+1] first start i of a stage that ends at j; m + 1 if there is none."""
        able = self.seconds < np.inf
        return np.where(able.any(axis=0), able.argmax(axis=0), len(able))

    def first_row(self, low: int, high: int) -> int:
        """First start i from which some stage ends in columns low..high-1; more than the last row if none does."""
        return int(self._first[low:high].min())

    def limited(self, seconds: float, load: float) -> "Stages":
        """The same tables without the stages that exceed a limit."""
        keep = (self.seconds <= seconds) & (self.load <= load)
        idle = self.idle_seconds <= seconds and self.idle_load <= load
        return Stages(
            np.where(keep, self.seconds, np.inf), np.where(keep, self.load, np.inf),
            self.idle_seconds if idle else np.inf, self.idle_load if idle else np.inf,
        )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Copies:
    """What comes in to stage [i, j): number of copies, bytes copied (both per pass) and bytes kept."""

    count: Array
    moved: Array
    kept: Array
    idle: tuple[float, float, float]


class StageTables:
    """Make and keep the tables of a problem. Devices without pinned units share one set of `Copies`.

    `link(d)` gives (latency, bandwidth) of copies into d; the default needs links that depend on the destination alone.
    """

    def __init__(self, problem: Problem, links: tuple[Array, Array]) -> None:
        self.problem = problem
        self.links = links
        size = problem.size
        self._copies: dict[int, Copies] = {}
        self._stages: dict[int, Stages] = {}
        starts, stops = np.arange(size + 1)[:, None], np.arange(size + 1)[None, :]
        self.valid = starts < stops
        resident = np.concatenate([[0.0], np.cumsum(problem.resident)])
        self.resident = resident[None, :] - resident[:, None]
        # largest transient of [i, j): row i starts to count at column i + 1
        columns = np.concatenate([[0.0], problem.transient])
        self.transient = np.maximum.accumulate(np.where(self.valid, columns[None, :], 0.0), axis=1)

    def stages(self, device: int) -> Stages:
        """Return the tables of a device, shared between devices of one kind."""
        kind = self.problem.kinds[device]
        if kind not in self._stages:
            if len(self._stages) >= 16:  # many unequal devices: rebuilding a table is cheaper than keeping them all
                self._stages.clear()
            self._stages[kind] = self._make(device)
        return self._stages[kind]

    def _make(self, device: int) -> Stages:
        problem, copies = self.problem, self.copies(device)
        prefix = np.concatenate([[0.0], np.cumsum(problem.seconds[device])])
        latency, bandwidth = self.links[0][device], self.links[1][device]
        seconds = prefix[None, :] - prefix[:, None]
        seconds += problem.base_seconds[device] + latency * copies.count + copies.moved / bandwidth
        kept = self.resident + np.maximum(self.transient, problem.base_transient[device])
        kept += problem.base_resident[device] + copies.kept
        capacity = float(problem.chain.capacity_bytes[device])
        load = kept / max(capacity, 1e-9)
        if problem.chain.peaks is not None:
            kept, load = problem.chain.peaks.table(device, problem.position)
        fits = self.valid & (kept <= capacity)
        load = np.where(fits, load, np.inf)
        idle_seconds, idle_load = 0.0, 0.0
        if problem.pinned[device]:
            count, moved, held = copies.idle
            idle_seconds = float(problem.base_seconds[device] + latency * count + moved / bandwidth)
            idle_bytes = float(problem.base_resident[device] + problem.base_transient[device] + held)
            idle_load = idle_bytes / max(capacity, 1e-9)
            if idle_bytes > capacity:
                idle_seconds = idle_load = np.inf
        return Stages(np.where(fits, seconds, np.inf), load, idle_seconds, idle_load)

    def copies(self, device: int) -> Copies:
        """Return the incoming copies of a device."""
        key = device if self.problem.pinned[device] else -1
        if key not in self._copies:
            problem, found = self.problem, rectangles(self.problem, device)
            weights = problem.copies, problem.copies * problem.nbytes, problem.nbytes
            count, moved, kept = (found.table(weight, problem.size) for weight in weights)
            self._copies[key] = Copies(count, moved, kept, base_copies(problem, device))
        return self._copies[key]

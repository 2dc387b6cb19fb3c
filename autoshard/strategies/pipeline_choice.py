"""Which way to run a pipeline: all that make sense, looked at in the order of their bounds, the best ones closely."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import SpecError
from autoshard.schedules.orders import check_schedule
from autoshard.strategies.lines import Lines
from autoshard.strategies.stage_line import Line
from autoshard.strategies.stage_search import Found, Search, figure_of

_AS_GOOD = 1.002
"""Schedules and numbers of micro-batches that are so little slower count as equal: then the simpler one is taken."""
_MOST_PARTS = 8
"""Micro-batches per device above which there is nothing to win: the bubble is below an eighth of a device's time."""
_PER_DEVICE = (2, 4)
"""Stages per device that are tried where they are interleaved."""
_MOST_ACTIONS = 5_000
"""Actions of a schedule up to which stages are interleaved: more of them are not worth the time of the search."""
_LOOKED_AT_WELL = 3
"""Choices that are searched well, after a quick look at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to run a pipeline: `order` is how much it is preferred among equals, less is better."""

    positions: int
    microbatches: int
    schedule: str
    per_device: int = 1
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best of the choices, the line it cuts, and a figure of the objective that none of them goes below.

    `value`: its own; `rivals`: everything else that was run by the clock and fits.
    """

    choice: Choice
    line: Line
    found: Found
    bound: float
    value: float
    rivals: "Sequence[Best]" = ()


def choices_for(
    devices: int, size: int, lines: Lines, num_microbatches: int | None, schedule: str | None, processes: int
) -> Iterable[Choice]:
    """Yield the ways to run a pipeline that make sense here, the simplest first."""
    training = lines.training
    every = [processes] if processes > 1 else range(2, min(devices, lines.count) + 1) if devices <= 8 else [
        *(p for p in (2, 4, 8, 16, 32, 64, 128) if p < devices), devices
    ]  # fmt: skip
    names = [schedule] if schedule else ["gpipe"] if not training else ["gpipe", "1f1b"]
    if processes and training and schedule is None:
        names = ["1f1b", "gpipe", "interleaved", "zero-bubble"]
    for positions in every:
        if positions > min(devices, lines.count):
            continue
        parts = [num_microbatches] if num_microbatches else _parts(size, positions, ragged=not processes)
        for order, name in enumerate(names):
            several = _PER_DEVICE if name == "interleaved" else (1,)
            for per_device in several:
                if positions * per_device > lines.count:
                    continue
                for microbatches in parts:
                    if per_device > 1 and 2 * positions * per_device * microbatches > _MOST_ACTIONS and not schedule:
                        continue
                    try:
                        check_schedule(name, positions, microbatches, stages_per_device=per_device, training=training)
                    except SpecError:
                        if schedule and num_microbatches and len(every) == 1:
                            raise
                        continue
                    yield Choice(positions=positions, microbatches=microbatches, schedule=name,
                                 per_device=per_device, order=order)  # fmt: skip


def _parts(size: int, positions: int, *, ragged: bool) -> list[int]:
    """Numbers of micro-batches: those that divide the batch, up to where there is nothing to win.

    Where the last ones may be smaller (`ragged`), also those that the positions divide.
    """
    found = [m for m in range(1, size + 1) if size % m == 0 and m <= _MOST_PARTS * positions]
    if ragged:
        found = sorted({*found, *(m for m in (positions, 2 * positions, 4 * positions) if m <= size)})
    return found if len(found) <= 8 else found[-8:]


def choose(
    lines: Lines, choices: Sequence[Choice], capacity: np.ndarray, objective: str, *, every: bool = False
) -> Best | None:
    """Find the best choice on devices with so much memory for tensors; None if none fits.

    Choices are looked at quickly in the order of their lower bounds, until those exceed what was found, or all of them
    (`every`); the most promising ones are then searched well.
    """
    made: dict[tuple[int, int], Line] = {}
    searches = []
    devices = range(len(capacity))
    for number, choice in enumerate(choices):
        key = (choice.microbatches, choice.positions * choice.per_device)
        if key not in made:
            made[key] = replace(lines.line(*key), capacity=capacity)
        search = Search(
            made[key], choice.schedule, choice.positions, choice.per_device,
            figure=figure_of(objective, lines.training),
        )  # fmt: skip
        searches.append((search.bound(devices), number, choice, search))
    searches.sort(key=lambda one: one[:2])
    looked: list[tuple[float, int, Choice, Search]] = []
    best: tuple[float, Choice, Found] | None = None
    for bound, number, choice, search in searches:
        if best is not None and bound > best[0] * _AS_GOOD and not every:
            break
        found = search.quick(devices)
        if found is not None:
            looked.append((search.value(found), number, choice, search))
            if best is None or is_better(search.value(found), choice, best[0], best[1]):
                best = search.value(found), choice, found
    for _, _, choice, search in sorted(looked, key=lambda one: one[:2])[:_LOOKED_AT_WELL]:
        found = search.best(devices)
        if found is not None and best is not None and is_better(search.value(found), choice, best[0], best[1]):
            best = search.value(found), choice, found
    if best is None:
        return None
    bound = min(searches[0][0], best[0])
    rivals = [
        Best(choice=choice, found=found, line=search.line, bound=bound, value=search.value(found))
        for _, _, choice, search, *_ in looked for found in search.known
    ]  # fmt: skip
    line = made[best[1].microbatches, best[1].positions * best[1].per_device]
    return Best(choice=best[1], found=best[2], line=line, bound=bound, value=best[0], rivals=rivals)


def is_better(value: float, choice: Choice, best: float, known: Choice) -> bool:
    """Faster; or about as fast and simpler: no second stage per device, fewer micro-batches."""
    if value < best / _AS_GOOD:
        return True
    simpler = (choice.per_device, choice.order, choice.microbatches) < (
        known.per_device, known.order, known.microbatches
    )  # fmt: skip
    return value <= best * _AS_GOOD and simpler

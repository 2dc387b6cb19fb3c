"""Only the seconds of an order, for one pipeline or many at once: what a search needs, without events.

The actions are brought once into an order in which everything comes after what it needs; then each is one step of
arithmetic on numbers, or on arrays with one entry per pipeline. The figures are those of `simulate` (a test compares).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from autoshard.errors import SpecError
from autoshard.schedules.orders import Order
from autoshard.schedules.simulate import Times


class Step(NamedTuple):
    """One action: on which device, seconds of which kind and stage, after which result, and where its own goes.

    `needs`: number of a result, -1 for none. `makes`: (number, link, border) of what it sends on, and `to_self`: number
    of what its own device goes on with; -1 for none. Links: -1 within a device.
    """

    device: int
    kind: str
    stage: int
    needs: int
    makes: int
    link: int
    border: int
    to_self: int


class Program(NamedTuple):
    """Steps of an order, and how many devices, links and results there are."""

    steps: tuple[Step, ...]
    devices: int
    links: int
    results: int


def compile_order(order: Order, stages: int) -> Program:
    """Bring the actions of an order into one line. Raises `SpecError` if they wait for each other for ever."""
    devices, links, results = len(order), dict[tuple[int, int], int](), dict[tuple[str, int, int], int]()
    made: set[int] = set()
    at, waiting, ready = [0] * devices, dict[int, int](), list(range(devices))
    steps = []

    def number(way: str, stage: int, microbatch: int) -> int:
        return results.setdefault((way, stage, microbatch), len(results))

    while ready:
        device = ready.pop()
        row = order[device]
        while at[device] < len(row):
            kind, stage, microbatch = row[at[device]]
            way, ahead = ("F", 1) if kind == "F" else ("B", -1)
            needs = makes = link = border = to_self = -1
            if kind == "W":
                needs = number("W", stage, microbatch)
            elif 0 <= stage - ahead < stages:
                needs = number(way, stage, microbatch)
            if needs >= 0 and needs not in made:
                waiting[needs] = device
                break
            following = stage + ahead
            if kind != "W" and 0 <= following < stages:
                makes, border = number(way, following, microbatch), min(stage, following)
                if following % devices != device:
                    link = links.setdefault((device, following % devices), len(links))
            if kind == "I":
                to_self = number("W", stage, microbatch)
            steps.append(Step(device, kind, stage, needs, makes, link, border, to_self))
            at[device] += 1
            for result in (makes, to_self):
                made.add(result)
                if result in waiting:
                    ready.append(waiting.pop(result))
    if any(at[device] < len(order[device]) for device in range(devices)):
        raise SpecError("the order of this schedule makes its devices wait for each other for ever.")
    return Program(tuple(steps), devices, len(links), len(results))


def makespan(program: Program, times: Times, after: Sequence[Any] = ()) -> Any:
    """Return the seconds until the last device is done; figures of `times` are numbers, or arrays of [pipelines].

    `after`: what each device does when all of its actions are done.
    """
    many = isinstance(times.forward[0], np.ndarray)
    later: Any = np.maximum if many else max
    zero: Any = np.zeros_like(times.forward[0]) if many else 0.0
    seconds: dict[str, Sequence[Any]] = {"F": times.forward, "B": times.backward, "W": times.weight}
    if times.weight:
        seconds["I"] = [b - w for b, w in zip(times.backward, times.weight, strict=True)]
    free, link_free, come = [zero] * program.devices, [zero] * program.links, [zero] * program.results
    for device, kind, stage, needs, makes, link, border, to_self in program.steps:
        begin = free[device] if needs < 0 else later(free[device], come[needs])
        end = free[device] = begin + seconds[kind][stage]
        if to_self >= 0:
            come[to_self] = end
        if makes >= 0:
            if link >= 0:
                over = (times.sends if kind == "F" else times.returns)[border]
                end = link_free[link] = later(end, link_free[link]) + over
            come[makes] = end
    found = zero
    for device, end in enumerate(free):
        found = later(found, end + after[device] if after else end)
    return found

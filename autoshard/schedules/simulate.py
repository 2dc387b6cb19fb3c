"""Run an order by the clock: exact, as every device's actions are in a fixed order.

An action begins when its device is done with the one before and what it needs has come:

    F of stage s    the output of F of stage s - 1           I, B of stage s    F of it, the gradient from stage s + 1
    W of stage s    I of it

    device 0   [F0][F1]          [B0]  …
    link 0→1       ──▶ ──▶                 one copy after the other, in the order in which they are ready
    device 1          [F0][B0]

Copies between stages of one device take no time. Between devices each direction of a pair is a link of its own that
carries one copy at a time. A device goes on while what it sent is on the way (asynchronous sends, as with NCCL).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from autoshard.errors import SpecError
from autoshard.schedules.orders import Order, PipeAction


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one micro-batch per stage, and of the copies from each stage to the next.

    `backward` is all of it (recomputing included), `weight` the part of it that a W does; I takes the rest.
    `sends`: [stages - 1] of activations, `returns`: [stages - 1] of the gradients that come back over the same border.
    """

    forward: Sequence[Any]
    backward: Sequence[Any] = ()
    weight: Sequence[Any] = ()
    sends: Sequence[Any] = ()
    returns: Sequence[Any] = ()

    def of(self, action: PipeAction) -> float:
        """Seconds of one action."""
        kind, stage, _ = action
        if kind == "I":
            return float(self.backward[stage] - self.weight[stage])
        return float({"F": self.forward, "B": self.backward, "W": self.weight}[kind][stage])


class Ran(NamedTuple):
    """An action, and when its device did it."""

    device: int
    action: PipeAction
    begin: float
    end: float


class Sent(NamedTuple):
    """A copy: what `action` made, from device to device, and when the link carried it."""

    source: int
    destination: int
    action: PipeAction
    begin: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of it. `bubble`: part of the devices' time, until the last one is done, in which they do nothing."""

    ran: tuple[Ran, ...]
    sent: tuple[Sent, ...]
    seconds: float
    busy: tuple[float, ...]
    bubble: float


def simulate(order: Order, times: Times) -> Simulated:
    """Run an order. Raises `SpecError` if its devices would wait for each other for ever."""
    devices, last = len(order), len(times.forward) - 1
    ran: list[Ran] = []
    sent: list[Sent] = []
    come: dict[PipeAction, float] = {}  # what an action needs -> when it is there; keys are the actions that need it
    free, link_free = [0.0] * devices, dict[tuple[int, int], float]()
    at = [0] * devices
    waiting: dict[PipeAction, int] = {}  # what somebody waits for -> the device
    ready = list(range(devices))
    while ready:
        device = ready.pop()
        row = order[device]
        while at[device] < len(row):
            action = row[at[device]]
            begin = free[device]
            if not _is_first(action, last):
                needed = PipeAction("I" if action.kind == "B" else action.kind, action.stage, action.microbatch)
                if needed not in come:
                    waiting[needed] = device
                    break
                begin = max(begin, come[needed])
            end = begin + times.of(action)
            ran.append(Ran(device, action, begin, end))
            free[device] = end
            at[device] += 1
            for next_action in _enables(action, last):
                there, done = next_action.stage % devices, end
                if there != device:
                    seconds = (times.returns if next_action.kind == "I" else times.sends)[
                        min(action.stage, next_action.stage)
                    ]
                    start = max(end, link_free.get((device, there), 0.0))
                    done = link_free[device, there] = start + seconds
                    sent.append(Sent(device, there, action, start, done))
                come[next_action] = done
                if next_action in waiting:
                    ready.append(waiting.pop(next_action))
    if any(at[device] < len(order[device]) for device in range(devices)):
        raise SpecError("the order of this schedule makes its devices wait for each other for ever.")
    seconds = max(free, default=0.0)
    busy = [0.0] * devices
    for row_ in ran:
        busy[row_.device] += row_.end - row_.begin
    total = devices * seconds
    return Simulated(
        ran=tuple(ran),
        sent=tuple(sent),
        seconds=seconds,
        busy=tuple(busy),
        bubble=1 - sum(busy) / total if total else 0.0,
    )


def _is_first(action: PipeAction, last: int) -> bool:
    """Whether an action needs nothing from another one that its own device's order does not give."""
    return (action.kind == "F" and action.stage == 0) or (action.kind in ("B", "I") and action.stage == last)


def _enables(action: PipeAction, last: int) -> tuple[PipeAction, ...]:
    """The actions (backwards by their half I) that an action makes something for."""
    kind, stage, microbatch = action
    if kind == "F":
        return (PipeAction("F", stage + 1, microbatch),) if stage < last else ()
    if kind == "W":
        return ()
    own = (PipeAction("W", stage, microbatch),) if kind == "I" else ()
    return (*own, PipeAction("I", stage - 1, microbatch)) if stage else own

"""When streamed modules compute and when they are brought: one pass after another, in the long run.

A streamed module is brought to its device for each of its calls, into one of two slots there. While one computes in its
slot the next one is brought into the other, across the end of a pass too:

    compute   | a |.| b |   c   |.. | a |            "." waits for a fetch: a stall
    slot 1    [ a ][  fetch c   ][ c ][ fetch b …
    slot 2    [fetch b][ b ][fetch a      ][ a ]

* The call after next is fetched from the moment a call ends, as soon as the link of its device is free.
* Each device has one link and makes one fetch at a time. All fetches from the disk share it, first come, first served.
* A call starts when its fetch is done. Calls follow each other: one input, devices taking turns.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 2
"""Streamed modules that are on a device at a time."""
_MOST_PASSES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCall:
    """A call of a module that may be streamed: which one, on which device, what is computed before it and in it."""

    module: int
    device: int
    before_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A call of a streamed module in the last pass played, and the fetch that begins when it ends.

    Seconds from the begin of that pass. `call` and `brought` count the calls of modules that are fetched, in order.
    """

    call: int
    start_seconds: float
    brought: int
    fetch_begin_seconds: float
    fetch_end_seconds: float


def steady_seconds(
    calls: Sequence[StreamCall],
    after_seconds: float,
    fetch_seconds: Sequence[float],
    on_disk: Sequence[bool],
    turns: list[Turn] | None = None,
) -> float:
    """Return the seconds of one pass in the long run.

    `fetch_seconds` per module: of bringing it once, 0 if it stays. `on_disk` per module: it is brought from the disk.
    Passes are played until what is under way at the end of one has been seen before; then the mean of that period.
    `turns`: gets those of the last pass played.
    """
    before, inside, device, fetch, disk, tail = _events(calls, after_seconds, fetch_seconds, on_disk)
    if not fetch:
        return tail
    following = _next_but_one(device)
    ready: dict[int, deque[float]] = {d: deque([0.0] * SLOTS) for d in device}
    link = dict.fromkeys(device, 0.0)
    disk_free = now = 0.0
    unit = sum(before) + sum(inside) + sum(fetch) + tail or 1.0
    seen: dict[tuple[int, ...], tuple[int, float]] = {}
    ends = []
    for number in range(_MOST_PASSES):
        if turns is not None:
            turns.clear()
        begin = now
        for i, d in enumerate(device):
            now = max(now + before[i], ready[d].popleft()) + inside[i]
            brought = following[i]
            start = max(now, link[d], disk_free) if disk[brought] else max(now, link[d])
            link[d] = start + fetch[brought]
            if disk[brought]:
                disk_free = link[d]
            ready[d].append(link[d])
            if turns is not None:
                turns.append(
                    Turn(
                        call=i, start_seconds=now - inside[i] - begin, brought=brought,
                        fetch_begin_seconds=start - begin, fetch_end_seconds=link[d] - begin,
                    )
                )  # fmt: skip
        now += tail
        ends.append(now)
        under_way = [time for queue in ready.values() for time in queue] + [*link.values(), disk_free]
        state = tuple([round(max(time - now, 0.0) / unit * 1e12) for time in under_way])
        if state in seen:
            first, end = seen[state]
            return (now - end) / (number - first)
        seen[state] = number, now
    half = _MOST_PASSES // 2
    return (ends[-1] - ends[half - 1]) / half


def least_seconds(
    calls: Sequence[StreamCall], after_seconds: float, fetch_seconds: Sequence[float], on_disk: Sequence[bool]
) -> float:
    """Return what no pass can be shorter than: all that computes, all that one link brings, all that the disk gives."""
    links: dict[int, float] = {}
    disk = 0.0
    for call in calls:
        seconds = fetch_seconds[call.module]
        links[call.device] = links.get(call.device, 0.0) + seconds
        disk += seconds if on_disk[call.module] else 0.0
    computing = sum(call.before_seconds + call.seconds for call in calls) + after_seconds
    return max(computing, disk, *links.values()) if links else computing


def _events(
    calls: Sequence[StreamCall], after_seconds: float, fetch_seconds: Sequence[float], on_disk: Sequence[bool]
) -> tuple[list[float], list[float], list[int], list[float], list[bool], float]:
    """Calls of streamed modules alone, as columns; what others compute counts as before the next one."""
    before, inside, device, fetch, disk = [], [], [], [], []
    gap = 0.0
    for call in calls:
        gap += call.before_seconds
        if fetch_seconds[call.module] > 0:
            before.append(gap)
            inside.append(call.seconds)
            device.append(call.device)
            fetch.append(fetch_seconds[call.module])
            disk.append(bool(on_disk[call.module]))
            gap = 0.0
        else:
            gap += call.seconds
    return before, inside, device, fetch, disk, gap + after_seconds


def _next_but_one(device: Sequence[int]) -> list[int]:
    """Per event, the one whose fetch may begin when it ends: two further on its device, maybe in the next pass."""
    mine: dict[int, list[int]] = {}
    for i, d in enumerate(device):
        mine.setdefault(d, []).append(i)
    following = [0] * len(device)
    for events in mine.values():
        for place, i in enumerate(events):
            following[i] = events[(place + SLOTS) % len(events)]
    return following

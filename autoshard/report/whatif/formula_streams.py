"""Streamed modules at other sizes; `page/formula_streams.js` is the same, line by line. See `stream_schedule`."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.report.whatif.formula import copies, sum_of

SLOTS = 2
MOST_PASSES = 64


def streamed(
    stream: Mapping[str, Any], links: Sequence[Sequence[float]], values: Sequence[float],
    seconds: Sequence[Sequence[float]],
) -> tuple[float, float]:  # fmt: skip
    """Return the seconds of a pass in the long run, and of the busiest link or device when passes overlap.

    `seconds`: per device, of every kind of op.
    """
    count = len(seconds)
    stretches = []
    for ops, moved in stream["segments"]:
        own = [0.0] * count
        for device, counts in ops:
            own[device] += sum_of(counts, seconds[device])
        for device, *row in moved:
            own[device] += copies(links, [row], values)
        stretches.append(own)
    fetch = [times * links[link][0] + nbytes / links[link][1] for _, link, times, nbytes, _ in stream["modules"]]
    latency = max(_least(stream, stretches, fetch, count), _steady(stream, stretches, fetch, -1))
    busiest, disk = 0.0, 0.0
    for device in range(count):
        if any(module[0] == device for module in stream["modules"]):
            busiest = max(busiest, _steady(stream, stretches, fetch, device))
    for _, _, module in stream["calls"]:
        disk += fetch[module] if stream["modules"][module][4] > 0 else 0.0
    return latency, max(busiest, disk)


def _on(stretch: Sequence[float], only: int) -> float:
    """Seconds of a stretch on one device, or on all."""
    return stretch[only] if only >= 0 else sum(stretch)


def _least(
    stream: Mapping[str, Any], stretches: Sequence[Sequence[float]], fetch: Sequence[float], count: int
) -> float:
    """Seconds that no pass can be shorter than."""
    computing, disk, links = _on(stretches[stream["tail"]], -1), 0.0, [0.0] * count
    for before, inside, module in stream["calls"]:
        computing += _on(stretches[before], -1) + _on(stretches[inside], -1)
        links[stream["modules"][module][0]] += fetch[module]
        disk += fetch[module] if stream["modules"][module][4] > 0 else 0.0
    most = max(computing, disk)
    for seconds in links:
        most = max(most, seconds)
    return most


def _steady(
    stream: Mapping[str, Any], stretches: Sequence[Sequence[float]], fetch: Sequence[float], only: int
) -> float:
    """Seconds of a pass in the long run, of all devices in turns or of one alone."""
    events = []
    gap, unit = 0.0, 0.0
    for before, inside, module in stream["calls"]:
        device, disk = stream["modules"][module][0], stream["modules"][module][4]
        gap += _on(stretches[before], only)
        unit += _on(stretches[before], only) + _on(stretches[inside], only)
        if only in (-1, device) and fetch[module] > 0:
            events.append([gap, _on(stretches[inside], only), device, fetch[module], disk])
            unit += fetch[module]
            gap = 0.0
        else:
            gap += _on(stretches[inside], only)
    tail = gap + _on(stretches[stream["tail"]], only)
    unit += _on(stretches[stream["tail"]], only)
    if not events:
        return tail
    following, mine = [0] * len(events), dict[int, list[int]]()
    for index, event in enumerate(events):
        mine.setdefault(event[2], []).append(index)
    for own in mine.values():
        for place, index in enumerate(own):
            following[index] = own[(place + SLOTS) % len(own)]
    ready = {device: [0.0] * SLOTS for device in mine}
    link = dict.fromkeys(mine, 0.0)
    disk_free, now, ends, seen = 0.0, 0.0, list[float](), dict[str, int]()
    for number in range(MOST_PASSES):
        for index, (before, inside, device, _, _) in enumerate(events):
            now = max(now + before, ready[device].pop(0)) + inside
            _, _, _, seconds, disk = events[following[index]]
            start = max(now, link[device], disk_free) if disk > 0 else max(now, link[device])
            link[device] = start + seconds
            if disk > 0:
                disk_free = link[device]
            ready[device].append(link[device])
        now += tail
        ends.append(now)
        state = ""
        for device in mine:
            for time in [*ready[device], link[device], disk_free]:
                state += f"{int(max(time - now, 0.0) / unit * 1e12 + 0.5)},"
        if state in seen:
            return (now - ends[seen[state]]) / (number - seen[state])
        seen[state] = number
    half = MOST_PASSES // 2
    return (ends[-1] - ends[half - 1]) / half

"""Which modules stay on their device, and where the others are kept: on the CPU or on disk.

Every module is in one of three places: resident, streamed from the CPU, streamed from disk. Memory says how many of
each (a bounded knapsack over kinds of equal modules); the order says which, since what is streamed should come evenly:

    resident, streamed       r r r r s s s s      link idle, then every call waits
    evenly                   r s r s r s r s      each fetch has two calls to hide behind

Equal modules spread evenly reach the lower bound max(compute, link) wherever it can be reached. For others the answer
is checked against that bound: reached means proved best; else all choices are tried where they are few
(`_MOST_CHOICES`), in order of their own bound, and swaps are tried where they are many.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from autoshard.stream_schedule import SLOTS, StreamCall, steady_seconds

RESIDENT, CPU, DISK = 0, 1, 2
_SAME = 1e-9
_MOST_CHOICES = 60_000
"""Choices that are all looked at: ten modules with three places, fifteen with two."""
_MOST_KINDS = 12
"""Kinds of modules up to which the two slots may be for different ones."""
_MOST_LABELS = 2_000
"""Sums of bytes kept by the knapsack; with more, those within 1 / `_BUCKETS` of the room count as one."""
_BUCKETS = 1_024
_NEAR = 1e-3
"""Swaps are not worth their time this close to the bound."""
_MOST_EVENTS = 100_000
"""Calls played while swapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The modules that may be streamed, m of them, and the room there is on D devices.

    Attributes:
        calls, after_seconds: one pass (see `stream_schedule`); a module without calls costs room only.
        device: [m] the device each computes on.
        nbytes: [m] on that device. stored_bytes: [m] on the CPU or on disk.
        cpu_seconds, disk_seconds: [m] of bringing it once from there; inf if it can't be kept there.
        room_bytes: [D] for residents and the two largest streamed modules of the device.
        cpu_bytes, disk_bytes: room for streamed modules.
    """

    calls: tuple[StreamCall, ...]
    after_seconds: float
    device: tuple[int, ...]
    nbytes: tuple[int, ...]
    stored_bytes: tuple[int, ...]
    cpu_seconds: tuple[float, ...]
    disk_seconds: tuple[float, ...]
    room_bytes: tuple[int, ...]
    cpu_bytes: int = 0
    disk_bytes: int = 0

    @property
    def size(self) -> int:
        return len(self.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A place per module, the seconds of a pass, and what no choice can be faster than (`bound_seconds`)."""

    places: tuple[int, ...]
    seconds: float
    bound_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """How many of each kind of a device stay, and the seconds of fetching that no such counts save more of."""

    counts: list[int]
    most_saved: float


def choose(task: Offload) -> Choice | None:
    """Find the places with the shortest pass; None if there is no room for any."""
    kept = _all_residents(task)
    start = None if kept is None else _spread(task, kept)
    least = _least(task, kept)
    found = None if start is None else Choice(places=start, seconds=pass_seconds(task, start), bound_seconds=least)
    if found is not None and found.seconds <= least * (1 + _SAME):
        return found
    if len(_options(task)) ** task.size <= _MOST_CHOICES:
        return _best_of_all(task, found)
    if found is None or found.seconds <= least * (1 + _NEAR):
        return found
    better = _swapped(task, found.places, found.seconds, least)
    return Choice(places=better, seconds=pass_seconds(task, better), bound_seconds=least)


def pass_seconds(task: Offload, places: Sequence[int]) -> float:
    """Return the seconds of a pass in the long run."""
    return steady_seconds(task.calls, task.after_seconds, fetches(task, places), [place == DISK for place in places])


def fetches(task: Offload, places: Sequence[int]) -> list[float]:
    """Seconds of bringing each module once, 0 for residents."""
    from_place = ([0.0] * task.size, task.cpu_seconds, task.disk_seconds)
    return [from_place[place][module] for module, place in enumerate(places)]


def has_room(task: Offload, places: Sequence[int]) -> bool:
    """Whether residents, slots and what is kept elsewhere all have room."""
    at = np.array(places, int)
    stored = np.array(task.stored_bytes, np.int64)
    if stored[at == CPU].sum() > task.cpu_bytes or stored[at == DISK].sum() > task.disk_bytes:
        return False
    if not np.isfinite(np.array(task.disk_seconds)[at == DISK]).all():
        return False
    return all(held_bytes(task, places, device) <= room for device, room in enumerate(task.room_bytes))


def held_bytes(task: Offload, places: Sequence[int], device: int) -> int:
    """Bytes on a device: its residents and the two largest of its streamed modules."""
    mine = [module for module in range(task.size) if task.device[module] == device]
    streamed = sorted((task.nbytes[module] for module in mine if places[module] != RESIDENT), reverse=True)
    return sum(task.nbytes[module] for module in mine if places[module] == RESIDENT) + sum(streamed[:SLOTS])


def least_stored_bytes(task: Offload) -> int | None:
    """Bytes that have to be kept elsewhere at least; None if the slots alone have no room."""
    anywhere = replace(task, cpu_bytes=0, disk_bytes=0, disk_seconds=(float("inf"),) * task.size)
    kept = _all_residents(anywhere)
    if kept is None:
        return None
    total = 0
    for device, stay in enumerate(kept):
        for kind, count in zip(_kinds_on(task, device), stay.counts, strict=True):
            total += task.stored_bytes[kind[0]] * (len(kind) - count)
    return total


# ---- few modules: all choices, the most promising first


def _options(task: Offload) -> list[int]:
    return [RESIDENT, *([CPU] if task.cpu_bytes > 0 else []), *([DISK] if task.disk_bytes > 0 else [])]


def _best_of_all(task: Offload, found: Choice | None) -> Choice | None:
    """Play the choices that have room by rising lower bound, until that is no better than the best one played."""
    places = np.array(list(product(_options(task), repeat=task.size)), np.int8).reshape(-1, task.size)
    places = places[_have_room(task, places)]
    bounds = _bounds(task, places)
    best = found
    for row in np.argsort(bounds, kind="stable").tolist():
        if best is not None and bounds[row] >= best.seconds * (1 - _SAME):
            break
        chosen = tuple(places[row].tolist())
        seconds = pass_seconds(task, chosen)
        if best is None or seconds < best.seconds * (1 - _SAME):
            best = Choice(places=chosen, seconds=seconds, bound_seconds=seconds)
    return best and Choice(places=best.places, seconds=best.seconds, bound_seconds=best.seconds)


def _have_room(task: Offload, places: np.ndarray) -> np.ndarray:
    stored, sizes, device = np.array(task.stored_bytes), np.array(task.nbytes), np.array(task.device)
    fine = ((places == CPU) @ stored <= task.cpu_bytes) & ((places == DISK) @ stored <= task.disk_bytes)
    fine &= ~(places == DISK)[:, ~np.isfinite(np.array(task.disk_seconds))].any(axis=1)
    for number, room in enumerate(task.room_bytes):
        mine = places[:, device == number]
        if mine.shape[1]:
            streamed = np.sort(np.where(mine == RESIDENT, 0, sizes[device == number]), axis=1)[:, ::-1]
            fine &= (mine == RESIDENT) @ sizes[device == number] + streamed[:, :SLOTS].sum(axis=1) <= room
    return fine


def _bounds(task: Offload, places: np.ndarray) -> np.ndarray:
    """`least_seconds` of many choices at once."""
    times = _times(task)
    per_fetch = np.stack([np.zeros(task.size), task.cpu_seconds, task.disk_seconds])
    per_fetch = np.where(np.isfinite(per_fetch), per_fetch, 0.0)
    seconds = per_fetch[places, np.arange(task.size)] * times
    least = np.full(len(places), _computing(task))
    for number in range(len(task.room_bytes)):
        least = np.maximum(least, seconds[:, np.array(task.device) == number].sum(axis=1))
    return np.maximum(least, np.where(places == DISK, seconds, 0.0).sum(axis=1))


def _computing(task: Offload) -> float:
    return sum(call.before_seconds + call.seconds for call in task.calls) + task.after_seconds


# ---- many modules: how many of each kind, then evenly


def _spread(task: Offload, kept: Sequence[_Kept]) -> tuple[int, ...] | None:
    """Keep so many of each kind on each device, take the most fetching off the disk; spread what is left evenly."""
    places = [RESIDENT] * task.size
    for device, stay in enumerate(kept):
        for kind, count in zip(_kinds_on(task, device), stay.counts, strict=True):
            for module in _evenly(kind, len(kind) - count):
                places[module] = CPU
    away = [module for module in range(task.size) if places[module] != RESIDENT]
    only_cpu = [module for module in away if task.disk_bytes > 0 and not np.isfinite(task.disk_seconds[module])]
    room = task.cpu_bytes - sum(task.stored_bytes[module] for module in only_cpu)
    kinds = _kinds(task, [module for module in away if module not in set(only_cpu)])
    sizes = [task.stored_bytes[kind[0]] for kind in kinds]
    saving = [float(size) for size in sizes]
    if task.disk_bytes > 0:
        slower, faster = task.disk_seconds, task.cpu_seconds
        saving = [_fetching(task, kind[0], slower) - _fetching(task, kind[0], faster) for kind in kinds]
        saving = [_worth(value, size) for value, size in zip(saving, sizes, strict=True)]
    on_cpu, _ = _knapsack(sizes, saving, [len(kind) for kind in kinds], max(room, 0))
    for kind, count in zip(kinds, on_cpu, strict=True):
        for module in _evenly(kind, len(kind) - count):
            places[module] = DISK
    return tuple(places) if has_room(task, places) else None


def _kinds_on(task: Offload, device: int) -> list[list[int]]:
    return _kinds(task, [module for module in range(task.size) if task.device[module] == device])


def _kinds(task: Offload, modules: Sequence[int]) -> list[list[int]]:
    """Modules that cost the same, the largest first; in order of their first calls."""
    count = _times(task).tolist()
    first = {call.module: -order for order, call in enumerate(reversed(task.calls))}
    kinds: dict[tuple, list[int]] = {}
    for module in sorted(modules, key=lambda module: first.get(module, 1)):
        on_disk = bool(np.isfinite(task.disk_seconds[module]))
        key = task.nbytes[module], task.stored_bytes[module], count[module], on_disk
        kinds.setdefault(key, []).append(module)
    return [kinds[key] for key in sorted(kinds, reverse=True)]


def _evenly(modules: Sequence[int], count: int) -> list[int]:
    """Pick `count` of them with equal distances; in a circle, as passes follow each other."""
    return [modules[(2 * i + 1) * len(modules) // (2 * count)] for i in range(count)]


def _worth(seconds: float, nbytes: int) -> float:
    """Seconds saved; a module that saves none may still use room that is left, and without a store all is worth it."""
    return max(seconds, 1e-15 * nbytes) if np.isfinite(seconds) else float(nbytes)


def _fetching(task: Offload, module: int, seconds: Sequence[float]) -> float:
    """Seconds per pass of bringing a module for each of its calls."""
    times = sum(1 for call in task.calls if call.module == module)
    return seconds[module] * times if times else 0.0


def _all_residents(task: Offload) -> list[_Kept] | None:
    """Per device what stays; None if there is no room for its slots."""
    kept = [_residents(task, _kinds_on(task, device), room) for device, room in enumerate(task.room_bytes)]
    return None if None in kept else [stay for stay in kept if stay is not None]


def _residents(task: Offload, kinds: list[list[int]], room: int) -> _Kept | None:
    """How many of each kind (the largest first) stay so that the most seconds of fetching are saved.

    For every pair of kinds that the two slots may be for: all larger modules stay, all but one between the two do, and
    a knapsack fills what is left with the others. Above `_MOST_KINDS` kinds the two are neighbours.
    """
    sizes, counts = [task.nbytes[kind[0]] for kind in kinds], [len(kind) for kind in kinds]
    if _sum(sizes, counts) <= room:
        return _Kept(counts=counts, most_saved=float("inf"))
    near = task.cpu_seconds if task.cpu_bytes > 0 else task.disk_seconds
    saving = [_worth(_fetching(task, kind[0], near), size) for kind, size in zip(kinds, sizes, strict=True)]
    best, best_value, most = None, -1.0, 0.0 if len(kinds) <= _MOST_KINDS else float("inf")
    for first, second in _slot_pairs(counts):
        stay = [*counts[:second], *([0] * (len(kinds) - second))]
        if second > first:
            stay[first] -= 1
        left = room - _sum(sizes, stay) - sizes[first] - sizes[second]
        rest = sizes[second:], saving[second:], counts[second:]
        limit = _sum(saving, stay) + _most_value(*rest, left) if left >= 0 else -1.0
        if limit <= best_value:
            continue
        stay[second:], exact = _knapsack(*rest, left)
        value = _sum(saving, stay)
        most = max(most, value if exact else limit)
        if value > best_value:
            best, best_value = stay, value
    return None if best is None else _Kept(counts=best, most_saved=most)


def _slot_pairs(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Kinds that the largest and the second largest streamed module may be of."""
    for first, count in enumerate(counts):
        last = len(counts) if len(counts) <= _MOST_KINDS else min(first + 2, len(counts))
        yield from ((first, second) for second in range(first if count > 1 else first + 1, last))


def _sum(each: Sequence[float], counts: Sequence[int]) -> float:
    return sum(value * count for value, count in zip(each, counts, strict=True))


def _most_value(sizes: Sequence[int], values: Sequence[float], counts: Sequence[int], room: float) -> float:
    """What a knapsack holds at most, if things may be cut."""
    worth = 0.0
    for size, value, count in sorted(zip(sizes, values, counts, strict=True), key=lambda row: -row[1] / max(row[0], 1)):
        taken = min(float(count), room / size if size else count)
        worth, room = worth + value * taken, room - size * taken
    return worth


def _knapsack(
    sizes: Sequence[int], values: Sequence[float], counts: Sequence[int], room: float
) -> tuple[list[int], bool]:
    """How many of each kind to take for the highest value within `room`: sums that no other beats in both are kept.

    Exact, and then so returned, while those are few (`_MOST_LABELS`); O(kinds * labels * count).
    """
    used, worth, exact = np.zeros(1), np.zeros(1), True
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # per kind and label: how many are taken, label it came from
    for size, value, count in zip(sizes, values, counts, strict=True):
        taken = np.arange(count + 1)
        more = used[None, :] + size * taken[:, None]
        value_of = worth[None, :] + value * taken[:, None]
        rows, columns = np.nonzero(more <= room)
        more, value_of = more[rows, columns], value_of[rows, columns]
        keep = _undominated(more, value_of, 0.0)
        if len(keep) > _MOST_LABELS:
            keep, exact = _undominated(more, value_of, room / _BUCKETS), False
        used, worth = more[keep], value_of[keep]
        steps.append((rows[keep], columns[keep]))
    label = int(worth.argmax())
    chosen = []
    for taken, origin in reversed(steps):
        chosen.append(int(taken[label]))
        label = int(origin[label])
    return chosen[::-1], exact


def _undominated(used: np.ndarray, worth: np.ndarray, step: float) -> np.ndarray:
    """Rows with more value than all that use less, by bytes; of those within `step` bytes the most valuable."""
    order = np.lexsort((-worth, used))
    before = np.maximum.accumulate(np.concatenate([[-1.0], worth[order]]))[:-1]
    order = order[worth[order] > before * (1 + 1e-12)]
    if step:
        bucket = used[order] // step
        order = order[np.append(bucket[1:] != bucket[:-1], True)]
    return order


def _least(task: Offload, kept: Sequence[_Kept] | None) -> float:
    """Seconds that no choice can go below: what computes, what the link of one device brings, what the disk gives.

    Of the bytes that cannot be in faster places each counts at the rate of the module that is fetched fastest per byte.
    """
    least = _computing(task)
    times = _times(task)
    sizes, stored = np.maximum(np.array(task.nbytes, float), 1.0), np.maximum(np.array(task.stored_bytes, float), 1.0)
    near = np.array(task.cpu_seconds if task.cpu_bytes > 0 else task.disk_seconds)
    near = np.where((times > 0) & np.isfinite(near), near, 0.0)
    for device, stay in enumerate(kept or ()):
        mine = np.array(task.device) == device
        least = max(least, float((near * times)[mine].sum()) - stay.most_saved)
    over = float(np.minimum(stored, sizes).sum()) - sum(task.room_bytes) - task.cpu_bytes
    if over > 0 and task.disk_bytes > 0:
        least = max(least, over * float((np.array(task.disk_seconds) * times / np.maximum(stored, sizes)).min()))
    return least


def _times(task: Offload) -> np.ndarray:
    """Calls per module."""
    return np.bincount(np.array([call.module for call in task.calls], int), minlength=task.size)


def _swapped(task: Offload, places: tuple[int, ...], seconds: float, least: float) -> tuple[int, ...]:
    """Swap the places of two modules of one kind while that makes the pass shorter."""
    left = _MOST_EVENTS
    best, improved = list(places), True
    while improved and left > 0 and seconds > least * (1 + _SAME):
        improved = False
        for a, b in _pairs(task, best):
            tried = best.copy()
            tried[a], tried[b] = tried[b], tried[a]
            left -= len(task.calls)
            if left < 0:
                break
            now = pass_seconds(task, tried)
            if now < seconds * (1 - _SAME) and has_room(task, tried):
                best, seconds, improved = tried, now, True
    return tuple(best)


def _pairs(task: Offload, places: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours of one kind in different places, then pairs further apart."""
    kinds = _kinds(task, range(task.size))
    for distance in (1, 2, 3, 5, 8, 13):
        for kind in kinds:
            for at in range(len(kind) - distance):
                if places[kind[at]] != places[kind[at + distance]]:
                    yield kind[at], kind[at + distance]

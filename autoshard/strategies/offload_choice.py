"""Which modules stay on their device, and where the others are kept: on the CPU or on disk.

As few modules are offloaded as the room of each device asks for, found by bisection. What is offloaded comes evenly:

    resident, offloaded       r r r r s s s s      link idle, then every call waits
    evenly                   r s r s r s r s      each fetch has two calls to hide behind

Large modules need large slots: every size is tried as the largest that is offloaded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from autoshard.engine.offloaded import SLOTS

RESIDENT, CPU, DISK = 0, 1, 2
_MOST_SIZES = 12
"""Sizes of modules of one device that are tried as the largest that is offloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Movable:
    """A module that may be offloaded.

    Attributes:
        device: the number of the one that it computes on; calls: how many a pass has.
        nbytes: on that device; stored_bytes: on the CPU or on disk.
        cpu_seconds, disk_seconds: of bringing it once from there; inf if it can't be kept there.
    """

    device: int
    calls: int
    nbytes: int
    stored_bytes: int
    cpu_seconds: float
    disk_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """The modules that may be offloaded, in order of their first calls, and the room there is.

    Attributes:
        room_bytes: per device, for residents and its two largest offloaded modules.
        cpu_bytes, disk_bytes: room for offloaded modules.
    """

    modules: tuple[Movable, ...]
    room_bytes: tuple[int, ...]
    cpu_bytes: int = 0
    disk_bytes: int = 0


def choose(task: Offload) -> tuple[int, ...] | None:
    """Return a place per module for a short pass; None if there is no room."""
    away = offloaded(task)
    if away is None:
        return None
    places = [RESIDENT] * len(task.modules)
    for number in away:
        places[number] = CPU
    for number in _on_disk(task, away):
        places[number] = DISK
    on_cpu, on_disk = (
        sum(one.stored_bytes for one, place in zip(task.modules, places, strict=True) if place == store)
        for store in (CPU, DISK)
    )
    return tuple(places) if on_cpu <= task.cpu_bytes and on_disk <= task.disk_bytes else None


def offloaded(task: Offload) -> list[int] | None:
    """Return the numbers of the modules that do not stay; None where two slots have no room."""
    found: list[int] = []
    for device, room in enumerate(task.room_bytes):
        mine = [number for number, module in enumerate(task.modules) if module.device == device]
        away = _fewest(task, mine, room)
        if away is None:
            return None
        found += away
    return sorted(found)


def _fewest(task: Offload, mine: Sequence[int], room: int) -> list[int] | None:
    """Modules of one device without which the others fit beside two slots, such that least is brought."""
    nbytes = {number: task.modules[number].nbytes for number in mine}
    total = sum(nbytes.values())
    if total <= room or not mine:
        return [] if total <= room else None

    def fits(away: Sequence[int]) -> bool:
        return total - sum(sorted((nbytes[number] for number in away), reverse=True)[SLOTS:]) <= room

    def bringing(away: Sequence[int]) -> tuple[float, int]:
        """Seconds per pass, from where modules are near; of equal ones the fewest bytes."""
        rows = [task.modules[number] for number in away]
        near = [(row.cpu_seconds if task.cpu_bytes > 0 else row.disk_seconds, row.calls) for row in rows]
        return sum(seconds * calls for seconds, calls in near if isfinite(seconds)), sum(row.nbytes for row in rows)

    sizes = sorted(set(nbytes.values()), reverse=True)
    tried = sizes[:: -(-len(sizes) // _MOST_SIZES)]
    options = [_least(task, [number for number in mine if nbytes[number] <= largest], fits) for largest in tried]
    return min((option for option in options if option is not None), key=bringing, default=None)


def _on_disk(task: Offload, away: Sequence[int]) -> list[int]:
    """The fewest modules that are kept on disk, so that the CPU has room for the others."""
    able = [number for number in away if isfinite(task.modules[number].disk_seconds)]
    total = sum(task.modules[number].stored_bytes for number in away)

    def fits(chosen: Sequence[int]) -> bool:
        return total - sum(task.modules[number].stored_bytes for number in chosen) <= task.cpu_bytes

    return able if not task.cpu_bytes else _least(task, able, fits) or []


def _least(task: Offload, numbers: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> list[int] | None:
    """Pick as few as fit: those first that are called less, then the largest; of equal ones some at even distances."""
    by_kind: dict[tuple[int, int], list[int]] = {}
    for number in numbers:
        by_kind.setdefault((task.modules[number].calls, -task.modules[number].nbytes), []).append(number)
    kinds = [by_kind[key] for key in sorted(by_kind)]

    def pick(count: int) -> list[int]:
        found: list[int] = []
        for kind in kinds:
            part = min(count - len(found), len(kind))
            found += [kind[(2 * i + 1) * len(kind) // (2 * part)] for i in range(part)]
        return found

    if not fits(pick(len(numbers))):
        return None
    low, high = 0, len(numbers)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(pick(middle)) else (middle + 1, high)
    return pick(high)

"""Which modules stay on their device, and where the others are kept: on the CPU or on disk.

As few modules are streamed as the room of each device asks for, found by bisection. What is streamed comes evenly:

    resident, streamed       r r r r s s s s      link idle, then every call waits
    evenly                   r s r s r s r s      each fetch has two calls to hide behind

Large modules need large slots: every size is tried as the largest that is streamed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.engine.streamed import SLOTS, StreamCall

RESIDENT, CPU, DISK = 0, 1, 2
_MOST_SIZES = 12
"""Sizes of modules of one device that are tried as the largest that is streamed."""


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


def choose(task: Offload) -> tuple[int, ...] | None:
    """Return a place per module for a short pass; None if there is no room."""
    away = streamed(task)
    if away is None:
        return None
    places = np.full(task.size, RESIDENT)
    places[away] = CPU
    on_disk = _on_disk(task, away)
    places[on_disk] = DISK
    found = tuple(places.tolist())
    return found if has_room(task, found) else None


def streamed(task: Offload) -> list[int] | None:
    """Return the modules that do not stay, in order of their calls; None where two slots have no room."""
    found: list[int] = []
    for device, room in enumerate(task.room_bytes):
        mine = [module for module in _in_order(task) if task.device[module] == device]
        if sum(task.nbytes[module] for module in mine) <= room:
            continue
        options = [_fewest(task, mine, room, largest) for largest in _sizes(task, mine)]
        fitting = [option for option in options if option is not None]
        if not fitting:
            return None
        found += min(fitting, key=lambda option: sum(_fetching(task, module) for module in option))
    place = {module: at for at, module in enumerate(_in_order(task))}
    return sorted(found, key=place.__getitem__)


def _sizes(task: Offload, modules: Sequence[int]) -> list[int]:
    """Sizes of modules, the largest first; of many, some."""
    sizes = sorted({task.nbytes[module] for module in modules}, reverse=True)
    return sizes[:: -(-len(sizes) // _MOST_SIZES)]


def _fewest(task: Offload, modules: Sequence[int], room: int, largest: int) -> list[int] | None:
    """The fewest modules of one device, none above a size, without which the others fit beside two slots."""
    able = [module for module in modules if task.nbytes[module] <= largest]
    total = sum(task.nbytes[module] for module in modules)

    def fits(away: Sequence[int]) -> bool:
        sizes = sorted((task.nbytes[module] for module in away), reverse=True)
        return total - sum(sizes[SLOTS:]) <= room

    return _least(task, able, fits)


def _on_disk(task: Offload, away: Sequence[int]) -> list[int]:
    """The fewest modules that are kept on disk, so that the CPU has room for the others."""
    able = [module for module in away if np.isfinite(task.disk_seconds[module])]
    total = sum(task.stored_bytes[module] for module in away)

    def fits(chosen: Sequence[int]) -> bool:
        return total - sum(task.stored_bytes[module] for module in chosen) <= task.cpu_bytes

    return able if not task.cpu_bytes else _least(task, able, fits) or []


def _least(task: Offload, modules: Sequence[int], fits: Callable[[Sequence[int]], bool]) -> list[int] | None:
    """Pick as few as fit: those first that are called less, then the largest; of equal ones some at even distances."""
    times = _times(task).tolist()
    by_kind: dict[tuple[int, int], list[int]] = {}
    for module in modules:
        by_kind.setdefault((times[module], -task.nbytes[module]), []).append(module)
    kinds = [by_kind[key] for key in sorted(by_kind)]

    def pick(count: int) -> list[int]:
        found: list[int] = []
        for kind in kinds:
            part = min(count - len(found), len(kind))
            found += [kind[(2 * i + 1) * len(kind) // (2 * part)] for i in range(part)]
        return found

    if not fits(pick(len(modules))):
        return None
    low, high = 0, len(modules)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(pick(middle)) else (middle + 1, high)
    return pick(high)


def _in_order(task: Offload) -> list[int]:
    """All modules by their first calls, those without at the end."""
    called = dict.fromkeys(call.module for call in task.calls)
    return [*called, *(module for module in range(task.size) if module not in called)]


def _times(task: Offload) -> np.ndarray:
    """Calls per module."""
    return np.bincount(np.array([call.module for call in task.calls], int), minlength=task.size)


def _fetching(task: Offload, module: int) -> float:
    """Seconds per pass of bringing a module for each of its calls, from where it is near."""
    near = task.cpu_seconds[module] if task.cpu_bytes > 0 else task.disk_seconds[module]
    seconds = near * int(_times(task)[module]) if np.isfinite(near) else 0.0
    return seconds + 1e-18 * task.nbytes[module]


def has_room(task: Offload, places: Sequence[int]) -> bool:
    """Whether residents, slots and what is kept elsewhere all have room."""
    at, stored, sizes = np.array(places, int), np.array(task.stored_bytes, np.int64), np.array(task.nbytes, np.int64)
    if stored[at == CPU].sum() > task.cpu_bytes or stored[at == DISK].sum() > task.disk_bytes:
        return False
    if not np.isfinite(np.array(task.disk_seconds)[at == DISK]).all():
        return False
    for device, room in enumerate(task.room_bytes):
        mine = np.array(task.device) == device
        slots = np.sort(sizes[mine & (at != RESIDENT)])[-SLOTS:]
        if sizes[mine & (at == RESIDENT)].sum() + slots.sum() > room:
            return False
    return True

"""choose against all choices that there are, and what must hold of every answer."""

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.strategies.offload_choice import CPU, DISK, RESIDENT, SLOTS, Movable, Offload, choose
from tests.engine.test_stream_program import Call, passes

INFINITE = float("inf")


Task = tuple[Offload, list[Call], float]


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    size, devices = draw(st.integers(1, 6)), draw(st.integers(1, 2))
    nbytes = draw(st.lists(st.sampled_from([2, 3, 5, 8]), min_size=size, max_size=size))
    device = [module * devices // size for module in range(size)]
    order = [*range(size), *draw(st.lists(st.integers(0, size - 1), max_size=2))]
    seconds = st.sampled_from([0.0, 1.0, 3.0, 6.0])
    calls = [(m, f"cuda:{device[m]}", draw(seconds) / 4, draw(seconds)) for m in order]
    cpu, disk = draw(st.sampled_from([(0, 999), (999, 0), (9, 999), (20, 0), (0, 0), (14, 9)]))
    ratio = draw(st.sampled_from([0.3, 0.8, 1.5, 3.0]))
    modules = tuple(
        Movable(
            device=device[m], calls=order.count(m), nbytes=n, stored_bytes=n,
            cpu_seconds=n * ratio if cpu else INFINITE, disk_seconds=n * ratio * 2.5 if disk else INFINITE,
        )
        for m, n in enumerate(nbytes)
    )  # fmt: skip
    room = tuple(draw(st.integers(0, sum(nbytes))) for _ in range(devices))
    return Offload(modules=modules, room_bytes=room, cpu_bytes=cpu, disk_bytes=disk), calls, draw(seconds)


def has_room(task: Offload, places: Sequence[int]) -> bool:
    """Whether residents, slots and what is kept elsewhere all have room."""
    at = list(zip(task.modules, places, strict=True))
    stored = {store: sum(one.stored_bytes for one, place in at if place == store) for store in (CPU, DISK)}
    if stored[CPU] > task.cpu_bytes or stored[DISK] > task.disk_bytes:
        return False
    if any(one.disk_seconds == INFINITE for one, place in at if place == DISK):
        return False
    for device, room in enumerate(task.room_bytes):
        mine = [(one.nbytes, place) for one, place in at if one.device == device]
        slots = sorted((nbytes for nbytes, place in mine if place != RESIDENT), reverse=True)[:SLOTS]
        if sum(nbytes for nbytes, place in mine if place == RESIDENT) + sum(slots) > room:
            return False
    return True


def pass_seconds(task: Task, places: Sequence[int]) -> float:
    """Seconds of a pass in the long run."""
    given, calls, after = task
    fetches = [
        (0.0, one.cpu_seconds, one.disk_seconds)[place] for one, place in zip(given.modules, places, strict=True)
    ]
    return passes(calls, after, fetches, [place == DISK for place in places]).seconds


def best_of_all(task: Task) -> float | None:
    given = task[0]
    allowed = [place for place, room in ((RESIDENT, 1), (CPU, given.cpu_bytes), (DISK, given.disk_bytes)) if room]
    fitting = (places for places in product(allowed, repeat=len(given.modules)) if has_room(given, places))
    return min((pass_seconds(task, places) for places in fitting), default=None)


@settings(max_examples=50)
@given(tasks())
def test_near_brute_force(task: Task) -> None:
    """Evenly spaced ones of a few modules may be the wrong ones: one in twenty is slower by more than 5 %."""
    places, best = choose(task[0]), best_of_all(task)
    assert (places is None) == (best is None)
    if places is not None:
        assert has_room(task[0], places) and pass_seconds(task, places) <= 1.5 * best


def modules_of(sizes: Sequence[int], fetch: Sequence[float], room: int) -> Task:
    """Modules on one device that compute for a second each, kept on the CPU."""
    modules = tuple(
        Movable(device=0, calls=1, nbytes=n, stored_bytes=n, cpu_seconds=seconds, disk_seconds=INFINITE)
        for n, seconds in zip(sizes, fetch, strict=True)
    )
    calls = [(m, "cuda:0", 0.0, 1.0) for m in range(len(sizes))]
    return Offload(modules=modules, room_bytes=(room,), cpu_bytes=999), calls, 0.0


def found(task: Task) -> tuple[tuple[int, ...], float]:
    """Places, and the seconds of a pass with them."""
    places = choose(task[0])
    assert places is not None
    return places, pass_seconds(task, places)


@settings(max_examples=40)
@given(st.integers(3, 48), st.sampled_from([0.2, 0.7, 1.0, 2.0, 5.0]), st.data())
def test_equal_blocks_reach_the_bound_whatever_the_room(count: int, ratio: float, data: st.DataObject) -> None:
    room = data.draw(st.integers(8, 4 * count))
    places, seconds = found(modules_of([4] * count, [ratio] * count, room))
    stay = count if room == 4 * count else (room - 8) // 4
    assert places.count(RESIDENT) == stay
    assert seconds == pytest.approx(max(count, (count - stay) * ratio), rel=1e-6)


def test_kinds_of_modules_are_chosen_together() -> None:
    """A large head keeps two slots busy if it is offloaded; if it stays, smaller slots leave room for more blocks."""
    sizes = [4] * 30 + [20]
    places, seconds = found(modules_of(sizes, [float(size) for size in sizes], 70))
    assert places[30] == RESIDENT and places.count(RESIDENT) == 1 + (70 - 20 - 8) // 4
    assert seconds == pytest.approx(sum(sizes[m] for m in range(31) if places[m] == CPU), rel=1e-3)

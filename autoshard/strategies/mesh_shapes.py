"""Meshes that make sense on some devices: replicas x stages x tensor-parallel ranks, micro-batches and schedule.

8 devices      2 x 2 x 2, 1 x 4 x 2, 4 x 1 x 2, …      all ways to write the number of devices as a product
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from autoshard.cluster.cluster import Device
from autoshard.errors import SpecError
from autoshard.schedules.orders import check_schedule

_MOST_PARTS = 8
"""Micro-batches per device above which there is nothing to win: the bubble is below an eighth of a device's time."""
_PER_DEVICE = (2, 4)
"""Stages per device that are tried where they are interleaved."""
_MOST_ACTIONS = 5_000
"""Actions of a schedule up to which stages are interleaved: more of them are not worth the time of the search."""
_FEW = 8
"""Devices up to which tensor-parallel groups may span hosts; up to twice as many, every number of them is tried."""
_MOST_ORDERS = 24
"""Orders of unequal devices that are tried for the stages of a pipeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One way to use `data * pipeline * tensor` devices.

    `variant`: which of several sets of cuts; `devices`: numbers of the devices that are used, by rank; `order`: how
    much the schedule is preferred among equals, less is better.
    """

    data: int
    pipeline: int
    tensor: int
    devices: tuple[int, ...]
    microbatches: int = 1
    schedule: str = "none"
    per_device: int = 1
    variant: int = 0
    order: int = 0

    @property
    def size(self) -> int:
        """How many devices it uses."""
        return self.data * self.pipeline * self.tensor

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return self.pipeline * self.per_device

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The smaller, the simpler: fewer devices, no second stage per device, fewer micro-batches."""
        return self.size, self.per_device, self.order, self.microbatches, self.pipeline, self.tensor, self.variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What shapes are asked for: the units of the model, rows of the batch, and what the user fixed.

    `processes`: how many run, 0 if all devices are used from one.
    """

    units: int
    rows: int
    training: bool
    processes: int
    num_microbatches: int | None
    schedule: str | None


def pipelines(asked: Asked, devices: Sequence[Device], seconds: Sequence[float]) -> Iterator[Shape]:
    """Yield stages alone, on as many devices as there are processes, or on any number of them."""
    count = len(devices)
    most = min(count, asked.units)
    every = [asked.processes] if asked.processes else range(2, most + 1) if count <= _FEW else [
        *(p for p in (2, 4, 8, 16, 32, 64, 128) if p < count), count
    ]  # fmt: skip
    for positions in every:
        if positions <= most:
            orders = _orders(devices, seconds, positions)
            for schedule in _schedules(asked, positions, asked.rows, bool(asked.processes), alone=len(every) == 1):
                for order in orders:
                    yield Shape(data=1, pipeline=positions, tensor=1, devices=order, **schedule)


def meshes(asked: Asked, devices: Sequence[Device], seconds: Sequence[float]) -> Iterator[Shape]:
    """Yield meshes of which at least two dimensions are larger than 1. Ranks of a group are neighbours."""
    count = len(devices)
    hosts = [device.host for device in devices]
    widest = count if count <= _FEW else max(map(hosts.count, hosts))
    fastest = sorted(range(count), key=lambda i: seconds[i])
    for used in [asked.processes] if asked.processes else _counts(count):
        numbers = tuple(sorted(fastest[:used]))
        for data, pipeline, tensor in factorings(used):
            if sum(n > 1 for n in (data, pipeline, tensor)) < 2 or tensor > widest or data > asked.rows:
                continue
            if pipeline == 1:
                schedules: list[dict[str, Any]] = [{}] if asked.num_microbatches in (None, 1) else []
            else:
                schedules = list(_schedules(asked, pipeline, asked.rows // data, True, alone=False))
            for schedule in schedules:
                for variant in (0, 1) if tensor > 1 else (0,):
                    yield Shape(
                        data=data, pipeline=pipeline, tensor=tensor, devices=numbers, variant=variant, **schedule
                    )  # fmt: skip


def factorings(count: int) -> Iterator[tuple[int, int, int]]:
    """All (data, pipeline, tensor) whose product is `count`."""
    for tensor in (n for n in range(1, count + 1) if count % n == 0):
        for pipeline in (n for n in range(1, count // tensor + 1) if (count // tensor) % n == 0):
            yield count // tensor // pipeline, pipeline, tensor


def _counts(count: int) -> list[int]:
    """How many devices to use: of many all, or a power of two."""
    if count <= 2 * _FEW:
        return list(range(count, 1, -1))
    return [count, *(2**k for k in range(count.bit_length() - 1, 0, -1) if 2**k < count)]


def _orders(devices: Sequence[Device], seconds: Sequence[float], positions: int) -> list[tuple[int, ...]]:
    """Orders of so many devices for the stages, those that differ; the given one first."""
    numbers = range(len(devices))
    kinds = [(device.speed, device.memory_bytes, device.overhead_bytes) for device in devices]
    if len(set(kinds)) == 1 and len({device.host for device in devices}) == 1:
        return [tuple(numbers[:positions])]
    several = [
        tuple(numbers),
        *(sorted(numbers, key=lambda i: (way * seconds[i], i)) for way in (1, -1)),
        sorted(numbers, key=lambda i: (-devices[i].budget_bytes, seconds[i], i)),
        *(permutations(numbers, positions) if len(devices) <= 4 else ()),
    ]
    found: dict[tuple[object, ...], tuple[int, ...]] = {}
    for order in several:
        picked = tuple(order[:positions])
        found.setdefault(tuple((kinds[i], devices[i].host) for i in picked), picked)
    return list(found.values())[:_MOST_ORDERS]


def _schedules(
    asked: Asked, positions: int, rows: int, processes: bool, *, alone: bool
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Yield the ways to run so many stages, the simplest first. Raises `SpecError` where nothing else is asked for."""
    training, asked_for = asked.training, asked.schedule
    names = [asked_for] if asked_for else ["gpipe"] if not training else ["gpipe", "1f1b"]
    if processes and training and asked_for is None:
        names = ["1f1b", "gpipe", "interleaved", "zero-bubble"]
    parts = [asked.num_microbatches] if asked.num_microbatches else _parts(rows, positions, ragged=not processes)
    for order, name in enumerate(names):
        for per_device in _PER_DEVICE if name == "interleaved" else (1,):
            if positions * per_device > asked.units:
                continue
            for count in parts:
                if per_device > 1 and 2 * positions * per_device * count > _MOST_ACTIONS and not asked_for:
                    continue
                try:
                    check_schedule(name, positions, count, stages_per_device=per_device, training=training)
                except SpecError:
                    if asked_for and asked.num_microbatches and alone:
                        raise
                    continue
                yield {"microbatches": count, "schedule": name, "per_device": per_device, "order": order}


def _parts(size: int, positions: int, *, ragged: bool) -> list[int]:
    """Numbers of micro-batches: those that divide the batch, up to where there is nothing to win.

    Where the last ones may be smaller (`ragged`), also those that the positions divide.
    """
    found = [m for m in range(1, size + 1) if size % m == 0 and m <= _MOST_PARTS * positions]
    if ragged:
        found = sorted({*found, *(m for m in (positions, 2 * positions, 4 * positions) if m <= size)})
    return found if len(found) <= 8 else found[-8:]

"""Random small chains: skips, loops, ties, pins, unequal devices and links, tight memory."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.strategies.chain import Chain


def random_chain(seed: int, *, per_pair: bool | None = None, max_units: int = 7, max_devices: int = 3) -> Chain:
    """Make one chain; the seed decides which of the features it has."""
    rng = np.random.default_rng(seed)
    flags = rng.random(10)
    units, devices = int(rng.integers(1, max_units + 1)), int(rng.integers(1, max_devices + 1))
    work = rng.integers(0, 20, units)
    if flags[0] < 0.3:
        speed = np.ones(devices, int)
    else:
        speed = rng.integers(1, 4, devices)
    seconds = (work[None] * speed[:, None]).astype(float)
    if flags[1] < 0.3:
        seconds = rng.integers(0, 20, (devices, units)).astype(float)
    resident, transient = rng.integers(0, 30, units), rng.integers(0, 8, units)
    tensors, edges = [], []
    for unit in range(-1, units):  # the hidden state, and for some tensors skips and loops
        consumers = {unit + 1}
        if flags[2] < 0.6:
            consumers |= set(rng.integers(0, units + 1, int(rng.integers(0, 4))).tolist())
            if flags[3] < 0.7:
                consumers = {c for c in consumers if c > unit}
        edges += [(len(tensors), c) for c in sorted(consumers)]
        tensors.append((unit, int(rng.integers(0, 12)), int(rng.integers(1, 3))))
    uneven = flags[4] < 0.4 if per_pair is None else per_pair
    latency = rng.integers(0, 4, (devices, devices)) if uneven else np.full((devices, devices), int(rng.integers(0, 4)))
    bandwidth = (
        rng.integers(1, 6, (devices, devices)) if uneven else np.full((devices, devices), int(rng.integers(1, 6)))
    )
    total = resident.sum() + 12
    capacity = rng.integers(1, int(total) + 2, devices) if flags[5] < 0.7 else np.full(devices, total * 3)
    if flags[6] < 0.3:
        capacity[:] = capacity.max()
    ties = []
    if units >= 3 and flags[7] < 0.4:
        for _ in range(int(rng.integers(1, 3))):
            members = tuple(sorted(rng.choice(units, int(rng.integers(2, 4)), replace=False).tolist()))
            ties.append(members)
            edges += [(len(tensors), unit) for unit in members[1:]]
            tensors.append((members[0], int(rng.integers(1, 20)), 0))
    pins = {}
    if flags[8] < 0.25:
        for unit in rng.choice(units, int(rng.integers(1, min(units, 3) + 1)), replace=False):
            pins[int(unit)] = int(rng.integers(0, devices))
    return Chain(
        paths=tuple((f"unit{u}",) for u in range(units)), devices=tuple(f"cpu:{d}" for d in range(devices)),
        seconds=seconds, resident_bytes=resident, transient_bytes=transient,
        tensor_unit=np.array([t[0] for t in tensors]), tensor_bytes=np.array([t[1] for t in tensors]),
        tensor_copies=np.array([t[2] for t in tensors]),
        edge_tensor=np.array([e[0] for e in edges], int), edge_unit=np.array([e[1] for e in edges], int),
        ties=tuple(ties), duplicate_ties=bool(flags[9] < 0.7), capacity_bytes=capacity,
        link_seconds=latency.astype(float), link_bytes_per_second=bandwidth.astype(float),
        pins=pins, root_unit=int(rng.integers(0, units)) if flags[0] > 0.8 else 0,
    )  # fmt: skip


def with_devices(chain: Chain, *, keep: Iterable[int] | None = None, **changes: Any) -> Chain:
    """The chain on some of its devices, or with other figures."""
    if keep is not None:
        rows = list(keep)
        square = np.ix_(rows, rows)
        changes |= {
            "devices": tuple(chain.devices[d] for d in rows),
            "seconds": chain.seconds[rows],
            "capacity_bytes": chain.capacity_bytes[rows],
            "link_seconds": chain.link_seconds[square],
            "link_bytes_per_second": chain.link_bytes_per_second[square],
        }
    return replace(chain, **changes)

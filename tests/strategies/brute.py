"""Every assignment the planners may choose from, priced one by one: the yardstick of the solver tests."""

from itertools import combinations_with_replacement, permutations, product

import numpy as np

from autoshard.strategies.chain import Chain


def all_assignments(chain: Chain, order: str) -> np.ndarray:
    """[A, n] device per unit: contiguous for units that are neither pinned nor follow a tie."""
    units, devices = chain.num_units, chain.num_devices
    rows = []
    orders = list(permutations(range(devices))) if order == "any" else [tuple(range(devices))]
    for merged in product((False, True) if chain.duplicate_ties else (True,), repeat=len(chain.ties)):
        leader = list(range(units))
        for tie, merge in zip(chain.ties, merged, strict=True):
            if merge:
                roots = {leader[unit] for unit in tie}
                leader = [min(roots) if at in roots else at for at in leader]
        pin = {leader[unit]: device for unit, device in chain.pins.items()}
        if any(pin[leader[unit]] != device for unit, device in chain.pins.items()):
            continue
        free = [unit for unit in range(units) if leader[unit] == unit and unit not in pin]
        cuts = np.array(list(combinations_with_replacement(range(len(free) + 1), devices - 1)), int)
        stage = (
            (np.arange(len(free))[None, :, None] >= cuts[:, None, :]).sum(-1) if len(free) else np.zeros((1, 0), int)
        )
        for devices_in_order in orders:
            place = np.zeros((len(stage), units), int)
            for unit, device in pin.items():
                place[:, unit] = device
            place[:, free] = np.array(devices_in_order)[stage]
            rows.append(place[:, leader])
    return np.unique(np.concatenate(rows), axis=0) if rows else np.zeros((0, units), int)


def price_all(chain: Chain, place: np.ndarray) -> dict[str, np.ndarray]:
    """Price [A, n] assignments at once by the cost model of `autoshard.strategies.chain`, inf where not feasible."""
    count, devices = len(place), chain.num_devices
    rows = np.arange(count)
    seconds, memory = np.zeros((count, devices)), np.zeros((count, devices))
    for device in range(devices):
        here = place == device
        seconds[:, device] = (here * chain.seconds[device]).sum(1)
        memory[:, device] = (here * chain.resident_bytes).sum(1) + (here * chain.transient_bytes).max(1)
    used = np.stack([(place == device).any(1) for device in range(devices)], 1)
    outer = np.concatenate([place, place[:, [chain.root_unit]]], 1)
    for tensor, source in enumerate(chain.tensor_unit):
        origin = place[:, chain.root_unit] if source < 0 else place[:, source]
        arrived = np.zeros((count, devices), bool)
        for unit in chain.edge_unit[chain.edge_tensor == tensor]:
            target = outer[:, unit]
            new = (target != origin) & ~arrived[rows, target]
            once = (
                chain.link_seconds[origin, target]
                + chain.tensor_bytes[tensor] / chain.link_bytes_per_second[origin, target]
            )
            seconds[rows[new], target[new]] += chain.tensor_copies[tensor] * once[new]
            memory[rows[new], target[new]] += chain.tensor_bytes[tensor]
            arrived[rows, target] |= new
    feasible = np.ones(count, bool)
    for unit, device in chain.pins.items():
        feasible &= place[:, unit] == device
    feasible &= ((memory <= chain.capacity_bytes) | ~used).all(1)
    load = np.where(used, memory / np.maximum(chain.capacity_bytes, 1e-9), 0).max(1)
    figures = {"latency": seconds.sum(1), "throughput": seconds.max(1), "memory": load}
    return {name: np.where(feasible, figure, np.inf) for name, figure in figures.items()}

"""Time of the planning step alone: `python benchmarks/planning.py`. Medians of several runs, one process, no model.

By the clock, and of the processor: on a machine shared with other work the second says more.

The chains look like a decoder: a hidden state from unit to unit, residuals, a mask and two rotary tables that every
unit after them reads, a big first and last unit, memory for about 1.3 times the model over all devices.
"""

import statistics
import sys
import time

import numpy as np

from autoshard.strategies.chain import Chain
from autoshard.strategies.solve import solve


def decoder_chain(units: int, devices: int, *, kinds: int = 1, hosts: int = 1, room: float = 1.3) -> Chain:
    """Make a decoder-like chain on `devices` devices of `kinds` speeds, spread over `hosts` hosts."""
    rng = np.random.default_rng(units * 1000 + devices)
    resident = rng.choice([200, 300, 500], units) * 2**20
    resident[[0, -1]] = 600 * 2**20
    speed = np.linspace(1.0, 2.0, kinds)[np.arange(devices) * kinds // devices]
    seconds = resident / 2e12 * speed[:, None]
    source = np.concatenate([[-1, 0, 0, 0], np.arange(units), np.arange(units - 2)])
    nbytes = np.concatenate([[1 << 14, 1 << 22, 1 << 18, 1 << 18], np.full(2 * units - 2, 1 << 23)])
    shared = [(x, u) for x in range(1, 4) for u in range(1, units - 1)]
    hidden = [(4 + u, u + 1) for u in range(units)]
    residual = [(4 + units + u, u + 2) for u in range(units - 2)]
    edges = np.array([(0, 0), *shared, *hidden, *residual])
    host = np.arange(devices) * hosts // devices
    same = host[:, None] == host[None, :]
    total = float(resident.sum())
    return Chain(
        paths=tuple((f"layers.{u}",) for u in range(units)), devices=tuple(f"cuda:{d}" for d in range(devices)),
        seconds=seconds, resident_bytes=resident, transient_bytes=np.full(units, 64 * 2**20),
        tensor_unit=source, tensor_bytes=nbytes, tensor_copies=np.ones(len(source)),
        edge_tensor=edges[:, 0], edge_unit=edges[:, 1],
        capacity_bytes=np.full(devices, max(total * room / devices, 1.2e9)),
        link_seconds=np.where(same, 1e-5, 5e-5), link_bytes_per_second=np.where(same, 2e11, 2e10),
    )  # fmt: skip


CASES = {
    "84 units, 8 equal devices": (84, 8, {}),
    "84 units, 8 equal devices, one is enough": (84, 8, {"room": 10.0}),
    "84 units, 8 devices of 2 kinds, any order": (84, 8, {"kinds": 2}),
    "84 units, 8 devices of 8 kinds, any order": (84, 8, {"kinds": 8}),
    "84 units, 2 hosts of 4, any order": (84, 8, {"hosts": 2}),
    "1,137 units, 16 equal devices": (1137, 16, {}),
    "1,137 units, 2 hosts of 8": (1137, 16, {"hosts": 2}),
    "1,000 units, 64 equal devices": (1000, 64, {}),
    "1,000 units, 64 devices of 2 kinds": (1000, 64, {"kinds": 2}),
    "20,000 units, 8 equal devices": (20_000, 8, {}),
    "200,000 units, 8 equal devices": (200_000, 8, {}),
    "200,000 units, 8 devices of 2 kinds": (200_000, 8, {"kinds": 2}),
}


def main(pattern: str = "") -> None:
    for name, (units, devices, options) in CASES.items():
        if pattern not in name:
            continue
        chain = decoder_chain(units, devices, **options)
        for objective in ("latency", "throughput", "memory"):
            times, processor, repeats = [], [], 5 if units < 500 else 1 if units > 10_000 else 3
            for _ in range(repeats):
                begin, begin_processor = time.perf_counter(), time.process_time()
                found = solve(chain, objective)
                times.append(time.perf_counter() - begin)
                processor.append(time.process_time() - begin_processor)
            gap = "no plan" if found is None else f"gap {found.value / max(found.bound, 1e-30) - 1:.2%}"
            clock, used = statistics.median(times) * 1e3, statistics.median(processor) * 1e3
            print(f"{name:43} {objective:11} {clock:8.1f} ms  processor {used:8.1f} ms  {gap}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

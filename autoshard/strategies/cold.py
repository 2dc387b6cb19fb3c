"""Cold parts on the CPU: what takes much room and is read little, while all that is read in every token stays on GPUs.

    layer     attention   experts (8 of 128 read per token)          a plan in contiguous parts gives whole layers to
    0         cuda:0      cpu                                        the CPU, with their attention; here only units go
    1         cuda:0      cpu                                        there that cost the fewest seconds per byte that
    2         cuda:0      cuda:0                                     they free: experts, and tables that are looked up
    3         cuda:1      cuda:1

The units that go are pinned, and the others are planned as always: the answer is compared with that of the whole chain.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.strategies.chain import Chain

_MORE = 1.04
"""Factor on the bytes that are moved away: what activations need beside what stays is known only afterwards."""
_WORTH = 0.95
"""The coldest units must cost at most this part of what as many bytes of the whole model cost on the CPU."""


def cold_pins(chain: Chain) -> Mapping[int, int] | None:
    """Return pins that have the coldest units on "cpu"; None where that can't help."""
    others = [d for d, name in enumerate(chain.devices) if not name.startswith("cpu")]
    if "cpu" not in chain.devices or not others:
        return None
    cpu = chain.devices.index("cpu")
    room = float(np.maximum(chain.capacity_bytes[others], 0).sum())
    need = float(chain.resident_bytes.sum()) + len(others) * float(chain.transient_bytes.max(initial=0)) - room
    free = np.array([u for u in range(chain.num_units) if u not in chain.pins and chain.resident_bytes[u] > 0], int)
    if need <= 0 or not len(free):
        return None
    slower = chain.seconds[cpu] - chain.seconds[others].min(axis=0) + hops(chain, cpu, others[0])
    nbytes = np.maximum(chain.resident_bytes, 1)
    order = free[np.argsort(slower[free] / nbytes[free], kind="stable")]
    total, seconds = np.cumsum(nbytes[order]), np.cumsum(slower[order])
    last = int(np.searchsorted(total, need * _MORE))
    if last >= len(order) or seconds[last] >= _WORTH * seconds[-1] / total[-1] * total[last]:
        return None
    return {**chain.pins, **dict.fromkeys(order[: last + 1].tolist(), cpu)}


def hops(chain: Chain, cpu: int, other: int) -> np.ndarray:
    """Return the seconds of copying what each unit reads to the CPU and what it makes back, if all others are away."""
    nbytes, times = chain.tensor_bytes, chain.tensor_copies
    there = times * (chain.link_seconds[other, cpu] + nbytes / chain.link_bytes_per_second[other, cpu])
    back = times * (chain.link_seconds[cpu, other] + nbytes / chain.link_bytes_per_second[cpu, other])
    found = np.zeros(chain.num_units)
    inner = chain.edge_unit < chain.num_units
    np.add.at(found, chain.edge_unit[inner], there[chain.edge_tensor[inner]])
    used = np.unique(chain.edge_tensor)
    used = used[chain.tensor_unit[used] >= 0]
    np.add.at(found, chain.tensor_unit[used], back[used])
    return found


def explain_cold(
    chain: Chain, assignment: Sequence[int], seconds: float, instead: float | None
) -> tuple[str, ...]:  # fmt: skip
    """Say what is computed on the CPU and why that; `instead`: seconds of the best plan in contiguous parts."""
    cpu = chain.devices.index("cpu")
    moved = [unit for unit, device in enumerate(assignment) if device == cpu and chain.resident_bytes[unit] > 0]
    moved.sort(key=lambda unit: -chain.resident_bytes[unit])
    accelerators = [name for name in chain.devices if name != "cpu"]
    room = sum(max(float(chain.capacity_bytes[chain.devices.index(name)]), 0.0) for name in accelerators)
    names = ", ".join(chain.paths[unit][0] for unit in moved[:2])
    more = f" and {len(moved) - 2} more" if len(moved) > 2 else ""
    nbytes = float(chain.resident_bytes[moved].sum())
    slower = "no plan with neighbouring modules on each device fits"
    if instead is not None:
        slower = f"neighbouring modules on each device would take {format_seconds(instead)}"
    return (
        f"the model holds {format_bytes(float(chain.resident_bytes.sum()))} and {' and '.join(accelerators)} "
        f"{'have' if len(accelerators) > 1 else 'has'} {format_bytes(room)}: cpu computes {len(moved)} modules of "
        f"{format_bytes(nbytes)} itself, {names}{more}",
        "these are the modules that are read least for the room they take (experts, of which a token reads a few; "
        "tables, of which it reads a row); all others stay where reading is fast",
        f"{format_seconds(seconds)} in all; {slower}",
    )

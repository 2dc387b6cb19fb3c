"""What kernels and collectives reach of a card's published peaks, by generation and software stack.

The table `efficiency.csv` is fitted on published runs by `benchmarks/fit_efficiency.py`; each row names its sources.
"""

import csv
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Parts of peaks.

    Attributes:
        matmul: of FLOP/s, by a large product of m x k with k x n; half_size: the n or k at which half of that is
            reached; half_rows: the m, which is the tokens of a micro-batch.
        attention: of FLOP/s, by attention in forward; attention_backward: in backward.
        memory: of bytes per second, by element-wise kernels.
        local, network: of the bandwidths of links, by collectives.
        network_limit: most bytes per second of one device's part of the network, however fast its adapter is: kernels
            that copy beside computing don't fill adapters of 400 Gb/s.
        launch_seconds: of host time per op.
        overlap: how much slower compute is while a collective runs beside it.
    """

    matmul: float
    half_size: float
    half_rows: float
    attention: float
    attention_backward: float
    memory: float
    local: float
    network: float
    network_limit: float
    launch_seconds: float
    overlap: float


@cache
def efficiency_table() -> dict[tuple[str, str], Efficiency]:
    """(generation, stack) -> what is reached."""
    text = resources.files("autoshard.engine").joinpath("efficiency.csv").read_text(encoding="utf-8")
    names = [field.name for field in fields(Efficiency)]
    return {
        (row["generation"], row["stack"]): Efficiency(**{name: float(row[name]) for name in names})
        for row in csv.DictReader(text.splitlines())
    }


def efficiency_of(generation: str, stack: str) -> Efficiency:
    """The row of a generation and a stack; that of "any" generation where a card has none of its own."""
    table = efficiency_table()
    return table.get((generation, stack)) or table["any", stack]


GRAPH_KERNEL_SECONDS = 1.5e-6
"""Seconds between two kernels on the device, where the host has launched both long before (CUDA graphs, too)."""

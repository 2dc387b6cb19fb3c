"""Levels: the same chain with cuts only between whole modules of the tree, from the largest modules to the smallest.

A cut between two units splits every module that holds both. Inside a split module the arithmetic of its own forward (a
residual sum, say) may meet tensors of two devices, which the chain does not price; between large modules it rarely
does.

    layers.0.attn.q | layers.0.attn.k     splits "", layers, layers.0, layers.0.attn    depth 4
    layers.0.mlp.w  | layers.1.attn.q     splits "", layers                             depth 2

So plans are made at every depth and the exact estimate decides between them.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from autoshard.strategies.chain import Array, Chain, Tie


def cut_depths(paths: Sequence[tuple[str, ...]]) -> Array:
    """[n] per unit: how many modules a cut just before it splits (0 for the first unit)."""
    parts = [of_unit[0].split(".") if of_unit and of_unit[0] else [] for of_unit in paths]
    depths = np.zeros(len(parts), int)
    for unit in range(1, len(parts)):
        left, right = parts[unit - 1], parts[unit]
        same = 0
        while same < min(len(left), len(right)) and left[same] == right[same]:
            same += 1
        depths[unit] = same + 1
    return depths


def coarsen(chain: Chain, cuts: Array) -> tuple[Chain, Array]:
    """Join units between which no cut is allowed (`cuts[i]`: just before unit i); returns the chain and [n] groups.

    Units with different pins stay apart. The cost of an assignment is the same in both chains.
    """
    pin = np.full(chain.num_units, -1)
    for unit, device in chain.pins.items():
        pin[unit] = device
    starts = np.array(cuts, bool)
    starts[1:] |= pin[1:] != pin[:-1]
    starts[0] = True
    group = np.cumsum(starts) - 1
    first = np.flatnonzero(starts)
    maker = np.where(chain.tensor_unit < 0, -1, group[np.maximum(chain.tensor_unit, 0)])
    inner = chain.edge_unit < chain.num_units
    user = np.where(inner, group[np.minimum(chain.edge_unit, chain.num_units - 1)], len(first))
    ties = tuple(
        Tie(units=tuple(sorted({int(group[unit]) for unit in tie.units})), nbytes=tie.nbytes) for tie in chain.ties
    )
    stops = [*first[1:].tolist(), chain.num_units]
    joined = replace(
        chain,
        paths=tuple(
            tuple(path for unit in range(low, high) for path in chain.paths[unit])
            for low, high in zip(first.tolist(), stops, strict=True)
        ),
        seconds=np.add.reduceat(chain.seconds, first, axis=1),
        resident_bytes=np.add.reduceat(chain.resident_bytes, first),
        transient_bytes=np.maximum.reduceat(chain.transient_bytes, first),
        tensor_unit=maker,
        edge_unit=user,
        ties=tuple(tie for tie in ties if len(tie.units) > 1),
        pins={int(group[unit]): device for unit, device in chain.pins.items()},
        home=int(group[chain.home]),
        peaks=None if chain.peaks is None else chain.peaks.joined(group),
    )
    return joined, group

"""Levels: how many modules of the tree a cut between two units splits.

layers.0.attn.q | layers.0.attn.k     splits "", layers, layers.0, layers.0.attn    depth 4
layers.0.mlp.w  | layers.1.attn.q     splits "", layers                             depth 2
"""

from collections.abc import Sequence

import numpy as np


def cut_depths(paths: Sequence[tuple[str, ...]]) -> np.ndarray:
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

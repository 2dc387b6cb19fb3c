"""Short forms of vectors and lists for JSON."""

from collections import Counter
from collections.abc import Iterable

import numpy as np


def terms(vector: np.ndarray) -> list[float]:
    """[0, 5, 0, 7]   ->   [1, 5, 3, 7]: column, coefficient, …; whole numbers as such."""
    found: list[float] = []
    for column in np.flatnonzero(vector).tolist():
        coefficient = float(vector[column])
        found += [column, int(coefficient) if coefficient.is_integer() else coefficient]
    return found


def counted(numbers: Iterable[int]) -> list[int]:
    """[3, 3, 5]   ->   [3, 2, 5, 1]: number, how many, …"""
    return [number for pair in sorted(Counter(numbers).items()) for number in pair]

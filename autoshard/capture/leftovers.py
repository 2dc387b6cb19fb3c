"""Tensors without values that code around the modules kept of a recorded run: the next forward would be given them.

    @lru_cache                                   recorded   table(5) ──▶ a tensor without values, remembered
    def table(self, n): ...                      later      table(5) ──▶ the same, and the model's results are wrong

What modules have is put back after a run (see `stand_in.py`). Of what is anywhere else, function caches are emptied and
entries of dicts taken out, as whoever has a cache is prepared not to find something there.
"""

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

from autoshard.collector import all_listed

_DEPTH = 4
"""Caches are looked into so deep: entries, tuples in them, lists and dicts in those."""


class LeftBehind(Exception):
    """Somebody keeps a tensor that has no values."""


def forget(left: Callable[[], list[torch.Tensor]], *, failed: bool = False) -> None:
    """Take the tensors that `left` finds out of caches.

    Raises `LeftBehind` if some are still there after that, unless the run `failed`: its frames are there, too.
    """
    if not left():
        return
    if not failed:
        gc.collect()  # most are in cycles that nobody has
    if not (found := left()):
        return
    with all_listed():
        ours = {id(tensor) for tensor in found}
        for cache in [item for item in gc.get_objects() if type(item) is functools._lru_cache_wrapper]:
            if _holds(cache, ours):
                cache.cache_clear()
        _take_out(found)
    del found
    if not failed and (rest := left()):
        raise LeftBehind(
            f"a tensor of shape {tuple(rest[0].shape)} without values is kept outside of the model's modules, so the "
            "next forward would be given it"
        )


def _holds(cache: Any, ours: set[int]) -> bool:
    """Whether one of the tensors is in a function's cache."""
    level, seen = [cache], set[int]()
    for _ in range(_DEPTH):
        level = [item for item in gc.get_referents(*level) if id(item) not in seen and _is_entry(item)]
        if any(id(item) in ours for item in level):
            return True
        seen.update(map(id, level))
    return False


def _is_entry(item: Any) -> bool:
    return isinstance(item, (torch.Tensor, tuple, list, dict)) or type(item).__name__ == "_lru_list_elem"


def _take_out(items: list[Any], depth: int = 2) -> None:
    """Delete the entries of dicts that are one of some objects, or a tuple or list with one; attributes stay.

    To find what refers to objects Python looks at all there are: at once for all of them.
    """
    ours = {id(item) for item in items}
    holders = [holder for holder in gc.get_referrers(*items) if holder is not items]
    tables = [holder for holder in holders if isinstance(holder, dict)]
    attributes = _attributes_among(tables)
    for table in tables:
        if id(table) not in attributes:
            for key in [key for key, value in table.items() if id(value) in ours]:
                del table[key]
    around = [holder for holder in holders if isinstance(holder, (tuple, list))]
    if around and depth:
        _take_out(around, depth - 1)


def _attributes_among(tables: list[dict]) -> set[int]:
    """Addresses of the dicts that are what an object, a class or a module file has."""
    found = set[int]()
    for owner in gc.get_referrers(*tables) if tables else ():
        own = gc.get_referents(owner) if isinstance(owner, type) else [getattr(owner, "__dict__", None)]
        found.update(map(id, own))
    return found

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
    ours = {id(tensor) for tensor in found}
    for cache in [item for item in gc.get_objects() if type(item) is functools._lru_cache_wrapper]:
        if _holds(cache, ours):
            cache.cache_clear()
    while found:
        _take_out(found.pop())
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


def _take_out(item: Any, depth: int = 2) -> None:
    """Delete the entries of dicts that are an object, or a tuple or list with it; attributes stay."""
    for holder in gc.get_referrers(item):
        if isinstance(holder, dict) and not _are_attributes(holder):
            for key in [key for key, value in holder.items() if value is item]:
                del holder[key]
        elif isinstance(holder, (tuple, list)) and depth:
            _take_out(holder, depth - 1)


def _are_attributes(table: dict) -> bool:
    """Whether a dict is what an object, a class or a module file has."""
    owners = gc.get_referrers(table)
    return any(isinstance(owner, type) or getattr(owner, "__dict__", None) is table for owner in owners)

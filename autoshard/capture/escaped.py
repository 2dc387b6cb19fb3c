"""Tensors without values that somebody still has after a recorded run: the next forward would be given them."""

import gc
import traceback
from collections.abc import Callable
from itertools import repeat
from operator import is_not
from types import FrameType
from typing import Any

import torch

from autoshard.collector import all_listed
from autoshard.errors import CaptureError

_STEPS = 6
"""So far the way from a tensor to a name is followed."""


def clear_frames(error: BaseException) -> None:
    """Let go of what the functions that an error went through had."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            todo += [one.__cause__, one.__context__]


def refuse_kept(left: Callable[[], list[torch.Tensor]]) -> None:
    """Raise CaptureError if `left` finds tensors that somebody has."""
    if not left():
        return
    gc.collect()  # most are in cycles that nobody has
    if found := left():
        with all_listed():
            place = _place(found)
        raise CaptureError(
            f"a tensor of shape {tuple(found[0].shape)} that stands for one of the model's while it is recorded, and "
            f"has no values, was kept {place}. Call the model once before, so that this is filled already, "
            "or keep it on a module."
        )


def _place(found: list[torch.Tensor]) -> str:
    """Where the first of these is kept: a name that leads to it."""
    chain: list[Any] = [found[0]]
    ours = [found, chain]
    way = ""
    while len(chain) < _STEPS:
        holders = gc.get_referrers(chain[-1])
        ours.append(holders)
        others = []
        for holder in holders:
            if not isinstance(holder, FrameType) and all(map(is_not, repeat(holder), ours)):
                others.append(holder)
        ours.append(others)
        for holder in others:
            if owner := _owner(holder):
                return f"as {_key(holder, chain[-1])!r} of {owner}{way}"
        if not others:
            break
        way = f", in a {type(others[0]).__name__}{way}"
        chain.append(others[0])
    return f"outside of the model{way}"


def _key(table: dict, item: Any) -> str:
    for key, value in table.items():
        if value is item:
            return str(key)
    return ""


def _owner(table: Any) -> str:
    """The file, the class or the object whose names or attributes a dict holds."""
    if type(table) is not dict:
        return ""
    if "__name__" in table and "__spec__" in table:
        return f"the file {table['__name__']}"
    for owner in gc.get_referrers(table):
        if isinstance(owner, type):
            return f"the class {owner.__module__}.{owner.__qualname__}"
        if getattr(owner, "__dict__", None) is table:
            return f"a {type(owner).__module__}.{type(owner).__qualname__}"
    return ""

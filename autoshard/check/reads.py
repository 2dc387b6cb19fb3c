"""Which attributes of modules code reads while it runs: another value of any other one changes nothing."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from autoshard.capture.user_code import is_of_torch

ALL = "__dict__"
"""Read by code which may so have read any attribute."""
_one_at_a_time = threading.Lock()
"""What reads attributes of modules is one for all threads, of which several may plan."""


@contextmanager
def noted_reads(model: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Inside, (module path, attribute) of what is read of modules of a model is noted."""
    paths = {id(module): path for path, module in model.named_modules()}
    read: set[tuple[str, str]] = set()

    def look(module: nn.Module, name: str) -> Any:
        path = paths.get(id(module))
        if path is not None and (name != ALL or not is_of_torch(sys._getframe(1).f_code.co_filename)):
            read.add((path, name))
        return object.__getattribute__(module, name)

    with _one_at_a_time:
        nn.Module.__getattribute__ = look  # type: ignore[assignment, method-assign]
        try:
            yield read
        finally:
            del nn.Module.__getattribute__

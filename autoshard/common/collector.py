"""The garbage collector: held off where very many objects are made that all stay, and asked for all there are."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside; after, it is as it was."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def all_listed() -> Iterator[None]:
    """Inside, the collector tells of what `gc.freeze` hides from it, too: servers do so before they fork."""
    hidden = gc.get_freeze_count()
    gc.unfreeze()
    try:
        yield
    finally:
        if hidden:
            gc.freeze()

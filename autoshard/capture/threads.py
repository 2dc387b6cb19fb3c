"""Work that a forward gives to other threads: a mode acts in one thread, so what runs there would be missed."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from autoshard.capture.user_code import calling_line
from autoshard.torch_private import DispatchMode

_DEVICE = torch.ops.prim.device.default


@contextmanager
def watched_threads(note: Callable[[str], None]) -> Iterator[None]:
    """Inside, tell `note` of tensor operations in threads that this one starts or gives work to."""
    here = threading.get_ident()
    threads: Any = threading.Thread
    pool: Any = ThreadPoolExecutor
    start, submit = threads.start, pool.submit

    def passing_on(function: Callable[..., Any]) -> Callable[..., Any]:
        what = f"work given to another thread at {calling_line()} runs tensor operations"

        def run(*args: Any, **kwargs: Any) -> Any:
            with _Ops(note, what):
                return function(*args, **kwargs)

        return run

    def started(thread: Any) -> None:
        if threading.get_ident() == here:
            thread.run = passing_on(thread.run)
        start(thread)

    def submitted(self: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        return submit(self, passing_on(function) if threading.get_ident() == here else function, *args, **kwargs)

    threads.start, pool.submit = started, submitted
    try:
        yield
    finally:
        threads.start, pool.submit = start, submit


class _Ops(DispatchMode):
    """Notes that an op ran."""

    def __init__(self, note: Callable[[str], None], what: str) -> None:
        super().__init__()
        self._note, self._what = note, what

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not _DEVICE:
            self._note(self._what)
        return func(*args, **(kwargs or {}))

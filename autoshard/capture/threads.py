"""Work that a forward gives to other threads: a mode acts in one thread, so what runs there would be missed.

pool.map(layer, xs)                 ops run in threads of the pool: the capture is refused
Thread(target=log, args=(…)).start() no ops: nothing to record
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import torch

from autoshard.errors import CaptureError
from autoshard.torch_private import DispatchMode

PATIENCE_SECONDS = 60.0
"""So long a capture waits for work that a forward gave away and did not wait for."""
_DEVICE = torch.ops.prim.device.default


class Elsewhere:
    """Notes what ran outside of the thread that is recorded."""

    def __init__(self, say_where: Callable[[], str]) -> None:
        self._say_where = say_where
        self._thread = threading.get_ident()
        self._found: list[str] = []
        self._given: list[Future] = []

    def is_here(self) -> bool:
        """Whether this is the thread that is recorded."""
        return threading.get_ident() == self._thread

    def note(self, what: str) -> None:
        """Something that the capture can't record happened; the run goes on, as other threads may wait for it."""
        self._found.append(what)

    def refuse(self) -> None:
        """Raise CaptureError if anything was noted."""
        if self._found:
            raise CaptureError(
                f"{self._found[0]}, which can't be recorded. Do this work in the thread that calls forward, and call "
                "the model in no other thread while it is planned for."
            )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, note ops in threads that this one starts or gives work to."""
        kinds: tuple[Any, ...] = (ThreadPoolExecutor, ProcessPoolExecutor)
        threads: Any = threading.Thread
        start, submits = threads.start, [kind.submit for kind in kinds]

        def started(thread: Any) -> None:
            if self.is_here():
                run, place = thread.run, self._say_where()

                def watched() -> None:
                    del thread.run
                    with _Ops(self, f"a thread started at {place} runs tensor operations"):
                        run()

                thread.run = watched
            start(thread)

        def submitted(submit: Any) -> Any:
            def give(pool: Executor, function: Any, /, *args: Any, **kwargs: Any) -> Any:
                if not self.is_here():
                    return submit(pool, function, *args, **kwargs)
                place = self._say_where()
                if isinstance(pool, ProcessPoolExecutor):
                    self.note(f"work was given to another process at {place}")
                    return submit(pool, function, *args, **kwargs)
                self._given.append(submit(pool, self._watched, place, function, args, kwargs))
                return self._given[-1]

            return give

        threads.start = started
        for kind, submit in zip(kinds, submits, strict=True):
            kind.submit = submitted(submit)
        try:
            yield
        finally:
            threads.start = start
            for kind, submit in zip(kinds, submits, strict=True):
                kind.submit = submit
            wait(self._given, timeout=PATIENCE_SECONDS)  # what has tensors of the run ends before it
            self._given.clear()

    def _watched(self, place: str, function: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        with _Ops(self, f"work given to a pool of threads at {place} runs tensor operations in another thread"):
            return function(*args, **kwargs)


class _Ops(DispatchMode):
    """Notes that an op ran."""

    def __init__(self, elsewhere: Elsewhere, what: str) -> None:
        super().__init__()
        self._elsewhere, self._what = elsewhere, what

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not _DEVICE:
            self._elsewhere.note(self._what)
        return func(*args, **(kwargs or {}))

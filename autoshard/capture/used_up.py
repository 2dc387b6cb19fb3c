"""What goes on when it is used and can't be set back: generators, counters and queues that a forward takes from."""

import itertools
import operator
import queue
from types import GeneratorType
from typing import Any

ONWARD: tuple[type, ...] = (
    GeneratorType, itertools.count, queue.SimpleQueue, type(iter([])), type(iter(())), type(iter(range(1))),
    type(iter({})), type(iter({}.values())), type(iter({}.items())), type(iter(set())), type(iter(""))
)  # fmt: skip


def place_of(item: Any) -> Any:
    """Where one of `ONWARD` is now, for `has_run_on`."""
    if isinstance(item, GeneratorType):
        frame = item.gi_frame
        return None if frame is None else (frame.f_lasti, *frame.f_locals.values())
    if isinstance(item, itertools.count):
        return (repr(item),)
    return (item.qsize() if isinstance(item, queue.SimpleQueue) else operator.length_hint(item, -1),)


def has_run_on(item: Any, place: Any) -> bool:
    """Whether it is elsewhere than it was."""
    now = place_of(item)
    if now is None or place is None:
        return now is not place
    return len(now) != len(place) or any(
        one is not other and not (isinstance(one, (int, str)) and one == other)
        for one, other in zip(now, place, strict=True)
    )


def described(item: Any) -> str:
    """What it is, in words."""
    if isinstance(item, GeneratorType):
        return f"a generator ({item.__qualname__})"
    return f"a {type(item).__module__}.{type(item).__qualname__}".replace("builtins.", "").replace("_queue.", "queue.")

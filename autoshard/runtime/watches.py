"""Which modules are running whose calls of torch functions are watched, by thread."""

import threading
from typing import Any


class _Entered(threading.local):
    def __init__(self) -> None:
        self.watches: list[Any] = []


_entered = _Entered()


def entered() -> list[Any]:
    """The watches that this thread has entered, the innermost last."""
    return _entered.watches


def innermost() -> Any:
    """The watch that this thread entered last, None if it is in none."""
    return _entered.watches[-1] if _entered.watches else None

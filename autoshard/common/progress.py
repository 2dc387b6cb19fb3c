"""How far long work has come: packages tell it, and who started the work may show it.

with shown_progress("capturing"):       # a bar on stderr, if that is a terminal
    ...                                 # tell("modules", done, total) anywhere below
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Watcher = Callable[[str, int, int | None], None]

_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


def tell(unit: str, done: int, total: int | None = None) -> None:
    """Tell who watches, if anyone, that `done` of `total` (None: not known) are done; `unit` is "bytes", "ops", …"""
    watcher = _watcher.get()
    if watcher is not None:
        watcher(unit, done, total)


def watcher() -> Watcher | None:
    """Who watches, None if nobody does."""
    return _watcher.get()


@contextlib.contextmanager
def watched_by(watcher: Watcher | None) -> Iterator[None]:
    """Have everything told inside the block go to `watcher`; None for nobody."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


@contextlib.contextmanager
def shown_progress(what: str, show: Callable[[int, int], None] | bool | None = None) -> Iterator[None]:
    """Show on stderr what is being done, how much of it, and how fast.

    `show`: None for where stderr is a terminal; or a function that is called with how much is done, and with all of it.
    Work that tells nothing has a bar that only moves. Inside another such block the bar of that one shows it.
    """
    if callable(show):
        with watched_by(lambda unit, done, total: show(done, total or 0)):
            yield
        return
    if show is False or (show is None and not sys.stderr.isatty()) or _watcher.get() is not None:
        yield
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=20),
        progress.TextColumn("{task.fields[amount]}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None, amount="")
        unit_before = ""

        def update(unit: str, done: int, total: int | None) -> None:
            nonlocal unit_before
            if unit != unit_before:  # other work has begun, whose rate is another
                bars.reset(task, total=None)
                unit_before = unit
            bars.update(task, completed=done, total=total, amount=_amount(unit, done, total, bars.tasks[0].speed))

        with watched_by(update):
            yield


def _amount(unit: str, done: int, total: int | None, rate: float | None) -> str:
    """Say "1,200 of 3,400 ops, 560 ops/s"; bytes in the decimal units that disks and links are sold in."""

    def text(amount: float) -> str:
        return f"{amount / 1e9:,.2f} GB" if unit == "bytes" else f"{amount:,.0f} {unit}"

    of = f" of {text(total)}" if total is not None else ""
    speed = "" if not rate else f", {text(rate)}/s" if rate >= 1 else f", {1 / rate:.1f} s each"
    counted = f"{done / 1e9:,.2f}" if unit == "bytes" and of else f"{done:,}" if of else text(done)
    return f"{counted}{of}{speed}"

"""A bar for what takes long, with its rate; only on a terminal unless asked for."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def shown_progress(show: bool | None = None) -> Iterator[Callable[[int, int], None] | None]:
    """Give what is called with bytes done and bytes in all; None where nothing is shown.

    `show`: None for a bar if stderr is a terminal.
    """
    if show is False or (show is None and not sys.stderr.isatty()):
        yield None
        return
    try:
        from rich import progress as parts
        from rich.console import Console
    except ImportError:
        yield None
        return
    columns = (
        parts.TextColumn("loading"),
        parts.BarColumn(),
        parts.DownloadColumn(binary_units=True),
        parts.TransferSpeedColumn(),
        parts.TimeRemainingColumn(),
    )
    with parts.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

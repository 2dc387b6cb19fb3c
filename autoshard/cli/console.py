"""What the commands share: two consoles, progress on a terminal, errors turned into exit statuses."""

import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from autoshard.common.progress import shown_progress
from autoshard.common.start import INTERRUPTED
from autoshard.errors import AutoshardError, SpecError

if TYPE_CHECKING:
    from rich.console import Console

IMPOSSIBLE = 1
"""Exit status: the request makes sense and can't be met."""
WRONG_USAGE = 2
"""Exit status: the request makes no sense."""

Command = TypeVar("Command", bound=Callable[..., Any])


def output() -> "Console":
    """The console for results: colour only on a terminal and without NO_COLOR, 80 columns where there is none."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def errors() -> "Console":
    """The console for everything that is not a result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def reports_errors(command: Command) -> Command:
    """Turn what autoshard raises into its message on stderr and an exit status."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except AutoshardError as error:
            console = errors()
            console.print("Error:", style="bold red", end=" ")
            console.print(str(error), markup=False, style=None, soft_wrap=not console.is_terminal)
            raise typer.Exit(WRONG_USAGE if isinstance(error, SpecError) else IMPOSSIBLE) from None

    return run  # type: ignore[return-value]


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show how far it has come while it takes long, on a terminal only; what the model's code prints goes to stderr."""
    with shown_progress(what), contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))

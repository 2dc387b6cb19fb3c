"""What the commands share: two consoles, progress on a terminal, errors turned into exit statuses."""

import contextlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any

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


def output() -> "Console":
    """The console for results: colour only on a terminal and without NO_COLOR, 80 columns where there is none."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=False)


def errors() -> "Console":
    """The console for everything that is not a result."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def command(run: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command: what autoshard raises becomes its message on stderr and an exit status.

    A parameter that is a dataclass (`options.py`) stands for an option per field.
    """
    wanted = inspect.signature(run).parameters.values()
    groups: dict[str, Any] = {one.name: one.annotation for one in wanted if is_dataclass(one.annotation)}

    def started(**given: Any) -> None:
        try:
            for name, kind in groups.items():
                given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            run(**given)
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except AutoshardError as error:
            console = errors()
            console.print("Error:", style="bold red", end=" ")
            console.print(str(error), markup=False, style=None, soft_wrap=not console.is_terminal)
            raise typer.Exit(WRONG_USAGE if isinstance(error, SpecError) else IMPOSSIBLE) from None

    started.__doc__ = run.__doc__
    typed = [option for one in wanted for option in _options(one)]
    started.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    return started


def _options(parameter: Parameter) -> list[Parameter]:
    """The parameters by which typer knows one of a command, by name only."""
    if not is_dataclass(parameter.annotation):
        return [parameter.replace(kind=Parameter.KEYWORD_ONLY)]
    return [
        Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=one.type)
        for one in fields(parameter.annotation)
    ]


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Show how far it has come while it takes long, on a terminal only; what the model's code prints goes to stderr."""
    with shown_progress(what), contextlib.redirect_stdout(sys.stderr):
        yield


def print_json(document: Any) -> None:
    """Print one JSON document on stdout."""
    typer.echo(json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False))

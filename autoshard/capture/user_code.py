"""Lines of code that are neither torch's nor ours: where something of the user's happened."""

import inspect
import pathlib
import traceback
from types import FrameType
from typing import Any

import torch

import autoshard.errors
from autoshard import nested

_OWN = str(pathlib.Path(autoshard.errors.__file__).parent)
_TORCH = str(pathlib.Path(torch.__file__).parent)
_PYTHON = str(pathlib.Path(inspect.__file__).parent / "concurrent")

_CAPTURE = str(pathlib.Path(__file__).parent / "run.py")
_SKIPPED = (_OWN, _TORCH, _PYTHON, "<")
_LINES = "autoshard_lines"

NOWHERE = "no line of the model's code: in its call, in backward or in torch itself"


def drop_frames(error: BaseException) -> None:
    """Note on an error, and on those it came of, which lines it went through; let go of what these functions had.

    The lines are told in a note in place of the traceback. Clearing frames is not enough: a function with a closure
    keeps what is in there, such as torch's own around the forward of a module that has hooks. Tensors among the
    arguments and attributes of the errors are replaced by words.
    """
    todo: list[BaseException | None] = [error]
    while todo:
        one = todo.pop()
        if one is not None and one.__traceback__ is not None:
            lines = traceback.extract_tb(one.__traceback__)
            setattr(one, _LINES, lines)
            one.add_note("It came up at (most recent call last):\n" + "".join(lines.format()))
            traceback.clear_frames(one.__traceback__)
            one.__traceback__ = None
            _let_go_of_tensors(one)
            todo += [one.__cause__, one.__context__]


def _let_go_of_tensors(error: BaseException) -> None:
    error.args = nested.map_tensors(error.args, _in_words)
    for name, item in vars(error).items():
        if nested.flat_tensors(item):
            setattr(error, name, nested.map_tensors(item, _in_words))
    if isinstance(error, AttributeError):
        error.obj = None  # whose attribute it was: the message says so


def _in_words(tensor: torch.Tensor) -> Any:
    return f"tensor of shape {tuple(tensor.shape)}"


def files_and_lines(error: BaseException) -> list[tuple[str, int]]:
    """What an error went through, the innermost last, as noted by `drop_frames`."""
    return [(line.filename, line.lineno or 0) for line in getattr(error, _LINES, ())]


def place(error: BaseException) -> str:
    """file:line of the innermost line of an error that is neither torch's nor ours: the user's own code."""
    own = [f"{file}:{line}" for file, line in files_and_lines(error) if not file.startswith((_OWN, _TORCH, "<"))]
    return own[-1] if own else NOWHERE


def is_own(file: str) -> bool:
    """Whether a file is one of ours."""
    return file.startswith((_OWN, "<"))


def is_of_torch(file: str) -> bool:
    """Whether a file is one of torch's."""
    return file.startswith(_TORCH)


def is_capture(frame: FrameType) -> bool:
    """Whether a frame is that of the capture of a model: all outside of it is no code of the model."""
    return frame.f_code.co_filename == _CAPTURE and frame.f_code.co_name == "_run_model"


def calling_line() -> str:
    """file:line of the user's code that is running now."""
    file, line, _ = calling_code()
    return f"{file}:{line}" if file else "an unknown line"


def calling_code() -> tuple[str, int, str]:
    """(file, line, function) of the user's code that is running now; ("", 0, "") if there is none.

    What called for the capture of a model that is torch's own is no code of the model.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if is_capture(frame):
            break
        if not file.startswith(_SKIPPED):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return "", 0, ""
